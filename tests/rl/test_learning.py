"""The learner: its loss, its updates, and updates that are not finite."""

import dataclasses
import math

import pytest
import torch
from rl_helpers import CPU, build, tiny_agent_run
from torch.nn import functional as F

from compressive.config.agent import AgentRun
from compressive.rl.learning import (
    Learner,
    UpdateStats,
    between,
    correlation,
    mean_stats,
    outcome_prediction_loss,
    shaped,
)
from compressive.rl.vtrace import vtrace


def test_rewards_are_shaped_as_configured():
    rewards = torch.tensor([1.0, 10.0, -10.0])
    assert shaped(rewards, "scaled", 0.1).tolist() == pytest.approx([0.1, 1, -1])
    expected = [5 * math.tanh(0.2), 5 * math.tanh(2), -1.5 * math.tanh(2)]
    assert shaped(rewards, "asymmetric", 0.1).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("gradient", "off"), [(1e-8, 0.02), (1e-4, 0.31), (1.0, 0.02)])
def test_the_paper_s_epsilon_is_impala_s(gradient, off):
    """IMPALA sums its losses over 32 rollouts of 100 steps, and its RMSProp has epsilon 0.1 inside the root."""
    options = AgentRun.from_preset("rooms").train
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimiser = torch.optim.RMSprop([weight], lr=options.learning_rate, eps=options.epsilon)
    for _ in range(2000):  # until the mean square no longer depends on how it began
        before = weight.item()
        weight.grad = torch.full_like(weight, gradient)
        optimiser.step()
    summed = 32 * 100 * gradient
    expected = options.learning_rate * summed / math.sqrt(summed**2 + 0.1)
    assert before - weight.item() == pytest.approx(expected, rel=off)


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
    for _ in range(40):
        rollout = actor.rollout()
        learner.update(dataclasses.replace(rollout, reward=(rollout.action == 3).float()))
    assert (actor.rollout().action[:, 1:] == 3).float().mean() > 0.6


def test_statistics_of_updates_are_averaged_and_finite_if_all_are():
    first, second = (
        UpdateStats(*torch.arange(12.0).add(shift).unbind())._replace(finite=torch.ones(())) for shift in (0, 2)
    )
    found = mean_stats([first, second])
    assert [value.item() for value in found] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1]
    assert mean_stats([first, second._replace(finite=torch.zeros(()))]).finite == 0


def test_rates_change_linearly_with_progress():
    assert between(0.03, None, 0.7) == 0.03
    assert [between(0.03, 0.01, at) for at in (0.0, 0.5, 1.0, 2.0)] == pytest.approx([0.03, 0.02, 0.01, 0.01])
    run = tiny_agent_run(
        train={"optimiser": "adam", "learning_rate": 1e-2, "final_learning_rate": 1e-9, "final_entropy_cost": 0.0}
    )
    _, agent, actor = build(run)
    learner, rollout = Learner(agent, run.train, CPU), actor.rollout()
    before = [p.detach().clone() for p in agent.parameters()]
    late = learner.update(rollout, progress=1.0)
    assert max((p - q).abs().max() for p, q in zip(agent.parameters(), before, strict=True)) < 1e-7
    assert late.loss.item() == pytest.approx((late.policy_loss + 0.5 * late.baseline_loss).item(), rel=1e-5)


def test_a_choice_is_predicted_in_the_steps_before_it_and_in_its_episode_alone():
    """Two rows of five steps: a wrong choice by action 3; a right one by action 4, after an episode's start."""
    choice = torch.tensor([[0, 0, 0, 0, -1, 0], [0, 0, 0, 0, 0, 1]])
    start = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]).bool()
    logits = torch.linspace(-2, 3, 10).view(2, 5).requires_grad_()
    loss = outcome_prediction_loss(logits, choice, start, steps=3)
    counted = [(0, 1, 0.0), (0, 2, 0.0), (0, 3, 0.0), (1, 3, 1.0), (1, 4, 1.0)]
    want = torch.stack([F.binary_cross_entropy_with_logits(logits[b, t], torch.tensor(y)) for b, t, y in counted])
    assert loss.item() == pytest.approx(want.mean().item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.nonzero().tolist() == [[b, t] for b, t, _ in counted]
    assert outcome_prediction_loss(logits, choice * 0, start, steps=3) == 0


def test_the_head_that_predicts_learns_and_is_absent_by_default():
    run = tiny_agent_run(agent={"outcome_steps": 4}, train={"optimiser": "adam", "learning_rate": 1e-2})
    _, agent, actor = build(run)
    learner, rollout = Learner(agent, run.train, CPU), actor.rollout()
    choice = torch.zeros_like(rollout.choice)
    choice[:, 8] = torch.tensor([1, 1, 1, 1, 1, -1], dtype=torch.int8)
    rollout = dataclasses.replace(rollout, choice=choice)
    losses = [learner.update(rollout).outcome_loss.item() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    _, plain, _ = build(tiny_agent_run())
    assert not [name for name in plain.state_dict() if "outcome" in name]


def test_foresight_is_the_correlation_of_values_with_outcomes():
    values, choice = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 9)
    choice[0, 3], choice[2, 5], choice[3, 1] = 1, -1, 1
    made = choice != 0
    want = torch.corrcoef(torch.stack([values[made], choice[made]]))[0, 1]
    found, count = correlation(values, choice)
    torch.testing.assert_close(found, want)
    assert count == 3
    for without in (choice.abs(), choice * 0):
        found, count = correlation(values, without)
        assert found == 0
        assert count == 0
