"""The rooms for other people's agents: Gymnasium environments, single and in lanes.

import gymnasium
import compressive.rl.env.gym

env = gymnasium.make("compressive/Rooms-v0", render_mode="rgb_array")
lanes = gymnasium.make_vec("compressive/Rooms-v0", num_envs=64, delays=(0, 64))
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
    """One lane; any field of TaskConfig but name and lanes may be given."""

    metadata = _METADATA  # Gymnasium's own way

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = render_mode
        self.task = Rooms(TaskConfig(lanes=1, **options))
        self.observation_space = Box(0, 255, self.task.observation_shape, np.uint8)
        self.action_space = Discrete(self.task.n_actions)
        self.seen = np.zeros(self.task.observation_shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Begin an episode; without a seed, another one than before."""
        super().reset(seed=seed)
        self.seen = self.task.reset(int(self.np_random.integers(2**31)))[0].numpy()
        return self.seen, {}

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Take a step; the end of the time is an end like any other, as the task is about time."""
        transition = self.task.step(torch.tensor([int(action)]))
        self.seen = transition.observation[0].numpy()
        ended = bool(transition.done)
        return self.seen, float(transition.reward), ended, False, {k: bool(v[0]) for k, v in _info(transition).items()}

    def render(self) -> NDArray[np.uint8] | None:
        """What is seen now."""
        return self.seen if self.render_mode == "rgb_array" else None


class RoomsVectorEnv(VectorEnv[NDArray[np.uint8], NDArray[np.int64], NDArray[Any]]):
    """Many lanes in one tensor program; a lane whose episode ended shows the next one's beginning at once."""

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
        self.task = Rooms(TaskConfig(lanes=num_envs, **options), device=device, compile=compile)
        self.single_observation_space = Box(0, 255, self.task.observation_shape, np.uint8)
        self.single_action_space = Discrete(self.task.n_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.seen = np.zeros((num_envs, *self.task.observation_shape), np.uint8)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Begin anew in every lane; one seed is enough for all of them."""
        if isinstance(seed, list):
            raise ValueError(f"seed={seed}: expected one number, from which each lane's random numbers follow")
        super().reset(seed=seed)
        self.seen = self.task.reset(int(self.np_random.integers(2**31))).cpu().numpy()
        return self.seen, {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Take one action per lane."""
        transition = self.task.step(torch.as_tensor(np.asarray(actions), device=self.device))
        self.seen = transition.observation.cpu().numpy()
        ended = transition.done.cpu().numpy()
        return self.seen, transition.reward.cpu().numpy(), ended, np.zeros_like(ended), _info(transition)

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """What is seen now, lane by lane."""
        return tuple(self.seen) if self.render_mode == "rgb_array" else None


def _info(transition: Transition) -> dict[str, Any]:
    return {"right": transition.right.cpu().numpy(), "wrong": transition.wrong.cpu().numpy()}


if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point=RoomsEnv, vector_entry_point=RoomsVectorEnv)
