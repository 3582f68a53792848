"""The learner: its loss, its updates, and updates that are not finite."""

import dataclasses
import math

import pytest
import torch
from rl_helpers import CPU, build, tiny_agent_run
from torch.nn import functional as F

from compressive.rl.learning import Learner, UpdateStats, mean_stats, shaped
from compressive.rl.vtrace import vtrace


def test_rewards_are_shaped_as_configured():
    rewards = torch.tensor([1.0, 10.0, -10.0])
    assert shaped(rewards, "scaled", 0.1).tolist() == pytest.approx([0.1, 1, -1])
    expected = [5 * math.tanh(0.2), 5 * math.tanh(2), -1.5 * math.tanh(2)]
    assert shaped(rewards, "asymmetric", 0.1).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("behind", [False, True], ids=["on policy", "an update behind"])
def test_the_loss_is_impala_s(behind):
    run = tiny_agent_run(train={"baseline_cost": 0.3, "entropy_cost": 0.02, "discount": 0.9})
    _, agent, actor = build(run)
    for _ in range(3):
        rollout = actor.rollout()
    if behind:
        with torch.no_grad():
            agent.policy.bias.copy_(torch.linspace(-1, 1, 9))
    out = agent(rollout.observation, rollout.action, rollout.reward, rollout.start, rollout.state)
    p = F.softmax(out.logits, -1)
    taken = F.one_hot(rollout.action[:, 1:], 9)
    log_p = (p.log() * taken).sum(-1)
    ratio = log_p - (F.log_softmax(rollout.logits, -1) * taken).sum(-1)
    discounts = 0.9 * (1 - rollout.start[:, 1:].float())
    trace = vtrace(ratio.detach(), rollout.reward[:, 1:] * 0.1, discounts, out.values.detach())
    policy = -(log_p * trace.advantages).mean()
    baseline = 0.5 * (out.values[:, :-1] - trace.targets).square().mean()
    entropy = -(p * p.log()).sum(-1).mean()
    found = Learner(agent, run.train, CPU).update(rollout)
    assert found.policy_loss.item() == pytest.approx(policy.item(), abs=1e-6)
    assert found.baseline_loss.item() == pytest.approx(baseline.item(), rel=1e-4)
    assert found.entropy.item() == pytest.approx(entropy.item(), rel=1e-4)
    assert found.loss.item() == pytest.approx((policy + 0.3 * baseline - 0.02 * entropy).item(), abs=1e-5)
    assert found.compression_loss.item() == pytest.approx(out.compression_loss.item(), rel=1e-4)
    assert found.ratio.item() == pytest.approx(ratio.exp().mean().item(), rel=1e-4)
    if behind:
        assert abs(found.ratio - 1) > 1e-2
    else:
        assert found.ratio.item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("optimiser", ["rmsprop", "adam"])
def test_an_update_moves_all_weights_and_a_bad_one_none(optimiser):
    run = tiny_agent_run(train={"optimiser": optimiser, "learning_rate": 1e-3})
    _, agent, actor = build(run)
    learner = Learner(agent, run.train, CPU)
    for _ in range(3):
        rollout = actor.rollout()
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    assert learner.update(rollout).finite == 1
    assert [name for name, p in agent.named_parameters() if torch.equal(p, before[name])] == []
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    bad = dataclasses.replace(rollout, reward=rollout.reward * torch.nan)
    assert learner.update(bad).finite == 0
    assert all(torch.equal(p, before[name]) for name, p in agent.named_parameters())


@pytest.mark.parametrize("core", ["compressive", "lstm"])
def test_half_precision_is_for_products_alone(core):
    """Weights, memory and logits stay in float32, and acting and learning still agree, to bf16's rounding."""
    run = tiny_agent_run(agent={"core": core}, train={"precision": "bf16"})
    _, agent, actor = build(run)
    learner = Learner(agent, run.train, CPU)
    for _ in range(3):
        rollout = actor.rollout()
        found = learner.update(rollout)
    assert found.finite == 1
    assert found.ratio.item() == pytest.approx(1, abs=0.02)
    kept = [rollout.logits, *agent.parameters(), *rollout.state.state_dict().values()]
    assert {tensor.dtype for tensor in kept if tensor.is_floating_point()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("core", ["compressive", "lstm"])
def test_it_learns_which_action_pays(core):
    """Every reward is made to be 1 for one action and 0 for all others: soon it is the only one taken."""
    run = tiny_agent_run(agent={"core": core}, train={"optimiser": "adam", "learning_rate": 1e-2, "reward_scale": 1.0})
    _, agent, actor = build(run)
    learner = Learner(agent, run.train, CPU)
    for _ in range(25):
        rollout = actor.rollout()
        learner.update(dataclasses.replace(rollout, reward=(rollout.action == 3).float()))
    assert (actor.rollout().action[:, 1:] == 3).float().mean() > 0.6


def test_statistics_of_updates_are_averaged_and_finite_if_all_are():
    first, second = (
        UpdateStats(*torch.arange(9.0).add(shift).unbind())._replace(finite=torch.ones(())) for shift in (0, 2)
    )
    found = mean_stats([first, second])
    assert [value.item() for value in found] == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert mean_stats([first, second._replace(finite=torch.zeros(()))]).finite == 0
