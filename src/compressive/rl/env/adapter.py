"""Any Gymnasium environment with discrete actions, and images or vectors as observations, as a `Task`."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from compressive.config.agent import TaskConfig
from compressive.rl.env.task import Transition

LAB = "lab:"


class GymnasiumTask:
    """Copies of one Gymnasium environment, stepped one after the other on the CPU. It cannot be saved.

    Raises ValueError if Gymnasium does not know the id, cannot render it, or if actions or observations are of another
    kind.
    """

    state = None  # it is in Gymnasium's hands

    def __init__(self, config: TaskConfig, seed: int, device: torch.device, render: bool = False) -> None:
        self.name, self.n_envs, self.device, self.seed = config.name, config.envs, device, seed
        try:
            makers = [lambda: _make(config, render)] * config.envs
            self.vector_env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        except gymnasium.error.Error as error:
            raise ValueError(f"task {config.name!r}: Gymnasium cannot make it ({error})") from error
        observations, actions = self.vector_env.single_observation_space, self.vector_env.single_action_space
        if not isinstance(actions, Discrete):
            raise ValueError(f"task {config.name!r}: its actions are {actions}; expected discrete actions")
        shape: tuple[int, ...] = observations.shape if isinstance(observations, Box) else ()
        if len(shape) != 1 and not (len(shape) in (2, 3) and observations.dtype == np.uint8):
            raise ValueError(
                f"task {config.name!r}: its observations are {observations}; expected images (H, W, C) of bytes or "
                "vectors; use a wrapper"
            )
        self.first_action, self.n_actions = int(actions.start), int(actions.n)
        self.observation_shape: tuple[int, ...] = (*shape, 1) if len(shape) == 2 else shape

    def reset(self, seed: int | None = None) -> Tensor:
        """Start a new episode in every environment; return the observations."""
        observation, _ = self.vector_env.reset(seed=self.seed if seed is None else seed)
        return self._tensor(observation)

    def step(self, action: Tensor) -> Transition:
        """Take one action per environment, (B,) int64."""
        observation, reward, terminated, truncated, _ = self.vector_env.step(action.cpu().numpy() + self.first_action)
        done = torch.from_numpy(terminated | truncated).to(self.device)
        no = torch.zeros_like(done)
        return Transition(self._tensor(observation), torch.from_numpy(reward).float().to(self.device), done, no, no)

    def view(self) -> Tensor | None:
        """Return what the environments render, (B, H, W, 3) uint8; None if they were not made for that or cannot."""
        if self.vector_env.render_mode != "rgb_array":
            return None
        try:
            frames = self.vector_env.render()
        except gymnasium.error.Error as error:  # most often a package that is missing
            raise ValueError(f"task {self.name!r}: Gymnasium cannot render it ({error})") from error
        if frames is None or any(not isinstance(frame, np.ndarray) for frame in frames):
            return None
        return torch.from_numpy(np.stack(frames))

    def stagger(self) -> None:
        """Do nothing: Gymnasium cannot begin in the middle of an episode."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: Gymnasium cannot save a state, so a resumed run starts new episodes."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Do nothing."""

    def _tensor(self, observation: Any) -> Tensor:
        tensor = torch.from_numpy(np.array(observation)).reshape(self.n_envs, *self.observation_shape)
        return (tensor if tensor.dtype == torch.uint8 else tensor.float()).to(self.device)


def _make(config: TaskConfig, render: bool) -> gymnasium.Env[Any, Any]:
    if config.name.startswith(LAB):
        from compressive.rl.env.dmlab import LabEnv

        return LabEnv(config.name.removeprefix(LAB), config.width, config.height)
    return gymnasium.make(config.name, render_mode="rgb_array" if render else None)
