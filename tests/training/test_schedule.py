"""The paper's schedules: learning rate and update frequency, both counted in steps."""

import pytest

from compressive.config import TrainConfig
from compressive.training.schedule import average_decay, is_update, learning_rate, steps_per_update

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


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_a_rate_may_be_held_and_decay_to_zero_at_the_last_step(decay):
    config = TrainConfig(
        steps=1000,
        learning_rate=1e-2,
        final_learning_rate=0,
        warmup_steps=100,
        hold_steps=300,
        decay_steps=0,
        decay=decay,
    )
    rates = [learning_rate(step, config) for step in range(1001)]
    assert rates[100:401] == [1e-2] * 301
    assert rates[700] == pytest.approx(5e-3)
    assert rates[550] == pytest.approx(7.5e-3 if decay == "linear" else 1e-2 * (1 + 0.5**0.5) / 2)
    assert 0 < rates[999] < 1e-4
    assert rates[1000] == 0
    assert sorted(rates[400:], reverse=True) == rates[400:]


def test_an_average_forgets_its_beginning():
    config = TrainConfig(weight_average=0.99)
    assert [average_decay(step, config) for step in (0, 80, 890, 10_000)] == [0.1, 0.9, pytest.approx(0.99), 0.99]


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
        ({"optimiser": "muon", "parallel": "fsdp"}, "optimiser='muon': expected adam with parallel='fsdp'"),
        ({"optimiser": "sgd"}, "optimiser='sgd': expected one of adam, muon"),
        ({"weight_average": 1.0}, "weight_average=1.0: expected a number from 0 up to, but not including, 1"),
        ({"decay": "exponential"}, "decay='exponential': expected one of cosine, linear"),
        ({"reset_probability": 1.5}, "reset_probability=1.5: expected a number from 0 to 1"),
        ({"eval_every": -1}, "eval_every=-1: expected a whole number of at least 0"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)
