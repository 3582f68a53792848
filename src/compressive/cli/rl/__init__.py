"""The commands `compressive rl ...`, one module each."""
