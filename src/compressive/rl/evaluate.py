"""Evaluate a policy over whole episodes: returns and choice accuracy, with 95 % intervals."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from compressive.config.checks import require
from compressive.rl.env.rooms import HUMAN, RANDOM, Rooms, human_normalised
from compressive.rl.env.task import Task
from compressive.rl.policies import LoadedPolicy, Policy, load_policy

_NORMAL = 1.96
"""Half the width of a 95 % interval, in standard errors."""


@dataclass(frozen=True)
class Evaluation:
    """Returns and choices of some episodes. All intervals are 95 % intervals."""

    returns: list[float]
    right: int
    wrong: int
    comparable: bool = False
    """Whether the returns may be compared with the published ones."""
    by_side: dict[str, tuple[int, int]] | None = None
    """Right and wrong choices by where the first room showed the object, left or right; None in other tasks."""

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def margin(self) -> float:
        """Half the width of the interval around the mean return."""
        return _NORMAL * float(np.std(self.returns, ddof=1)) / math.sqrt(len(self.returns))

    @property
    def human_normalised(self) -> float | None:
        """Mean return on a scale where a random policy has 0 and humans have 1; None if not comparable."""
        return human_normalised(self.mean) if self.comparable else None

    @property
    def choices(self) -> int:
        """Number of choices made."""
        return self.right + self.wrong

    @property
    def accuracy(self) -> tuple[float, float, float] | None:
        """Share of right choices and the ends of its Wilson interval; None if no choice was made."""
        n = self.choices
        if n == 0:
            return None
        share, z = self.right / n, _NORMAL
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return share, middle - half, middle + half

    def as_dict(self) -> dict[str, object]:
        """Return the summary, without the single returns, for JSON."""
        accuracy = self.accuracy
        return {
            "episodes": len(self.returns),
            "return": self.mean,
            "return_margin_95": self.margin,
            "human_normalised": self.human_normalised,
            "choices": self.choices,
            "choice_accuracy": accuracy and accuracy[0],
            "choice_accuracy_interval": accuracy and accuracy[1:],
            "choices_by_side": self.by_side
            and {side: {"right": right, "wrong": wrong} for side, (right, wrong) in self.by_side.items()},
            "published": {"human": HUMAN, "random": RANDOM} if self.comparable else None,
        }


class Compared(NamedTuple):
    """A policy, and what it is measured by."""

    loaded: LoadedPolicy
    policies: dict[str, Evaluation]  # agent, random and, in the rooms, oracle; or one of the latter two alone


def compare(
    name: str,
    episodes: int,
    envs: int,
    seed: int,
    device: torch.device,
    greedy: bool = False,
    delays: tuple[int, ...] | None = None,
    of: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compared:
    """Evaluate a policy, by its name for `load_policy`; an agent beside `random` and `oracle` in its own task.

    `progress` is called with the number of episodes that have ended, of all policies, and their total.
    """
    envs = min(envs, episodes)
    loaded = load_policy(name, envs, seed, device, greedy, delays, of=of)
    chosen = {name: loaded}
    if name not in ("random", "oracle"):
        others = ("random", "oracle") if isinstance(loaded.task, Rooms) else ("random",)
        chosen = {"agent": loaded}
        chosen |= {other: load_policy(other, envs, seed, device, delays=delays, of=Path(name)) for other in others}
    found: dict[str, Evaluation] = {}
    for which, policy in chosen.items():

        def part(ended: int, total: int) -> None:
            if progress is not None:
                progress(len(found) * total + ended, len(chosen) * total)

        found[which] = evaluate(policy.task, policy.policy, episodes, seed, policy.comparable, part)
    return Compared(loaded, found)


@torch.no_grad()
def evaluate(
    task: Task,
    policy: Policy,
    episodes: int,
    seed: int = 0,
    comparable: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run a policy for at least `episodes` episodes.

    Every environment runs the same number of episodes, so that short ones are not over-represented. `progress` is
    called with the number of episodes that have ended, and of all. Raises ValueError for fewer than 2 episodes.
    """
    require(episodes >= 2, "episodes", episodes, "at least 2, for an interval")
    rounds = -(-episodes // task.n_envs)
    observation = task.reset(seed)
    device = observation.device
    action = torch.zeros(task.n_envs, dtype=torch.long, device=device)
    reward, start = torch.zeros(task.n_envs, device=device), torch.ones_like(action, dtype=torch.bool)
    returns, finished = torch.zeros_like(reward), torch.zeros_like(action)
    ended: list[float] = []
    right = wrong = torch.zeros(2, dtype=torch.long, device=device)  # where the object was shown: left, right
    rooms = task if isinstance(task, Rooms) else None
    while bool((counting := finished < rounds).any()):
        action = policy.act(observation, action, reward, start)
        left = torch.zeros_like(start) if rooms is None else rooms.state.example_left
        sides = torch.stack([left, ~left]) & counting
        transition = task.step(action)
        observation, reward, start = transition.observation, transition.reward, transition.done
        returns = returns + reward
        right, wrong = right + (transition.right & sides).sum(dim=1), wrong + (transition.wrong & sides).sum(dim=1)
        ended += returns[start & counting].tolist()
        returns, finished = returns * ~start, finished + start
        if progress is not None:
            progress(len(ended), rounds * task.n_envs)
    by_side = {side: (int(right[i]), int(wrong[i])) for i, side in enumerate(("left", "right"))}
    return Evaluation(ended, int(right.sum()), int(wrong.sum()), comparable, None if rooms is None else by_side)
