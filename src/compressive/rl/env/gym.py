"""The rooms as Gymnasium environments, for other agents: one environment, or many in one tensor program.

import gymnasium
import compressive.rl.gym

env = gymnasium.make("compressive/Rooms-v0", render_mode="rgb_array")
envs = gymnasium.make_vec("compressive/Rooms-v0", num_envs=64, delays=(0, 64))
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressive.config.agent import TaskConfig
from compressive.rl.env.rooms import Rooms
from compressive.rl.env.task import Transition

try:
    import gymnasium
    from gymnasium.spaces import Box, Discrete
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError as error:
    raise ImportError(f"needs Gymnasium ({error}): pip install 'compressive[rl]'") from error

ID = "compressive/Rooms-v0"
_METADATA = {"render_modes": ["rgb_array"], "render_fps": 15}


class RoomsEnv(gymnasium.Env[NDArray[Any], np.int64]):
    """One environment. `options` are fields of TaskConfig, except `name` and `envs`."""

    metadata = _METADATA  # Gymnasium reads this from the class

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = render_mode
        self.task = Rooms(TaskConfig(envs=1, **options))
        self.observation_space = _observations(self.task)
        self.action_space = Discrete(self.task.n_actions)
        self.view, self.running = self.task.state, False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Start an episode. Without a seed, episodes differ from reset to reset."""
        super().reset(seed=seed)
        observation = self.task.reset(int(self.np_random.integers(2**31)))[0].numpy()
        self.view, self.running = self.task.state, True
        return observation, {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Take a step. The time limit counts as termination, not as truncation: it is part of the task.

        The observation of the step that ends an episode is the last of that episode. Raises ResetNeeded after it, and
        ValueError for an action out of range.
        """
        if not self.running:
            raise gymnasium.error.ResetNeeded("no episode is running: call reset() first")
        chosen, before = _actions(np.asarray([action]), self.task, "cpu"), self.task.state
        transition = self.task.step(chosen)
        self.view, self.running, seen = self.task.state, not bool(transition.done), transition.observation
        if not self.running:
            self.view = self.task.final_state(before, chosen)
            seen = self.task.observe(self.view)
        info = {name: bool(values[0]) for name, values in _info(transition).items()}
        return seen[0].numpy(), float(transition.reward), bool(transition.done), False, info

    def render(self) -> NDArray[np.uint8] | None:
        """Return the current view, if render_mode is rgb_array."""
        return self.task.render(self.view)[0].numpy() if self.render_mode == "rgb_array" else None


class RoomsVectorEnv(VectorEnv[NDArray[Any], NDArray[np.int64], NDArray[Any]]):
    """Many environments in one tensor program, which reset themselves within the step that ends an episode.

    That step returns the next episode's first observation. The last observation and the info of the one that ended are
    in info["final_obs"] and info["final_info"], as Gymnasium's mode SAME_STEP asks.
    """

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
        self.single_observation_space = _observations(self.task)
        self.single_action_space = Discrete(self.task.n_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Start an episode in every environment. One seed serves all; a list raises ValueError."""
        if isinstance(seed, list):
            raise ValueError(f"seed={seed}: expected one number, from which each environment's key follows")
        super().reset(seed=seed)
        return self.task.reset(int(self.np_random.integers(2**31))).cpu().numpy(), {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Take one action per environment. Raises ValueError for actions out of range or of another number."""
        chosen = _actions(actions, self.task, self.device)
        before = self.task.state
        transition = self.task.step(chosen)
        done = transition.done.cpu().numpy()
        info = _info(transition)
        if done.any():  # rendered anew, which most steps are spared
            last = self.task.observe(self.task.final_state(before, chosen)).cpu().numpy()
            info["final_obs"] = np.full(self.num_envs, None, dtype=object)
            for env in np.flatnonzero(done):
                info["final_obs"][env] = last[env]
            info["final_info"] = {name: values & done for name, values in _info(transition).items()}
            info["final_info"] |= {f"_{name}": done.copy() for name in _info(transition)}
            info["_final_obs"], info["_final_info"] = done.copy(), done.copy()
        observation = transition.observation.cpu().numpy()
        return observation, transition.reward.cpu().numpy(), done, np.zeros_like(done), info

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Return the current view of each environment, if render_mode is rgb_array."""
        return tuple(self.task.view().cpu().numpy()) if self.render_mode == "rgb_array" else None


def _observations(task: Rooms) -> Box:
    if len(task.observation_shape) == 3:
        return Box(0, 255, task.observation_shape, np.uint8)
    return Box(-np.inf, np.inf, task.observation_shape, np.float32)


def _actions(actions: NDArray[Any], task: Rooms, device: str) -> Tensor:
    given = np.asarray(actions)
    whole = given.shape == (task.n_envs,) and given.dtype.kind in "iu"
    if not whole or (given < 0).any() or (given >= task.n_actions).any():
        raise ValueError(
            f"actions={given.tolist()}: expected {task.n_envs} whole numbers from 0 to {task.n_actions - 1}"
        )
    return torch.as_tensor(given.astype(np.int64), device=device)


def _info(transition: Transition) -> dict[str, Any]:
    return {"right": transition.right.cpu().numpy(), "wrong": transition.wrong.cpu().numpy()}


if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point=RoomsEnv, vector_entry_point=RoomsVectorEnv)
