"""Corpora: where they come from, how they become tokens, and how tokens become batches."""
