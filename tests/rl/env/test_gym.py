"""The rooms as Gymnasium environments, registered by `import compressive.rl.gym`."""

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import compressive.rl.gym

SMALL: dict[str, Any] = {"width": 16, "height": 12}


def test_gymnasium_s_checker_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make("compressive/Rooms-v0", render_mode="rgb_array", **SMALL).unwrapped)


def test_one_environment_is_made_by_its_id_and_runs_episodes():
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


def test_many_environments_are_made_by_their_id_as_one_tensor_program():
    envs = gymnasium.make_vec("compressive/Rooms-v0", num_envs=5, **SMALL, seconds=1.0)
    assert isinstance(envs.unwrapped, compressive.rl.gym.RoomsVectorEnv)
    assert envs.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.SAME_STEP
    first, _ = envs.reset(seed=4)
    assert envs.observation_space.contains(first)
    ended = []
    for _ in range(30):
        seen, reward, ends, cuts, info = envs.step(envs.action_space.sample())
        assert envs.observation_space.contains(seen)
        assert reward.shape == info["right"].shape == (5,)
        assert not cuts.any()
        ended.append(ends.all())
    assert [i for i, end in enumerate(ended) if end] == [14, 29]
    with pytest.raises(ValueError, match="expected one number"):
        envs.reset(seed=[1, 2, 3, 4, 5])  # type: ignore[arg-type]
