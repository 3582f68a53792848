"""The paper's schedules: learning rate and update frequency, both counted in steps."""

import pytest

from compressive.config import TrainConfig
from compressive.training.schedule import is_update, learning_rate, steps_per_update

PAPER = TrainConfig()


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 1e-6), (2000, (1e-6 + 3e-4) / 2), (4000, 3e-4), (54_000, (1e-6 + 3e-4) / 2), (104_000, 1e-6), (999_999, 1e-6)],
)
def test_learning_rate_of_the_paper(step, rate):
    assert learning_rate(step, PAPER) == pytest.approx(rate)


def test_the_learning_rate_rises_then_falls():
    rates = [learning_rate(step, PAPER) for step in range(0, 105_000, 500)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert learning_rate(0, TrainConfig(warmup_steps=0)) == 3e-4


def test_updates_become_rarer():
    assert [steps_per_update(step, PAPER) for step in (0, 59_999, 60_000)] == [1, 1, 4]
    config = TrainConfig(update_every=3, update_every_from=4)
    assert [is_update(step, config) for step in range(10)] == [True] * 4 + [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 0}, "batch=0: expected a whole number of at least 1"),
        ({"steps": 1.5}, "steps=1.5: expected a whole number"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: expected a number above 0"),
        ({"precision": "fp16"}, "precision='fp16': expected one of fp32, bf16"),
        ({"micro_batch": -1}, "micro_batch=-1: expected auto, 0 or a number of rows"),
        ({"micro_batch": "all"}, "micro_batch='all': expected auto, 0 or a number of rows"),
        ({"reset_probability": 1.5}, "reset_probability=1.5: expected a number from 0 to 1"),
        ({"eval_every": -1}, "eval_every=-1: expected a whole number of at least 0"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)
