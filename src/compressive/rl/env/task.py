"""The interface between agents and environments: B environments of one kind, stepped together."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Transition(NamedTuple):
    """One step of B environments.

    Where an episode ended, the observation is the first one of the next episode.
    """

    observation: Tensor  # (B, H, W, C) uint8, or (B, n) float32
    reward: Tensor  # (B,) float32
    done: Tensor  # (B,) bool: the episode ended with this step
    right: Tensor  # (B,) bool: the right object was chosen; all False in tasks without a choice
    wrong: Tensor  # (B,) bool: the wrong object was chosen


class Task(Protocol):
    """B environments of one kind. They reset themselves: each starts a new episode in the step that ends one."""

    n_actions: int
    n_envs: int
    observation_shape: tuple[int, ...]
    """(H, W, C) for images of bytes, (n,) for vectors."""
    state: Any
    """A TensorRecord of all that changes from step to step, where a step is operations on a device alone; else None."""

    def reset(self, seed: int | None = None) -> Tensor:
        """Start a new episode in every environment; return the observations, (B, *observation_shape)."""

    def step(self, action: Tensor) -> Transition:
        """Take one action per environment, (B,) int64."""

    def view(self) -> Tensor | None:
        """Return an image of every environment as it is now, (B, H, W, 3) uint8; None if the task cannot render."""

    def stagger(self) -> None:
        """Set every environment to a random time of its episode, where the task can."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything needed to continue; empty if the task cannot be saved."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state."""
