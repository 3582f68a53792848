"""Training: one straight loop; schedule, checkpoints and metrics beside it."""
