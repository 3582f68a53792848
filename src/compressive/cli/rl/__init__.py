"""The commands around the agent, one module each."""
