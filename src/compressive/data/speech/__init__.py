"""Speech as a corpus: audio files, clips and their splits, codes, and preparation."""
