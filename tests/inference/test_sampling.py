"""Sampling against a plain loop, and by the distribution of many samples."""

import numpy as np
import pytest
import torch

from compressive.inference.sampling import LOWEST_TEMPERATURE, filter_logits, sample


def allowed_by_hand(logits, temperature, top_p, top_k):
    """The tokens that may be sampled, by the definition: take the most likely until their probability reaches top_p."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return {order[0]}
    if top_k:
        order = order[:top_k]
    weights = {token: np.exp(logits[token] / temperature) for token in order}
    kept, reached = set(), 0.0
    for token in order:
        if reached >= top_p:
            break
        kept.add(token)
        reached += weights[token] / sum(weights.values())
    return kept


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 1.7])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.98, 1])
@pytest.mark.parametrize("top_k", [0, 1, 5, 100])
def test_what_may_be_drawn_is_what_the_definition_says(temperature, top_p, top_k):
    generator = np.random.default_rng(0)
    rows = generator.normal(0, 2, (20, 13))
    rows[10:] = rows[10:].round()  # ties
    kept = filter_logits(torch.tensor(rows), temperature=temperature, top_p=top_p, top_k=top_k)
    for row, found in zip(rows, kept, strict=True):
        want = allowed_by_hand(row, temperature, top_p, top_k)
        assert set(found.isfinite().nonzero().squeeze(1).tolist()) == want
        inside = sorted(want)  # and among these, the scaled logits as they were
        np.testing.assert_allclose(found[inside].numpy(), row[inside] / (temperature or 1), rtol=1e-12)


def test_a_nucleus_that_is_reached_exactly_takes_no_more():
    kept = filter_logits(torch.tensor([0.5, 0.25, 0.125, 0.125]).log(), top_p=0.75)
    assert kept.isfinite().tolist() == [True, True, False, False]


def test_input_is_left_as_it_was_and_may_be_of_low_precision():
    logits = torch.randn(3, 50, dtype=torch.bfloat16)
    before = logits.clone()
    assert filter_logits(logits, top_p=0.5, top_k=7).dtype == torch.float32
    assert torch.equal(logits, before)


def test_samples_have_the_distribution_of_the_nucleus():
    count = 40_000
    logits = torch.tensor([2.0, 1.5, 0.1, -0.4, -1.0, -6.0])
    generator = torch.Generator().manual_seed(1)
    sampled = sample(logits.expand(count, -1), temperature=0.8, top_p=0.9, generator=generator)
    kept = sorted(allowed_by_hand(logits.numpy(), 0.8, 0.9, 0))
    weights = np.exp(logits.numpy() / 0.8)[kept]
    expected = np.zeros(6)
    expected[kept] = weights / weights.sum()
    found = np.bincount(sampled.numpy(), minlength=6) / count
    assert (found[expected == 0] == 0).all()
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / count))


def test_a_temperature_of_zero_is_greedy():
    logits = torch.randn(100, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, temperature=0, top_p=0.5), logits.argmax(dim=1))


def test_the_lowest_temperature_takes_the_most_likely_token():
    logits = torch.tensor([[-1e8, 3.0, 3.1], [1e8, -1e8, 0.0]])
    assert sample(logits, temperature=LOWEST_TEMPERATURE).tolist() == [2, 0]


def test_draws_come_from_the_generator_alone():
    logits, state = torch.zeros(64, 100), torch.get_rng_state()
    first, again, other = (sample(logits, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 1e-42}, "temperature=1e-42: expected 0 or at least 1e-30"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -1}, "top_k=-1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, name):
    with pytest.raises(ValueError, match=name):
        sample(torch.zeros(1, 3), **settings)
