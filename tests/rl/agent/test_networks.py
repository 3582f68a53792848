"""Encoders: IMPALA's network for images, and the shapes that are refused."""

import pytest
import torch
from rl_helpers import tiny_agent_run

from compressive.rl.agent.agent import Agent
from compressive.rl.agent.networks import ResNet


def test_the_network_is_impala_s():
    """Its large one: 15 convolutions, three sections of 16, 32 and 32 channels, two blocks each, 256 features."""
    run = tiny_agent_run(
        agent={"channels": (16, 32, 32), "blocks": 2, "features": 256}, task={"width": 96, "height": 72}
    )
    agent = Agent(run, (72, 96, 3), 9)
    assert isinstance(agent.encoder, ResNet)
    convolutions = [m for m in agent.encoder.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 15
    assert agent.encoder.output.in_features == 12 * 9 * 32
    assert agent.encoder(torch.zeros(2, 72, 96, 3, dtype=torch.uint8)).shape == (2, 256)


def test_observations_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"observations of shape \(3, 4\): expected images"):
        Agent(tiny_agent_run(), (3, 4), 2)
    assert isinstance(Agent(tiny_agent_run(), (5, 7, 1), 2).encoder, ResNet)
