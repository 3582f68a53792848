"""Anything that Gymnasium has, as lanes for our agent: pictures or vectors to see, a few actions to choose from."""

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
    """Lanes of a Gymnasium environment, by its id, played one after the other on the CPU; it cannot be saved."""

    def __init__(self, config: TaskConfig, seed: int, device: torch.device) -> None:
        self.lanes, self.device, self.seed = config.lanes, device, seed
        try:
            makers = [lambda: _make(config)] * config.lanes
            self.lanes_of = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        except gymnasium.error.Error as error:
            raise ValueError(f"task {config.name!r}: Gymnasium cannot make it ({error})") from error
        seen, actions = self.lanes_of.single_observation_space, self.lanes_of.single_action_space
        if not isinstance(actions, Discrete):
            raise ValueError(
                f"task {config.name!r}: its actions are {actions}; expected a number of them to choose from"
            )
        shape: tuple[int, ...] = seen.shape if isinstance(seen, Box) else ()
        if len(shape) != 1 and not (len(shape) in (2, 3) and seen.dtype == np.uint8):
            raise ValueError(
                f"task {config.name!r}: it shows {seen}; expected pictures (H, W, C) of bytes, or vectors; wrap it"
            )
        self.first_action, self.n_actions = int(actions.start), int(actions.n)
        self.observation_shape: tuple[int, ...] = (*shape, 1) if len(shape) == 2 else shape

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin anew in every lane."""
        first, _ = self.lanes_of.reset(seed=self.seed if seed is None else seed)
        return self._tensor(first)

    def step(self, action: Tensor) -> Transition:
        """Take one action per lane."""
        seen, reward, ended, cut, _ = self.lanes_of.step(action.cpu().numpy() + self.first_action)
        done = torch.from_numpy(ended | cut).to(self.device)
        no = torch.zeros_like(done)
        return Transition(self._tensor(seen), torch.from_numpy(reward).float().to(self.device), done, no, no)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: Gymnasium knows no way to keep a state, so a resumed run begins new episodes."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Nothing to be read."""

    def _tensor(self, seen: Any) -> Tensor:
        tensor = torch.from_numpy(np.array(seen)).reshape(self.lanes, *self.observation_shape)
        return (tensor if tensor.dtype == torch.uint8 else tensor.float()).to(self.device)


def _make(config: TaskConfig) -> gymnasium.Env[Any, Any]:
    if config.name.startswith(LAB):
        from compressive.rl.env.dmlab import LabEnv

        return LabEnv(config.name.removeprefix(LAB), config.width, config.height)
    return gymnasium.make(config.name)
