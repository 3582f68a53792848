"""Evaluation: read a run, produce numbers."""
