"""V-trace against the IMPALA paper's own sums, written out in NumPy."""

import numpy as np
import pytest
import torch

from compressive.rl.vtrace import vtrace


def reference(log_ratios, rewards, discounts, values, rho_bar, c_bar):
    """Equation 1, sum by sum: v_s = V(x_s) + Σ_t (Π_{i<t} γ c_i) δ_t; then section 4.2's advantages."""
    B, T = rewards.shape
    ratios = np.exp(log_ratios)
    rho, c = np.minimum(rho_bar, ratios), np.minimum(c_bar, ratios)
    targets = np.zeros((B, T + 1))
    for b in range(B):
        for s in range(T):
            total, product = values[b, s], 1.0
            for t in range(s, T):
                delta = rho[b, t] * (rewards[b, t] + discounts[b, t] * values[b, t + 1] - values[b, t])
                total += product * delta
                product *= discounts[b, t] * c[b, t]
            targets[b, s] = total
        targets[b, T] = values[b, T]
    advantages = rho * (rewards + discounts * targets[:, 1:] - values[:, :-1])
    return targets[:, :-1], advantages


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.7), (np.inf, np.inf)])
def test_it_is_the_paper_s_sum(rho_bar, c_bar):
    generator = np.random.default_rng(0)
    log_ratios, rewards = generator.normal(0, 0.8, (3, 12)), generator.normal(size=(3, 12))
    discounts = 0.97 * (generator.random((3, 12)) > 0.2)  # with ends of episodes
    values = generator.normal(size=(3, 13))
    expected = reference(log_ratios, rewards, discounts, values, rho_bar, c_bar)
    inputs = [torch.from_numpy(array) for array in (log_ratios, rewards, discounts, values)]
    found = vtrace(inputs[0], inputs[1], inputs[2], inputs[3], rho_bar, c_bar)
    np.testing.assert_allclose(found.targets.numpy(), expected[0], rtol=1e-12)
    np.testing.assert_allclose(found.advantages.numpy(), expected[1], rtol=1e-12)


def test_on_policy_it_is_the_return_up_to_the_bootstrap():
    """The paper's remark: with ratios of 1 the target is the discounted return, and V(x_T) at its end."""
    rewards, values = torch.randn(2, 5).double(), torch.randn(2, 6).double()
    found = vtrace(torch.zeros(2, 5).double(), rewards, torch.full((2, 5), 0.9).double(), values)
    total = values[:, 5]
    for t in reversed(range(5)):
        total = rewards[:, t] + 0.9 * total
        torch.testing.assert_close(found.targets[:, t], total)


def test_nothing_flows_across_an_episode_s_end():
    discounts = torch.tensor([[0.9, 0.0, 0.9]])
    rewards, values = torch.randn(1, 3), torch.randn(1, 4)
    changed = rewards.clone()
    changed[0, 2] += 5
    a, b = (vtrace(torch.zeros(1, 3), r, discounts, values) for r in (rewards, changed))
    assert torch.equal(a.targets[:, :2], b.targets[:, :2])
    assert not torch.equal(a.targets[:, 2], b.targets[:, 2])
