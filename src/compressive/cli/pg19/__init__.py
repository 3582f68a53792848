"""The commands that build PG-19 and look at it, one module each."""
