"""Memory cores: their states as they are saved."""

import pytest
import torch
from rl_helpers import build, tiny_agent_run

KEYS = {
    "lstm": {"hidden", "cell"},
    "none": {"lanes"},  # as version 0.1 called it
}


@pytest.mark.parametrize("core", ["compressive", "txl", "lstm", "none"])
def test_a_state_is_saved_and_restored(core):
    _, agent, actor = build(tiny_agent_run(agent={"core": core}))
    actor.rollout()
    saved = actor.state.state_dict()
    assert core not in KEYS or set(saved) == KEYS[core]
    restored = type(actor.state).from_state_dict(saved).state_dict()
    assert saved.keys() == restored.keys()
    assert all(torch.equal(saved[name], restored[name]) for name in saved)
    assert agent.core.initial_state(6).state_dict().keys() == saved.keys()
