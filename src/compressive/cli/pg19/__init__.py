"""The commands below `compressive data pg19`, one module each."""
