"""Acting: step every environment through one rollout and record what the learner needs."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from compressive.config.agent import LearnConfig
from compressive.model.records import SHARED, TensorRecord
from compressive.rl.agent.agent import Agent, sample_actions
from compressive.rl.env import prng
from compressive.rl.env.task import Task, Transition
from compressive.runtime import Capture, autocast, cuda_graph

Value = TypeVar("Value")


class Outcomes(NamedTuple, Generic[Value]):
    """Sums over a rollout and all its environments: 0-d tensors, or floats once they are read back."""

    returns: Value  # of the episodes that ended
    episodes: Value  # how many ended
    right: Value  # choices of the right object
    wrong: Value  # choices of the wrong object


@dataclass(frozen=True)
class Rollout(TensorRecord):
    """T steps of B environments. Index t has what came with observation t; index T is the step after the rollout."""

    observation: Tensor  # (B, T + 1, ...)
    action: Tensor  # (B, T + 1): the action before the observation; so the rollout's own actions are 1 to T
    reward: Tensor  # (B, T + 1): the reward of that action
    start: Tensor  # (B, T + 1), bool: the first observation of an episode
    choice: Tensor  # (B, T + 1), int8: 1 if that action chose the right object, -1 if the wrong one, 0 if none
    logits: Tensor  # (B, T, A): of the policy that acted
    state: Any  # the core's state at the start of the rollout
    counts: Tensor = field(metadata=SHARED)  # (4,), float32: the values of `outcomes`

    @property
    def outcomes(self) -> Outcomes[Tensor]:
        """The rollout's returns, episodes and choices, as 0-d tensors."""
        return Outcomes(*self.counts.unbind())


@dataclass(frozen=True)
class Carried(TensorRecord):
    """What goes on from one rollout to the next, besides the last step in the buffers."""

    memory: Any  # the core's state
    task: Any  # the state of the environments
    returns: Tensor  # (B,): of the running episodes
    clock: Tensor = field(metadata=SHARED)  # (): steps taken, the counter of the sampled actions


CALLED = 2
"""Rollouts that are called before one is captured: compilation, and buffers that libraries keep."""


class Actor:
    """Runs an agent in a task and writes rollouts into buffers that are allocated once. It never syncs the device.

    Compiled and on a GPU, a whole rollout is captured as a CUDA graph, and costs the host one launch in place of some
    ten thousand.
    """

    def __init__(self, task: Task, agent: Agent, options: LearnConfig, device: torch.device, seed: int) -> None:
        self.task, self.agent = task, agent
        B, T, A = task.n_envs, agent.window, task.n_actions
        self.autocast = autocast(device, options.precision)
        self.inputs = torch.compile(agent.inputs, fullgraph=True) if options.compile else agent.inputs
        first = task.reset()
        if options.stagger:
            task.stagger()
        self.observation = first.new_zeros(B, T + 1, *first.shape[1:])
        self.action = torch.zeros(B, T + 1, dtype=torch.long, device=device)
        self.reward = torch.zeros(B, T + 1, device=device)
        self.start = torch.zeros(B, T + 1, dtype=torch.bool, device=device)
        self.choice = torch.zeros(B, T + 1, dtype=torch.int8, device=device)
        self.logits = torch.zeros(B, T, A, device=device)
        self.observation[:, T], self.start[:, T] = first, True
        self.returns = torch.zeros(B, device=device)
        self.state = agent.core.initial_state(B)
        self.key = prng.keys(seed, B, device)
        self.actions = torch.arange(A, device=device)
        self.clock = torch.zeros((), dtype=torch.long, device=device)
        captures = options.compile and device.type == "cuda" and task.state is not None
        self.capture: Capture | None = cuda_graph if captures else None
        self.called = 0
        self.replay: Callable[[], object] | None = None
        self.held: Carried  # these three from the first capture on
        self.before: TensorRecord
        self.recorded: Rollout

    def rollout(self) -> Rollout:
        """Act for one window. The next rollout overwrites the same buffers, so learn from this one first."""
        if self.capture is None or self.called < CALLED:
            self.called += 1
            return self._act()
        if self.replay is None:
            self.held = self._carried().clone()
            self._carry(self.held)
            self.before = self.held.memory.clone()
            self.replay = self.capture(self._act_in_place)
        self.replay()
        return self.recorded

    def _carried(self) -> Carried:
        return Carried(self.state, self.task.state, self.returns, self.clock)

    def _carry(self, carried: Carried) -> None:
        self.state, self.task.state = carried.memory, carried.task
        self.returns, self.clock = carried.returns, carried.clock

    @torch.no_grad()
    def _act_in_place(self) -> None:
        """Act for one window from the tensors of `held`, and leave in them what the next one starts from."""
        self.before.copy_(self.held.memory)
        rollout = self._act()
        self.held.copy_(self._carried())
        self._carry(self.held)
        self.recorded = dataclasses.replace(rollout, state=self.before)

    @torch.no_grad()
    def _act(self) -> Rollout:
        T = self.agent.window
        for buffer in (self.observation, self.action, self.reward, self.start, self.choice):
            buffer[:, 0] = buffer[:, T]
        state, counts = self.state, self.reward.new_zeros(len(Outcomes._fields))
        with self.autocast:
            acting = self.agent.core.begin(state)
            for t in range(T):
                start = self.start[:, t]
                x = self.inputs(self.observation[:, t], self.action[:, t], self.reward[:, t], start)
                logits, acting = self.agent.act(x, acting, start)
                self.clock = self.clock + 1
                action = sample_actions(logits, self.key, self.clock, self.actions)
                transition = self.task.step(action)
                self.logits[:, t] = logits
                self.observation[:, t + 1] = transition.observation
                self.action[:, t + 1] = action
                self.reward[:, t + 1] = transition.reward
                self.start[:, t + 1] = transition.done
                self.choice[:, t + 1] = transition.right.to(torch.int8) - transition.wrong.to(torch.int8)
                counts = counts + self._count(transition)
        self.state = self.agent.core.end(acting)
        return Rollout(self.observation, self.action, self.reward, self.start, self.choice, self.logits, state, counts)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return everything needed to continue, as the parts of a checkpoint."""
        last = {name: getattr(self, name)[:, -1] for name in ("observation", "action", "reward", "start")}
        own = {"returns": self.returns, "key": self.key, "clock": self.clock}
        return {"memory": self.state.state_dict(), "task": self.task.state_dict(), "last": last, "actor": own}

    def load_state_dict(self, parts: Mapping[str, dict[str, Tensor]]) -> None:
        """Continue from a saved state. If the task was not saved, keep the new episodes and the empty memory."""
        if not parts["task"]:
            return
        self.state = type(self.state).from_state_dict(parts["memory"])
        self.task.load_state_dict(parts["task"])
        for name, value in parts["last"].items():
            getattr(self, name)[:, -1] = value
        for name, value in parts["actor"].items():
            setattr(self, name, value)
        self.replay = None  # it goes on from other tensors

    def close(self) -> None:
        """Do nothing: there is no other process to end."""

    def _count(self, transition: Transition) -> Tensor:
        """Add a step to the returns of the current episodes; return its contribution to the rollout's counts, (4,)."""
        done, returns = transition.done, self.returns + transition.reward
        self.returns = returns * ~done
        of_ended = (returns * done).sum()
        return torch.stack(Outcomes(of_ended, done.sum(), transition.right.sum(), transition.wrong.sum()))
