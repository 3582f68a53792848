"""Policies: a trained agent acts as in training; policies are loaded by name with their task."""

import pytest
import torch
from rl_helpers import CPU, build, tiny_agent_run

from compressive.config.agent import TaskConfig
from compressive.rl.env.build import build_task
from compressive.rl.env.rooms import Rooms
from compressive.rl.policies import AgentPolicy, OraclePolicy, RandomPolicy, load_policy


@pytest.mark.parametrize("core", ["compressive", "lstm"])
def test_a_trained_agent_acts_as_the_learner_sees_it(core):
    """Step by step over several windows, the actions are those that the learner's pass gives."""
    run = tiny_agent_run(agent={"core": core}, task={"seconds": 10.0})
    task, agent, _ = build(run)
    policy = AgentPolicy(agent, task, 0, CPU, greedy=True)
    observation, action = task.reset(), torch.zeros(6, dtype=torch.long)
    reward, start = torch.zeros(6), torch.ones(6, dtype=torch.bool)
    seen, state = [], agent.core.initial_state(6)
    for step in range(48):
        seen.append((observation, action, reward, start))
        chosen = policy.act(observation, action, reward, start)
        if step % 16 == 15:
            window = [torch.stack(parts, dim=1) for parts in zip(*seen[-16:], strict=True)]
            x = agent.inputs(*(part.flatten(0, 1) for part in window)).unflatten(0, (6, 16))
            out = agent.core(x, state, window[3])
            state = out.state
            logits, _ = agent.head(out.hidden)
            assert torch.equal(logits[:, -1].argmax(-1), chosen)
        action = chosen
        observation, reward, start, *_ = task.step(action)


def test_policies_that_ignore_observations_get_small_ones():
    task, policy, _, comparable = load_policy("random", 4, 0, CPU)
    assert isinstance(policy, RandomPolicy)
    assert task.observation_shape == (3, 4, 3)
    assert comparable
    task = load_policy("random", 4, 0, CPU, watched=True).task
    assert task.observation_shape == (72, 96, 3)


def test_the_oracle_is_for_the_rooms_only():
    with pytest.raises(ValueError, match="it knows only the rooms"):
        OraclePolicy(build_task(TaskConfig("CartPole-v1", envs=1), 0, CPU))
    assert isinstance(build_task(TaskConfig(envs=1), 0, CPU), Rooms)
