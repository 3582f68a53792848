"""How well someone plays: whole episodes, returns with their interval, and how often the choice was right."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from compressive.rl.env.rooms import HUMAN, RANDOM, human_normalised
from compressive.rl.env.task import Task
from compressive.rl.policies import Player

_NORMAL = 1.96
"""Standard errors to each side of a mean that make an interval of 95 %."""


@dataclass(frozen=True)
class Evaluation:
    """What came of some episodes; intervals are of 95 %."""

    returns: list[float]
    right: int
    wrong: int
    comparable: bool = False
    """Whether the returns may stand beside the published ones."""

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def margin(self) -> float:
        """Half the width of its interval."""
        return _NORMAL * float(np.std(self.returns, ddof=1)) / math.sqrt(len(self.returns))

    @property
    def human_normalised(self) -> float | None:
        """Mean return as a share of the way from random to human play, on the original task."""
        return human_normalised(self.mean) if self.comparable else None

    @property
    def choices(self) -> int:
        """How many choices were made."""
        return self.right + self.wrong

    @property
    def accuracy(self) -> tuple[float, float, float] | None:
        """Share of right choices, and Wilson's interval around it; None where no choice was made."""
        n = self.choices
        if n == 0:
            return None
        share, z = self.right / n, _NORMAL
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return share, middle - half, middle + half

    def as_dict(self) -> dict[str, object]:
        """Give the figures, without single returns."""
        accuracy = self.accuracy
        return {
            "episodes": len(self.returns),
            "return": self.mean,
            "margin of 95 %": self.margin,
            "human_normalised": self.human_normalised,
            "choices": self.choices,
            "choice_accuracy": accuracy and accuracy[0],
            "choice_accuracy_interval": accuracy and accuracy[1:],
            "published": {"human": HUMAN, "random": RANDOM} if self.comparable else None,
        }


@torch.no_grad()
def evaluate(task: Task, player: Player, episodes: int, seed: int = 0, comparable: bool = False) -> Evaluation:
    """Play as many episodes in every lane as are needed; so quick episodes do not count more than long ones."""
    if episodes < 2:
        raise ValueError(f"episodes={episodes}: expected at least 2, for an interval")
    rounds = -(-episodes // task.lanes)
    observation = task.reset(seed)
    device = observation.device
    action = torch.zeros(task.lanes, dtype=torch.long, device=device)
    reward, start = torch.zeros(task.lanes, device=device), torch.ones_like(action, dtype=torch.bool)
    returns, played = torch.zeros_like(reward), torch.zeros_like(action)
    ended: list[float] = []
    right = wrong = torch.zeros((), dtype=torch.long, device=device)
    while bool((counts := played < rounds).any()):
        action = player.act(observation, action, reward, start)
        observation, reward, start, was_right, was_wrong = task.step(action)
        returns = returns + reward
        right, wrong = right + (was_right & counts).sum(), wrong + (was_wrong & counts).sum()
        ended += returns[start & counts].tolist()
        returns, played = returns * ~start, played + start
    return Evaluation(ended, int(right), int(wrong), comparable)
