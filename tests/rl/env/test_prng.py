"""Random numbers from keys and counters: uniform, independent of their batch, always the same."""

import torch

from compressive.rl.env import prng


def test_they_are_uniform():
    key = prng.keys(0, 1000)
    sampled = prng.randint(key[:, None], torch.arange(200), 36)
    counts = sampled.flatten().bincount(minlength=36).double()
    expected = sampled.numel() / 36
    assert ((counts - expected).square() / expected).sum() < 66.6  # chi-square, 35 degrees of freedom, 0.1 %
    u = prng.uniform(key[:, None], torch.arange(200))
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.003


def test_neighbours_are_uncorrelated():
    u = prng.uniform(prng.keys(3, 2000)[:, None], torch.arange(50)).double()
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        both = torch.stack([a.flatten(), b.flatten()])
        assert abs(torch.corrcoef(both)[0, 1]) < 0.015
    assert abs(torch.corrcoef(torch.stack([prng.uniform(prng.keys(s, 5000), 0) for s in (0, 1)]))[0, 1]) < 0.06


def test_numbers_of_an_environment_do_not_depend_on_the_batch():
    assert torch.equal(prng.keys(5, 3), prng.keys(5, 8)[:3])
    assert len(prng.keys(5, 1000).unique()) == 1000
    assert not torch.equal(prng.keys(5, 8), prng.keys(6, 8))


def test_they_never_change():
    """A resumed run continues with the same numbers."""
    assert prng.bits(prng.keys(0, 2), 7).tolist() == [3547379887, 1598972509]


def test_streams_of_different_keys_do_not_overlap():
    """Were streams stretches of one sequence, some of so many would be a few numbers apart, and share pairs."""
    streams = prng.bits(prng.keys(0, 2**17)[:, None], torch.arange(8))
    pairs = streams[:, :-1] << 32 | streams[:, 1:]  # consecutive numbers, as one
    assert len(pairs.unique()) == pairs.numel()
