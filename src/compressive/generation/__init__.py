"""Generation: read a run, produce text."""
