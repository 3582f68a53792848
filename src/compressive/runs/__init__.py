"""A run on disk: its folder, its checkpoints, its trained weights and its export."""
