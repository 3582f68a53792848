"""Evaluation: whole episodes and intervals."""

import numpy as np
import pytest
import torch

from compressive.rl.env.task import Transition
from compressive.rl.evaluate import Evaluation, evaluate


class Uneven:
    """Environment 0 has episodes of one step and return 1, environment 1 of four steps and return 8."""

    n_actions = n_envs = 2
    state = None
    observation_shape: tuple[int, ...] = (3,)

    def reset(self, seed=None):
        self.steps = torch.zeros(2, dtype=torch.long)
        return torch.zeros(2, 3)

    def step(self, action):
        self.steps += 1
        done = self.steps == torch.tensor([1, 4])
        self.steps[done] = 0
        right = torch.tensor([True, False])
        return Transition(torch.zeros(2, 3), torch.tensor([1.0, 2.0]), done, right, ~right)

    def view(self):
        return None

    def stagger(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Still:
    def act(self, *_):
        return torch.zeros(2, dtype=torch.long)


def test_short_episodes_do_not_count_more():
    found = evaluate(Uneven(), Still(), 6)
    assert sorted(found.returns) == [1, 1, 1, 8, 8, 8]
    assert (found.right, found.wrong) == (3, 12)
    assert found.mean == 4.5
    with pytest.raises(ValueError, match="episodes=1: expected at least 2"):
        evaluate(Uneven(), Still(), 1)


def test_intervals_are_right():
    found = Evaluation([1.0, 2.0, 3.0, 4.0], right=60, wrong=40)
    assert found.margin == pytest.approx(1.96 * np.std([1, 2, 3, 4], ddof=1) / 2)
    assert found.accuracy is not None
    share, low, high = found.accuracy
    assert (share, round(low, 3), round(high, 3)) == (0.6, 0.502, 0.691)  # Wilson's, from a table
    assert Evaluation([0.0, 0.0], 0, 0).accuracy is None
    assert Evaluation([65.9, 65.9], 0, 0, comparable=True).human_normalised == pytest.approx(1)
    assert Evaluation([65.9, 65.9], 0, 0).human_normalised is None
