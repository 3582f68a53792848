"""From a task's name to lanes of it: the rooms, DeepMind Lab, or anything that Gymnasium has."""

import torch

from compressive.rl.actor import Task
from compressive.rl.config import TaskConfig
from compressive.rl.rooms import Rooms


def build_task(config: TaskConfig, seed: int, device: torch.device, compile: bool = False) -> Task:
    """Build the task that a configuration names."""
    if config.name == "rooms":
        return Rooms(config, seed, device, compile)
    try:
        from compressive.rl.adapter import GymnasiumTask
    except ImportError as error:
        raise ValueError(f"task {config.name!r}: needs Gymnasium; pip install 'compressive[rl]' ({error})") from None
    return GymnasiumTask(config, seed, device)
