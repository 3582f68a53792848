"""Importing this module registers `compressive/Rooms-v0` with Gymnasium.

The environments are in `compressive.rl.env.gym`. This module keeps the short, documented import path.
"""

from compressive.rl.env.gym import ID, RoomsEnv, RoomsVectorEnv

__all__ = ["ID", "RoomsEnv", "RoomsVectorEnv"]
