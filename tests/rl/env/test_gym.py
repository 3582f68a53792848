"""Gymnasium: our rooms for others' agents, and others' tasks for ours."""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from rl_helpers import CPU, build, tiny_agent_run

import compressive.rl.env.gym
from compressive.config.agent import TaskConfig
from compressive.rl.env.adapter import GymnasiumTask
from compressive.rl.learning import Learner

SMALL = {"width": 16, "height": 12}


def test_gymnasium_s_own_checker_is_content():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make("compressive/Rooms-v0", render_mode="rgb_array", **SMALL).unwrapped)


def test_the_single_one_is_made_by_its_id_and_plays_episodes():
    env = gymnasium.make("compressive/Rooms-v0", **SMALL, seconds=2.0)
    first, _ = env.reset(seed=1)
    again, _ = env.reset(seed=1)
    assert np.array_equal(first, again)
    assert first.shape == (12, 16, 3)
    steps = 0
    while True:
        seen, reward, ended, cut, info = env.step(8)
        steps += 1
        assert env.observation_space.contains(seen)
        assert isinstance(reward, float)
        assert info == {"right": False, "wrong": False}
        if ended or cut:
            break
    assert steps == 30


def test_the_vector_one_is_made_by_its_id_and_is_the_tensor_program():
    lanes = gymnasium.make_vec("compressive/Rooms-v0", num_envs=5, **SMALL, seconds=1.0)
    assert isinstance(lanes.unwrapped, compressive.rl.env.gym.RoomsVectorEnv)
    assert lanes.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.SAME_STEP
    first, _ = lanes.reset(seed=4)
    assert lanes.observation_space.contains(first)
    ended = []
    for _ in range(30):
        seen, reward, ends, cuts, info = lanes.step(lanes.action_space.sample())
        assert lanes.observation_space.contains(seen)
        assert reward.shape == info["right"].shape == (5,)
        assert not cuts.any()
        ended.append(ends.all())
    assert [i for i, end in enumerate(ended) if end] == [14, 29]
    with pytest.raises(ValueError, match="expected one number"):
        lanes.reset(seed=[1, 2, 3, 4, 5])


class Corridor(gymnasium.Env):
    """A task with pictures: its action is wanted where the picture is bright. Actions are numbered from 3."""

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


gymnasium.register("tests/Corridor-v0", entry_point=Corridor)


def test_any_id_with_pictures_can_be_played():
    ours = GymnasiumTask(TaskConfig("compressive.rl.env.gym:compressive/Rooms-v0", lanes=2), 0, CPU)
    assert (ours.observation_shape, ours.n_actions) == ((72, 96, 3), 9)
    task = GymnasiumTask(TaskConfig("tests/Corridor-v0", lanes=3), 0, CPU)
    assert (task.observation_shape, task.n_actions) == ((6, 8, 1), 2)
    assert task.reset().dtype == torch.uint8
    for step in range(1, 11):
        transition = task.step(torch.tensor([0, 1, 1]))
        assert transition.reward.tolist() == [0, 1, 1]
        assert transition.done.all() == (step % 5 == 0)
        assert (transition.observation == step % 5).all()  # the next episode begins in the step that ends one


def test_an_agent_learns_on_vectors():
    """CartPole: some unrolls lengthen its episodes."""
    run = tiny_agent_run(
        task={"name": "CartPole-v1", "lanes": 16},
        model={"n_layers": 1},
        train={"batch": 16, "optimiser": "adam", "learning_rate": 5e-3, "entropy_cost": 1e-2, "discount": 0.95},
    )
    task, agent, actor = build(run)
    assert task.observation_shape == (4,)
    learner = Learner(agent, run.train, CPU)
    ends = []
    for _ in range(100):
        unroll = actor.unroll()
        ends.append(int(unroll.outcomes[1]))
        learner.update(unroll)
    assert sum(ends[-10:]) < 0.7 * sum(ends[:10])


def test_what_cannot_be_played_is_refused_by_name():
    with pytest.raises(ValueError, match="task 'Nowhere-v0': Gymnasium cannot make it"):
        GymnasiumTask(TaskConfig("Nowhere-v0", lanes=1), 0, CPU)
    with pytest.raises(ValueError, match=r"task 'Pendulum-v1': its actions are Box.*expected a number of them"):
        GymnasiumTask(TaskConfig("Pendulum-v1", lanes=1), 0, CPU)
    with pytest.raises(ValueError, match=r"task 'FrozenLake-v1': it shows Discrete\(16\)"):
        GymnasiumTask(TaskConfig("FrozenLake-v1", lanes=1), 0, CPU)
