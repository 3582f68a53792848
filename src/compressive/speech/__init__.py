"""Speech: baselines, audio generation, spectrograms and WaveNet; training and evaluation are shared with text."""
