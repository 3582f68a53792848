"""What an agent acts in: the rooms, Gymnasium environments and DeepMind Lab, behind one interface."""
