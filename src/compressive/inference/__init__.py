"""Inference: sample text or audio from a model, one token at a time."""
