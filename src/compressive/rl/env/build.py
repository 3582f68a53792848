"""Build the task that a configuration names."""

import torch

from compressive.config.agent import TaskConfig
from compressive.rl.env.task import Task


def build_task(
    config: TaskConfig, seed: int, device: torch.device, compile: bool = False, render: bool = False
) -> Task:
    """Build the task `config.name`: `rooms`, `lab:LEVEL`, or the id of a Gymnasium environment.

    `compile` applies to the rooms only, `render` to Gymnasium environments, which `view` then shows. Raises ValueError
    if the task needs a package that is not installed, if Gymnasium does not know it, or if its observations or actions
    are of an unsupported kind.
    """
    if config.name == "rooms":
        from compressive.rl.env.rooms import Rooms

        return Rooms(config, seed, device, compile)
    try:
        from compressive.rl.env.adapter import GymnasiumTask
    except ImportError as error:
        raise ValueError(f"task {config.name!r}: needs Gymnasium; pip install 'compressive[rl]' ({error})") from None
    return GymnasiumTask(config, seed, device, render)
