"""Policies: a trained agent, uniformly random actions, or an oracle that reads the environment's state."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from compressive.config.agent import TaskConfig
from compressive.rl.agent.agent import Agent, sample_actions
from compressive.rl.env import map as layout
from compressive.rl.env import prng
from compressive.rl.env.build import build_task
from compressive.rl.env.rooms import CORRIDOR, SECOND, Rooms
from compressive.rl.env.task import Task
from compressive.rl.run import AgentFolder

_FORWARD, _STRAFE_LEFT, _STRAFE_RIGHT, _FORWARD_LEFT, _FORWARD_RIGHT = 0, 2, 3, 6, 7


class Policy(Protocol):
    """Chooses an action for each of B environments, step after step."""

    def act(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Return the actions, (B,) int64.

        `action` and `reward`, (B,), are those before the observation; `start` (B,) bool marks the first observation of
        an episode.
        """


class RandomPolicy:
    """Samples actions uniformly."""

    def __init__(self, task: Task, seed: int, device: torch.device | str = "cpu") -> None:
        self.key, self.n_actions, self.counter = prng.keys(seed + 1, task.n_envs, device), task.n_actions, 0

    def act(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Return the actions, (B,) int64; all arguments are ignored."""
        self.counter += 1
        return prng.randint(self.key, self.counter, self.n_actions)


class OraclePolicy:
    """Walks to the pad, then to the right object. It reads the state of the rooms, which agents cannot see.

    Raises ValueError for other tasks.
    """

    def __init__(self, task: Task) -> None:
        if not isinstance(task, Rooms):
            raise ValueError("policy 'oracle': it knows only the rooms; choose random, or a run")
        self.task = task

    def act(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Return the actions, (B,) int64: turn and walk to the target, or strafe if it is more than 45° aside."""
        state = self.task.state
        target_x = torch.where(state.room == SECOND, layout.CHOICES[0][0], (layout.PAD.left + layout.PAD.right) / 2)
        right_side = torch.where(state.match_left, layout.CHOICES[1][1], layout.CHOICES[0][1])
        target_y = torch.where(state.room == SECOND, right_side, (layout.PAD.bottom + layout.PAD.top) / 2)
        wanted = torch.atan2(target_y - state.y, target_x - state.x)
        wanted = torch.where(state.room == CORRIDOR, 0.0, wanted)
        off = torch.remainder(wanted - state.angle + math.pi, 2 * math.pi) - math.pi
        turning = torch.where(off > 0, _FORWARD_LEFT, _FORWARD_RIGHT)
        turning = torch.where(off.abs() > math.pi / 4, torch.where(off > 0, _STRAFE_LEFT, _STRAFE_RIGHT), turning)
        return torch.where(off.abs() > self.task.turn / 2, turning, _FORWARD)


class AgentPolicy:
    """A trained agent. It samples its actions or, if `greedy`, takes the most likely ones."""

    def __init__(self, agent: Agent, task: Task, seed: int, device: torch.device | str, greedy: bool = False) -> None:
        self.agent, self.greedy, self.counter = agent, greedy, 0
        self.key, self.actions = prng.keys(seed + 1, task.n_envs, device), torch.arange(task.n_actions, device=device)
        self.acting: Any = agent.core.begin(agent.core.initial_state(task.n_envs))

    @torch.no_grad()
    def act(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Read one step and return the actions, (B,) int64."""
        logits, self.acting = self.agent.act(self.agent.inputs(observation, action, reward, start), self.acting, start)
        if self.greedy:
            return logits.argmax(dim=1)
        self.counter += 1
        return sample_actions(logits, self.key, self.counter, self.actions)


class LoadedPolicy(NamedTuple):
    """A policy and the task it acts in."""

    task: Task
    policy: Policy
    description: str
    comparable: bool  # whether scores may be compared with the published ones


def load_policy(
    name: str,
    envs: int,
    seed: int,
    device: torch.device,
    greedy: bool = False,
    delays: tuple[int, ...] | None = None,
    watched: bool = False,
    of: Path | None = None,
) -> LoadedPolicy:
    """Load a policy by name together with `envs` copies of its task: `random`, `oracle`, a shipped agent, or a folder.

    The folder is that of a run or of a release, which acts in its own task; `random` and `oracle` act in that of the
    run, release or shipped agent `of`, or in the full rooms if `of` is None. `delays` replaces those of the task.
    `random` and `oracle` do not use observations, so theirs are rendered at 4 × 3 pixels, unless the task is to be
    `watched`. Raises FileNotFoundError if a folder is no run, ValueError if it is no agent's run, CheckpointError if it
    has no checkpoint.
    """
    trained = name not in ("random", "oracle")
    folder = name if trained else of
    run = None if folder is None else AgentFolder.open(Path(folder))
    config = TaskConfig() if run is None else run.config.task
    if not trained and not watched:
        config = dataclasses.replace(config, width=4, height=3)
    one_trial = config.ends_with_choice  # of the original delays, also if the new ones are all 0
    delays = config.delays if delays is None else delays
    config = dataclasses.replace(config, envs=envs, delays=delays, one_trial=one_trial)
    task = build_task(config, seed, device, render=watched)
    if trained and run is not None:
        agent, step = run.agent(task, device)
        policy: Policy = AgentPolicy(agent, task, seed, device, greedy)
        return LoadedPolicy(task, policy, f"{name}, step {step}", config.comparable)
    policy = OraclePolicy(task) if name == "oracle" else RandomPolicy(task, seed, device)
    return LoadedPolicy(task, policy, name, config.comparable)
