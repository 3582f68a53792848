"""Random numbers from keys and counts: uniform, independent of their batch, always the same."""

import torch

from compressive.rl.env import prng as dice


def test_they_are_uniform():
    key = dice.keys(0, 1000)
    drawn = dice.below(key[:, None], torch.arange(200), 36)
    counts = drawn.flatten().bincount(minlength=36).double()
    expected = drawn.numel() / 36
    assert ((counts - expected).square() / expected).sum() < 66.6  # chi-square, 35 degrees of freedom, 0.1 %
    u = dice.uniform(key[:, None], torch.arange(200))
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.003


def test_neighbours_have_nothing_to_do_with_each_other():
    u = dice.uniform(dice.keys(3, 2000)[:, None], torch.arange(50)).double()
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        both = torch.stack([a.flatten(), b.flatten()])
        assert abs(torch.corrcoef(both)[0, 1]) < 0.015
    assert abs(torch.corrcoef(torch.stack([dice.uniform(dice.keys(s, 5000), 0) for s in (0, 1)]))[0, 1]) < 0.06


def test_a_lane_s_numbers_do_not_depend_on_the_batch():
    assert torch.equal(dice.keys(5, 3), dice.keys(5, 8)[:3])
    assert len(dice.keys(5, 1000).unique()) == 1000
    assert not torch.equal(dice.keys(5, 8), dice.keys(6, 8))


def test_they_are_the_same_for_ever():
    """A saved run goes on with the numbers that it would have had."""
    assert dice.bits(dice.keys(0, 2), 7).tolist() == [71515014, 3786843741]
