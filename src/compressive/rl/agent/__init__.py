"""The agent's network: encoder, memory core, policy and value."""
