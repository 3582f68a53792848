"""The agent: acting step by step and learning window by window give the same policy, for every core."""

import dataclasses

import pytest
import torch
from rl_helpers import COMPRESSIONS, build, tiny_agent_run
from torch.nn import functional as F

from compressive.rl.agent.cores import TransformerCore

CORES = [
    *({"agent": {"core": core}} for core in ("txl", "lstm", "none")),
    *({"model": {"compression": name}} for name in COMPRESSIONS),
    *({"model": {"compression_rate": rate}} for rate in (1, 2, 8)),
    {"model": {"norm": "pre", "compressed_positions": "separate", "empty_memory": "masked"}},
    {"model": {"n_layers": 1, "compression_loss": "autoencoding"}},
]


def learn(agent, rollout):
    return agent(rollout.observation, rollout.action, rollout.reward, rollout.start, rollout.state)


@pytest.mark.parametrize(
    "tables", CORES, ids=lambda tables: "-".join(str(v) for t in tables.values() for v in t.values())
)
def test_actor_and_learner_agree_with_ends_of_episodes_inside_windows(tables):
    run = tiny_agent_run(**tables)
    _, agent, actor = build(run)
    inside = 0
    for _ in range(6):  # recent memory is full after one, compressed memory after three
        rollout = actor.rollout()
        out = learn(agent, rollout)
        inside += int(rollout.start[:, 1:-1].sum())
        torch.testing.assert_close(out.logits, rollout.logits, atol=1e-5, rtol=1e-5)
        taken = rollout.action[:, 1:, None]
        ratios = (F.log_softmax(out.logits, -1) - F.log_softmax(rollout.logits, -1)).gather(-1, taken).exp()
        torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-4, rtol=0)  # on policy
        with torch.no_grad():  # other weights from now on, as after an update
            for parameter in agent.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    assert inside > 10


@pytest.mark.parametrize("core", ["compressive", "txl", "lstm", "none"])
def test_the_value_after_a_rollout_is_the_first_of_the_next_rollout(core):
    _, agent, actor = build(tiny_agent_run(agent={"core": core}))
    actor.rollout()
    first = learn(agent, actor.rollout().clone())
    second = learn(agent, actor.rollout())
    torch.testing.assert_close(first.values[:, -1], second.values[:, 0], atol=1e-5, rtol=1e-5)


def test_memory_reaches_across_windows_but_not_across_episodes():
    _, agent, actor = build(tiny_agent_run(task={"seconds": 20.0}))
    for _ in range(3):
        rollout = actor.rollout()
    blank = dataclasses.replace(rollout, state=agent.core.initial_state(6))
    assert not torch.allclose(learn(agent, rollout).logits, learn(agent, blank).logits, atol=1e-4)
    rollout.start[:, 0] = True  # as if an episode began here
    blank = dataclasses.replace(rollout, state=agent.core.initial_state(6))
    torch.testing.assert_close(learn(agent, rollout).logits, learn(agent, blank).logits)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_core_is_invariant_to_the_scale_of_features(norm):
    _, agent, actor = build(tiny_agent_run(model={"norm": norm}))
    assert isinstance(agent.core, TransformerCore)
    rollout = actor.rollout()
    before = learn(agent, rollout).logits
    with torch.no_grad():
        for parameter in agent.core.embedding[0].parameters():
            parameter.mul_(50)
    torch.testing.assert_close(learn(agent, rollout).logits, before, atol=1e-3, rtol=1e-3)


def test_a_start_hides_the_reward_and_action_before_it():
    _, agent, _ = build(tiny_agent_run())
    seen = torch.zeros(2, 12, 16, 3, dtype=torch.uint8)
    x = agent.inputs(seen, torch.tensor([3, 5]), torch.tensor([10.0, -10.0]), torch.tensor([True, False]))
    assert not x[0, 12:].any()
    assert x[1, 12] == -1
    assert x[1, 13:].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_gradients_of_the_task_and_of_compression_do_not_mix():
    _, agent, actor = build(tiny_agent_run())
    for _ in range(3):
        rollout = actor.rollout().clone()
    out = learn(agent, rollout)
    task, compressors = agent.task_parameters(), agent.compressor_parameters()
    assert len(task) + len(compressors) == len(list(agent.parameters()))
    found = torch.autograd.grad(out.compression_loss, task, retain_graph=True, allow_unused=True)
    assert all(gradient is None for gradient in found)
    found = torch.autograd.grad(out.compression_loss, compressors, retain_graph=True)
    assert all(gradient.any() for gradient in found)
    found = torch.autograd.grad(out.logits.sum() + out.values.sum(), compressors, allow_unused=True)
    assert all(gradient is None for gradient in found)
