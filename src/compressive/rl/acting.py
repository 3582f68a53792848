"""Acting: play every lane for one unroll, and keep what the learner needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compressive.config.agent import LearnConfig
from compressive.model.records import SHARED, TensorRecord
from compressive.rl.agent.agent import Agent
from compressive.rl.env import prng as dice
from compressive.rl.env.task import Task, Transition
from compressive.rl.policies import draw

OUTCOMES = ("return", "episodes", "right", "wrong")
"""What is counted while playing: the sum of returns of episodes that ended, how many did, and choices."""


@dataclass(frozen=True)
class Unroll(TensorRecord):
    """What was seen and done in a window of T steps; at t stands what came with observation t, the last comes after."""

    observation: Tensor  # (B, T + 1, ...)
    action: Tensor  # (B, T + 1): the one before; so the actions taken are those from 1 on
    reward: Tensor  # (B, T + 1)
    start: Tensor  # (B, T + 1), bool: the first of an episode
    logits: Tensor  # (B, T, A): of the policy that acted
    state: Any  # the core's, when the unroll began
    outcomes: Tensor = field(metadata=SHARED)  # (4,), see OUTCOMES


class Actor:
    """Plays a task with an agent, into buffers that are there from the beginning; nothing waits for the device."""

    def __init__(self, task: Task, agent: Agent, options: LearnConfig, device: torch.device, seed: int) -> None:
        self.task, self.agent = task, agent
        B, T, A = task.lanes, agent.window, task.n_actions
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16")
        self.inputs = torch.compile(agent.inputs, fullgraph=True) if options.compile else agent.inputs
        first = task.reset()
        self.observation = first.new_zeros(B, T + 1, *first.shape[1:])
        self.action = torch.zeros(B, T + 1, dtype=torch.long, device=device)
        self.reward = torch.zeros(B, T + 1, device=device)
        self.start = torch.zeros(B, T + 1, dtype=torch.bool, device=device)
        self.logits = torch.zeros(B, T, A, device=device)
        self.observation[:, T], self.start[:, T] = first, True
        self.returns = torch.zeros(B, device=device)
        self.state = agent.core.initial_state(B)
        self.key = dice.keys(seed, B, device)
        self.choices = torch.arange(A, device=device)
        self.clock = torch.zeros((), dtype=torch.long, device=device)

    @torch.no_grad()
    def unroll(self) -> Unroll:
        """Play on for a window. The buffers are used again by the next unroll: learn from this one first."""
        T = self.agent.window
        for buffer in (self.observation, self.action, self.reward, self.start):
            buffer[:, 0] = buffer[:, T]
        state, outcomes = self.state, torch.zeros_like(self.reward[0, :1].expand(len(OUTCOMES)))
        with self.autocast:
            acting = self.agent.core.begin(state)
            for t in range(T):
                start = self.start[:, t]
                x = self.inputs(self.observation[:, t], self.action[:, t], self.reward[:, t], start)
                logits, acting = self.agent.act(x, acting, start)
                self.clock = self.clock + 1
                action = draw(logits, self.key, self.clock, self.choices)
                transition = self.task.step(action)
                self.logits[:, t] = logits
                self.observation[:, t + 1] = transition.observation
                self.action[:, t + 1] = action
                self.reward[:, t + 1] = transition.reward
                self.start[:, t + 1] = transition.done
                outcomes = outcomes + self._count(transition)
        self.state = self.agent.core.end(acting)
        return Unroll(self.observation, self.action, self.reward, self.start, self.logits, state, outcomes)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """All that is needed to play on, in parts."""
        last = {name: getattr(self, name)[:, -1] for name in ("observation", "action", "reward", "start")}
        own = {"returns": self.returns, "key": self.key, "clock": self.clock}
        return {"memory": self.state.state_dict(), "task": self.task.state_dict(), "last": last, "actor": own}

    def load_state_dict(self, parts: Mapping[str, dict[str, Tensor]]) -> None:
        """Play on from there; or, where the task could not be kept, begin new episodes that remember nothing."""
        if not parts["task"]:
            return
        self.state = type(self.state).from_state_dict(parts["memory"])
        self.task.load_state_dict(parts["task"])
        for name, value in parts["last"].items():
            getattr(self, name)[:, -1] = value
        for name, value in parts["actor"].items():
            setattr(self, name, value)

    def close(self) -> None:
        """Nobody else plays."""

    def _count(self, transition: Transition) -> Tensor:
        done, returns = transition.done, self.returns + transition.reward
        self.returns = returns * ~done
        ended = (returns * done).sum()
        return torch.stack([ended, done.sum(), transition.right.sum(), transition.wrong.sum()])
