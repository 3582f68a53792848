"""Speech: its data, its floors, and WaveNet; the trunk, the trainer and the evaluation are those of text."""
