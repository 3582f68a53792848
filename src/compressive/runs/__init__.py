"""A run on disk: folder, checkpoints, trained weights, export."""
