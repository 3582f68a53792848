"""The rooms as Gymnasium environments, registered by `import compressive.rl.gym`."""

import re
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from helpers import ROOT

import compressive.rl.gym

SMALL: dict[str, Any] = {"width": 16, "height": 12}


def test_gymnasium_s_checker_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make("compressive/Rooms-v0", render_mode="rgb_array", **SMALL).unwrapped)


def test_the_example_of_agent_md_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agent.md").read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["env"].reset(seed=1)[0].shape == (72, 96, 3)
    assert names["envs"].reset(seed=1)[0].shape == (64, 72, 96, 3)


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
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.step(8)


def test_the_last_observation_of_an_episode_is_its_own():
    env = gymnasium.make("compressive/Rooms-v0", render_mode="rgb_array", **SMALL, seconds=1.0)
    first, _ = env.reset(seed=1)
    for _ in range(15):
        seen, _, ended, _, _ = env.step(4)  # turns left, so nothing looks as at the start
    assert ended
    assert not np.array_equal(seen, first)
    view = env.render()
    assert isinstance(view, np.ndarray)
    assert np.array_equal(view, seen)
    longer = gymnasium.make("compressive/Rooms-v0", **SMALL, seconds=2.0)
    longer.reset(seed=1)
    for _ in range(15):
        same, *_ = longer.step(4)
    assert np.array_equal(seen, same)


def test_the_vector_environment_gives_the_last_observations_as_gymnasium_s_own_does():
    options: dict[str, Any] = {"num_envs": 3, "seconds": 1.0, "delays": (0, 10)} | SMALL
    ours = gymnasium.make_vec("compressive/Rooms-v0", **options)
    ours.reset(seed=4)
    theirs = gymnasium.make_vec(
        "compressive/Rooms-v0", vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"}, **options
    )
    theirs.reset(seed=4)
    layouts = []
    for envs in (ours, theirs):
        for _ in range(60):
            _, _, ended, _, info = envs.step(np.full(3, 4))
            assert ("final_obs" in info) == bool(ended.any())
            if ended.any():
                break
        layouts.append({name: (value.dtype, value.shape) for name, value in info.items() if name != "final_info"})
        assert info["_final_obs"].tolist() == info["_final_info"].tolist() == ended.tolist()
        assert set(info["final_info"]) == {"right", "wrong", "_right", "_wrong"}
        for env, end in enumerate(ended):
            assert (info["final_obs"][env] is not None) == end
            if end:
                assert envs.single_observation_space.contains(info["final_obs"][env])
    shared = ("final_obs", "_final_obs", "_final_info")
    assert [layouts[0][name] for name in shared] == [layouts[1][name] for name in shared]


@pytest.mark.parametrize("action", [9, -1, 1.5])
def test_an_action_out_of_range_is_an_error(action):
    env = gymnasium.make("compressive/Rooms-v0", **SMALL).unwrapped
    env.reset(seed=0)
    with pytest.raises(ValueError, match="expected 1 whole numbers from 0 to 8"):
        env.step(action)
    envs = gymnasium.make_vec("compressive/Rooms-v0", num_envs=2, **SMALL)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="expected 2 whole numbers from 0 to 8"):
        envs.step(np.array([0, action]))


def test_perfect_eyes_are_a_vector_and_still_render():
    env = gymnasium.make("compressive/Rooms-v0", render_mode="rgb_array", observation="vector", objects=4, **SMALL)
    seen, _ = env.reset(seed=1)
    assert env.observation_space.contains(seen)
    assert seen.shape == (7 + 2 * 4,)
    view = env.render()
    assert isinstance(view, np.ndarray)
    assert view.shape == (12, 16, 3)


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
