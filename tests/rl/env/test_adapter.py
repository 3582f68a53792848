"""Gymnasium environments as tasks of our agent."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from rl_helpers import CPU, build, tiny_agent_run

from compressive.config.agent import TaskConfig
from compressive.rl.env.adapter import GymnasiumTask
from compressive.rl.learning import Learner


class Corridor(gymnasium.Env):
    """A task with grey images of bytes, whose actions are numbered from 3."""

    observation_space = gymnasium.spaces.Box(0, 255, (6, 8), np.uint8)
    action_space = gymnasium.spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros((6, 8), np.uint8), {}

    def step(self, action):
        assert action in (3, 4)
        self.steps += 1
        return np.full((6, 8), self.steps, np.uint8), float(action == 4), self.steps == 5, False, {}


def corridor(**_: Any) -> Corridor:
    return Corridor()


gymnasium.register("tests/Corridor-v0", entry_point=corridor)


def test_any_id_with_images_is_a_task():
    ours = GymnasiumTask(TaskConfig("compressive.rl.gym:compressive/Rooms-v0", envs=2), 0, CPU)
    assert (ours.observation_shape, ours.n_actions) == ((72, 96, 3), 9)
    task = GymnasiumTask(TaskConfig("tests/Corridor-v0", envs=3), 0, CPU)
    assert (task.observation_shape, task.n_actions) == ((6, 8, 1), 2)
    assert task.reset().dtype == torch.uint8
    for step in range(1, 11):
        transition = task.step(torch.tensor([0, 1, 1]))
        assert transition.reward.tolist() == [0, 1, 1]
        assert transition.done.all() == (step % 5 == 0)
        assert (transition.observation == step % 5).all()  # the next episode begins in the step that ends one


@pytest.mark.slow
def test_an_agent_learns_on_vectors():
    """CartPole: some rollouts lengthen its episodes."""
    run = tiny_agent_run(
        task={"name": "CartPole-v1", "envs": 16},
        model={"n_layers": 1},
        train={"batch": 16, "optimiser": "adam", "learning_rate": 5e-3, "entropy_cost": 1e-2, "discount": 0.95},
    )
    task, agent, actor = build(run)
    assert task.observation_shape == (4,)
    learner = Learner(agent, run.train, CPU)
    ends = []
    for _ in range(100):
        rollout = actor.rollout()
        ends.append(int(rollout.outcomes.episodes))
        learner.update(rollout)
    assert sum(ends[-10:]) < 0.7 * sum(ends[:10])


def test_unsupported_environments_are_refused_by_name():
    with pytest.raises(ValueError, match="task 'Nowhere-v0': Gymnasium cannot make it"):
        GymnasiumTask(TaskConfig("Nowhere-v0", envs=1), 0, CPU)
    with pytest.raises(ValueError, match=r"task 'Pendulum-v1': its actions are Box.*expected discrete actions"):
        GymnasiumTask(TaskConfig("Pendulum-v1", envs=1), 0, CPU)
    with pytest.raises(ValueError, match=r"task 'FrozenLake-v1': its observations are Discrete\(16\)"):
        GymnasiumTask(TaskConfig("FrozenLake-v1", envs=1), 0, CPU)
