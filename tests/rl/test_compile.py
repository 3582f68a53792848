"""The functions compiled on a GPU trace to one graph each. Traced only, so no compiler is needed."""

import dataclasses

import pytest
import torch
from rl_helpers import build, tiny_agent_run

from compressive.rl.env.rooms import Rooms


@pytest.fixture(autouse=True)
def _traces(monkeypatch):
    torch._dynamo.reset()


def traced(function):
    return torch.compile(function, fullgraph=True, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("tables", [{}, {"agent": {"core": "lstm"}}, {"model": {"compression": "most_used"}}])
def test_task_acting_and_learning_are_one_graph_each(tables):
    task, agent, actor = build(tiny_agent_run(**tables))
    assert isinstance(task, Rooms)
    before = dataclasses.replace(task.state)
    _, transition = traced(task.advance)(before, torch.zeros(6, dtype=torch.long))
    _, expected = task.advance(before, torch.zeros(6, dtype=torch.long))
    assert torch.equal(transition.observation, expected.observation)
    for _ in range(3):
        rollout = actor.rollout()
    step = (rollout.observation[:, 0], rollout.action[:, 0], rollout.reward[:, 0], rollout.start[:, 0])
    torch.testing.assert_close(traced(agent.inputs)(*step), agent.inputs(*step))
    words = rollout.observation, rollout.action, rollout.reward, rollout.start, rollout.state
    found, expected = traced(agent)(*words), agent(*words)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.values, expected.values)
