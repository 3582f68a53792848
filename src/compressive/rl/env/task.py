"""What our agents can act in: lanes of a task, behind one interface, and the way from its name to it."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compressive.config.agent import TaskConfig


class Transition(NamedTuple):
    """What a step gives, lane by lane; a lane whose episode ended shows the next one's beginning."""

    observation: Tensor  # (B, ...)
    reward: Tensor  # (B,)
    done: Tensor  # (B,), bool: the episode ended with this step
    right: Tensor  # (B,), bool: a right choice was made; where a task knows of such
    wrong: Tensor  # (B,), bool


class Task(Protocol):
    """Lanes of something to act in; a lane whose episode has ended begins another by itself."""

    n_actions: int
    lanes: int
    observation_shape: tuple[int, ...]
    """Pictures (H, W, C) of bytes, or vectors (n,)."""

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin anew in every lane; give the observations, (B, ...)."""

    def step(self, action: Tensor) -> Transition:
        """Take one action per lane."""

    def state_dict(self) -> dict[str, Tensor]:
        """All that is needed to go on; nothing where a task cannot."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""


def build_task(config: TaskConfig, seed: int, device: torch.device, compile: bool = False) -> Task:
    """Build the task that a configuration names."""
    if config.name == "rooms":
        from compressive.rl.env.rooms import Rooms

        return Rooms(config, seed, device, compile)
    try:
        from compressive.rl.env.adapter import GymnasiumTask
    except ImportError as error:
        raise ValueError(f"task {config.name!r}: needs Gymnasium; pip install 'compressive[rl]' ({error})") from None
    return GymnasiumTask(config, seed, device)
