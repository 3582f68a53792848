"""Corpora: sources, tokenisers, preparation, and the streams that training reads."""
