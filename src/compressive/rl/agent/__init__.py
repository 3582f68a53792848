"""The agent's network: encoder, memory core, policy head and value head."""
