"""Environments behind one interface: the rooms, any Gymnasium environment, and DeepMind Lab."""
