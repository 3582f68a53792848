"""The learner: its loss, its updates, what it refuses to learn from."""

import dataclasses
import math

import pytest
import torch
from rl_helpers import CPU, build, tiny_agent_run
from torch.nn import functional as F

from compressive.rl.learning import FIGURES, Learner, shaped
from compressive.rl.vtrace import vtrace


def figures(row):
    return dict(zip(FIGURES, row.tolist(), strict=True))


def test_rewards_are_shaped_as_asked():
    rewards = torch.tensor([1.0, 10.0, -10.0])
    assert shaped(rewards, "scaled", 0.1).tolist() == pytest.approx([0.1, 1, -1])
    expected = [5 * math.tanh(0.2), 5 * math.tanh(2), -1.5 * math.tanh(2)]
    assert shaped(rewards, "asymmetric", 0.1).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("behind", [False, True], ids=["on policy", "an update behind"])
def test_the_loss_is_impala_s(behind):
    run = tiny_agent_run(train={"baseline_cost": 0.3, "entropy_cost": 0.02, "discount": 0.9})
    _, agent, actor = build(run)
    for _ in range(3):
        unroll = actor.unroll()
    if behind:
        with torch.no_grad():
            agent.policy.bias.copy_(torch.linspace(-1, 1, 9))
    out = agent(unroll.observation, unroll.action, unroll.reward, unroll.start, unroll.state)
    p = F.softmax(out.logits, -1)
    taken = F.one_hot(unroll.action[:, 1:], 9)
    log_p = (p.log() * taken).sum(-1)
    ratio = log_p - (F.log_softmax(unroll.logits, -1) * taken).sum(-1)
    discounts = 0.9 * (1 - unroll.start[:, 1:].float())
    trace = vtrace(ratio.detach(), unroll.reward[:, 1:] * 0.1, discounts, out.values.detach())
    policy = -(log_p * trace.advantages).mean()
    baseline = 0.5 * (out.values[:, :-1] - trace.targets).square().mean()
    entropy = -(p * p.log()).sum(-1).mean()
    found = figures(Learner(agent, run.train, CPU).update(unroll))
    assert found["policy_loss"] == pytest.approx(policy.item(), abs=1e-6)
    assert found["baseline_loss"] == pytest.approx(baseline.item(), rel=1e-4)
    assert found["entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    assert found["loss"] == pytest.approx((policy + 0.3 * baseline - 0.02 * entropy).item(), abs=1e-5)
    assert found["compression_loss"] == pytest.approx(out.compression_loss.item(), rel=1e-4)
    assert found["ratio"] == pytest.approx(ratio.exp().mean().item(), rel=1e-4)
    if behind:
        assert abs(found["ratio"] - 1) > 1e-2
    else:
        assert found["ratio"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("optimiser", ["rmsprop", "adam"])
def test_an_update_moves_all_weights_and_a_bad_one_none(optimiser):
    run = tiny_agent_run(train={"optimiser": optimiser, "learning_rate": 1e-3})
    _, agent, actor = build(run)
    learner = Learner(agent, run.train, CPU)
    for _ in range(3):
        unroll = actor.unroll()
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    assert figures(learner.update(unroll))["finite"] == 1
    assert [name for name, p in agent.named_parameters() if torch.equal(p, before[name])] == []
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    bad = dataclasses.replace(unroll, reward=unroll.reward * torch.nan)
    assert figures(learner.update(bad))["finite"] == 0
    assert all(torch.equal(p, before[name]) for name, p in agent.named_parameters())


@pytest.mark.parametrize("core", ["compressive", "lstm"])
def test_half_precision_is_for_products_alone(core):
    """Weights, memory and logits stay in float32, and acting and learning still agree, to bf16's rounding."""
    run = tiny_agent_run(agent={"core": core}, train={"precision": "bf16"})
    _, agent, actor = build(run)
    learner = Learner(agent, run.train, CPU)
    for _ in range(3):
        unroll = actor.unroll()
        found = figures(learner.update(unroll))
    assert found["finite"] == 1
    assert found["ratio"] == pytest.approx(1, abs=0.02)
    kept = [unroll.logits, *agent.parameters(), *unroll.state.state_dict().values()]
    assert {tensor.dtype for tensor in kept if tensor.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("core", ["compressive", "lstm"])
def test_it_learns_which_action_pays(core):
    """Every reward is made to be 1 for one action and 0 for all others: soon it is the only one taken."""
    run = tiny_agent_run(agent={"core": core}, train={"optimiser": "adam", "learning_rate": 1e-2, "reward_scale": 1.0})
    _, agent, actor = build(run)
    learner = Learner(agent, run.train, CPU)
    for _ in range(25):
        unroll = actor.unroll()
        learner.update(dataclasses.replace(unroll, reward=(unroll.action == 3).float()))
    assert (actor.unroll().action[:, 1:] == 3).float().mean() > 0.6
