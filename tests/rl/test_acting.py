"""A rollout that is captured as a graph: what it records and what it leaves behind is that of one that is called."""

import dataclasses

import pytest
import torch
from recorded_graph import recorded
from rl_helpers import build, tiny_agent_run

from compressive.rl import acting

ROLLOUTS = acting.CALLED + 3


def rollouts(actor, count=ROLLOUTS):
    """What some rollouts in a row record; the weights change between them."""
    found = []
    for _ in range(count):
        found.append(actor.rollout().clone())
        with torch.no_grad():
            actor.agent.policy.weight.mul_(1.1)
    return found


def assert_equal(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("core", "observation"), [("compressive", "image"), ("txl", "vector"), ("lstm", "vector"), ("none", "vector")]
)
def test_captured_rollouts_are_those_that_are_called(core, observation):
    run = tiny_agent_run(agent={"core": core}, task={"observation": observation})
    called, captured = (build(run)[2] for _ in range(2))
    assert called.capture is None
    captured.capture = recorded
    for ours, theirs in zip(rollouts(captured), rollouts(called), strict=True):
        assert_equal(ours, theirs)
    for ours, theirs in zip(captured.state_dict().values(), called.state_dict().values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_captured_rollout_goes_on_from_a_loaded_state():
    run = tiny_agent_run()
    called, captured = (build(run)[2] for _ in range(2))
    captured.capture = recorded
    saved = {part: {name: x.clone() for name, x in parts.items()} for part, parts in called.state_dict().items()}
    rollouts(captured)
    rollouts(called)
    for actor in (called, captured):
        actor.load_state_dict({part: {name: x.clone() for name, x in parts.items()} for part, parts in saved.items()})
    for ours, theirs in zip(rollouts(captured, 2), rollouts(called, 2), strict=True):
        assert_equal(ours, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_rollouts_are_captured_on_a_gpu():
    run = tiny_agent_run()
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, compile=True, device="cuda"))
    found = []
    for captures in (True, False):
        torch._dynamo.reset()
        _, _, actor = build(run, device=torch.device("cuda"))
        assert actor.capture is not None
        if not captures:
            actor.capture = None
        found.append(rollouts(actor))
    for ours, theirs in zip(*found, strict=True):
        for name in ("observation", "action", "reward", "start", "choice"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        torch.testing.assert_close(ours.logits, theirs.logits)
