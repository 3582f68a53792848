"""Whoever plays: a trained agent, one that draws its actions, or one that sees everything and plays well."""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from compressive.rl.agent.agent import Agent
from compressive.rl.env import map as layout
from compressive.rl.env import prng as dice
from compressive.rl.env.rooms import CORRIDOR, SECOND, Rooms
from compressive.rl.env.task import Task

_FORWARD, _STRAFE_LEFT, _STRAFE_RIGHT, _FORWARD_LEFT, _FORWARD_RIGHT = 0, 2, 3, 6, 7


class Player(Protocol):
    """Chooses an action for every lane, step after step."""

    def act(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Choose, (B,), seeing what came with this step: the action and reward before it, and whether it is a start."""


class RandomPlayer:
    """Takes every action as often as any other."""

    def __init__(self, task: Task, seed: int, device: torch.device | str = "cpu") -> None:
        self.key, self.n_actions, self.count = dice.keys(seed + 1, task.lanes, device), task.n_actions, 0

    def act(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Draw."""
        self.count += 1
        return dice.below(self.key, self.count, self.n_actions)


class OraclePlayer:
    """Walks to the pad, then to the right object, by looking at what no player may see."""

    def __init__(self, task: Task) -> None:
        if not isinstance(task, Rooms):
            raise ValueError("player 'oracle': it knows the rooms only; choose random, or a run")
        self.task = task

    def act(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Go for the target, turning on the way; sidestep where it lies more to the side than ahead."""
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


class AgentPlayer:
    """A trained agent, which draws its actions from its policy, or takes the likeliest."""

    def __init__(self, agent: Agent, task: Task, seed: int, device: torch.device | str, greedy: bool = False) -> None:
        self.agent, self.greedy, self.count = agent, greedy, 0
        self.key, self.choices = dice.keys(seed + 1, task.lanes, device), torch.arange(task.n_actions, device=device)
        self.acting: Any = agent.core.begin(agent.core.initial_state(task.lanes))

    @torch.no_grad()
    def act(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Read one more step, and choose."""
        logits, self.acting = self.agent.act(self.agent.inputs(observation, action, reward, start), self.acting, start)
        if self.greedy:
            return logits.argmax(dim=1)
        self.count += 1
        return draw(logits, self.key, self.count, self.choices)


def draw(logits: Tensor, key: Tensor, count: Tensor | int, choices: Tensor) -> Tensor:
    """Draw a choice per lane from its probabilities, by Gumbel's trick."""
    noise = dice.uniform(key[:, None], count * len(choices) + choices)
    return (logits - (-noise.log()).log()).argmax(dim=1)
