"""The rooms as Gymnasium environments, for other agents: one environment, or many in one tensor program.

import gymnasium
import compressive.rl.gym

env = gymnasium.make("compressive/Rooms-v0", render_mode="rgb_array")
envs = gymnasium.make_vec("compressive/Rooms-v0", num_envs=64, delays=(0, 64))
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from compressive.config.agent import TaskConfig
from compressive.rl.env.rooms import Rooms
from compressive.rl.env.task import Transition

ID = "compressive/Rooms-v0"
_METADATA = {"render_modes": ["rgb_array"], "render_fps": 15}


class RoomsEnv(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """One environment. `options` are fields of TaskConfig, except `name` and `envs`."""

    metadata = _METADATA  # Gymnasium reads this from the class

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = render_mode
        self.task = Rooms(TaskConfig(envs=1, **options))
        self.observation_space = Box(0, 255, self.task.observation_shape, np.uint8)
        self.action_space = Discrete(self.task.n_actions)
        self.observation = np.zeros(self.task.observation_shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode. Without a seed, episodes differ from reset to reset."""
        super().reset(seed=seed)
        self.observation = self.task.reset(int(self.np_random.integers(2**31)))[0].numpy()
        return self.observation, {}

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Take a step. The time limit counts as termination, not as truncation: it is part of the task."""
        transition = self.task.step(torch.tensor([int(action)]))
        self.observation = transition.observation[0].numpy()
        info = {name: bool(values[0]) for name, values in _info(transition).items()}
        return self.observation, float(transition.reward), bool(transition.done), False, info

    def render(self) -> NDArray[np.uint8] | None:
        """Return the current observation, if render_mode is rgb_array."""
        return self.observation if self.render_mode == "rgb_array" else None


class RoomsVectorEnv(VectorEnv[NDArray[np.uint8], NDArray[np.int64], NDArray[Any]]):
    """Many environments in one tensor program. One whose episode ended returns the next one's first observation."""

    metadata = _METADATA | {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        device: str = "cpu",
        compile: bool = False,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.num_envs, self.device, self.render_mode = num_envs, device, render_mode
        self.task = Rooms(TaskConfig(envs=num_envs, **options), device=device, compile=compile)
        self.single_observation_space = Box(0, 255, self.task.observation_shape, np.uint8)
        self.single_action_space = Discrete(self.task.n_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation = np.zeros((num_envs, *self.task.observation_shape), np.uint8)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode in every environment. One seed serves all; a list raises ValueError."""
        if isinstance(seed, list):
            raise ValueError(f"seed={seed}: expected one number, from which each environment's key follows")
        super().reset(seed=seed)
        self.observation = self.task.reset(int(self.np_random.integers(2**31))).cpu().numpy()
        return self.observation, {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Take one action per environment."""
        transition = self.task.step(torch.as_tensor(np.asarray(actions), device=self.device))
        self.observation = transition.observation.cpu().numpy()
        done = transition.done.cpu().numpy()
        return self.observation, transition.reward.cpu().numpy(), done, np.zeros_like(done), _info(transition)

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Return the current observation of each environment, if render_mode is rgb_array."""
        return tuple(self.observation) if self.render_mode == "rgb_array" else None


def _info(transition: Transition) -> dict[str, Any]:
    return {"right": transition.right.cpu().numpy(), "wrong": transition.wrong.cpu().numpy()}


if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point=RoomsEnv, vector_entry_point=RoomsVectorEnv)
