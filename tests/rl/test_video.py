"""Videos of episodes: frames and files."""

import gymnasium
import numpy as np
import pytest
from PIL import Image
from rl_helpers import CPU

from compressive.config.agent import TaskConfig
from compressive.rl.env.adapter import GymnasiumTask
from compressive.rl.env.build import build_task
from compressive.rl.policies import RandomPolicy, load_policy
from compressive.rl.video import _GAIN, _LOSS, FLASH, MILLISECONDS, frame_time, watch, write


def test_an_episode_is_rendered_with_its_map(tmp_path):
    task, policy, about, comparable = load_policy("oracle", 1, 0, CPU, delays=(5,), watched=True)
    frames, total = watch(task, policy, seed=3)
    assert (about, total, comparable) == ("oracle", 11, False)  # a delay is not in the original
    assert len({frame.shape for frame in frames}) == 1
    height, width, _ = frames[0].shape
    assert width > 96 * 4  # the view and, beside it, the map
    assert not np.array_equal(frames[0][:, 96 * 4 :], frames[5][:, 96 * 4 :])  # the avatar moved on it
    write(frames, tmp_path / "a" / "episode.gif")
    with Image.open(tmp_path / "a" / "episode.gif") as image:
        assert getattr(image, "n_frames", None) == len(frames)
        assert image.size == (width, height)
    write(frames[:3], tmp_path / "frames")
    assert sorted(path.name for path in (tmp_path / "frames").iterdir()) == ["0000.png", "0001.png", "0002.png"]
    with Image.open(tmp_path / "frames" / "0002.png") as image:
        assert np.array_equal(np.array(image), frames[2])


def test_rewards_are_flashed_for_some_frames():
    task, policy, *_ = load_policy("oracle", 1, 0, CPU, delays=(5,), watched=True)
    frames, _ = watch(task, policy, seed=3)
    edges = [tuple(frame[0, 0]) for frame in frames]  # of the view
    (first, *others) = [number for number, edge in enumerate(edges) if edge == _GAIN]
    assert len(others) == FLASH - 1  # of the pad; the choice ends the episode
    assert others[-1] == first + FLASH - 1
    assert _LOSS not in edges


def test_fast_avatars_are_shown_slowly():
    full, fast = (build_task(TaskConfig(envs=1, speed=speed), 0, CPU) for speed in (320.0, 960.0))
    assert (frame_time(full), frame_time(fast)) == (MILLISECONDS, 3 * MILLISECONDS)


def test_any_environment_that_renders_can_be_watched():
    name = "compressive.rl.gym:compressive/Rooms-v0"
    task = build_task(TaskConfig(name, envs=1), 0, CPU, render=True)
    frames, _ = watch(task, RandomPolicy(task, 0))
    assert len(frames) == 180
    eyes = build_task(TaskConfig(observation="vector", envs=1, seconds=1.0), 0, CPU)
    frames, _ = watch(eyes, RandomPolicy(eyes, 0))
    assert frames[0].shape[1] > 96 * 4  # the rendered view and the map


def test_tasks_that_render_nothing_cannot_be_watched():
    task = build_task(TaskConfig("CartPole-v1", envs=1), 0, CPU)
    with pytest.raises(ValueError, match="only images can be watched"):
        watch(task, RandomPolicy(task, 0))


def test_what_gymnasium_lacks_for_rendering_is_said(monkeypatch):
    def render():
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")

    task = GymnasiumTask(TaskConfig("CartPole-v1", envs=1), 0, CPU, render=True)
    monkeypatch.setattr(task.vector_env, "render", render)
    with pytest.raises(ValueError, match=r"'CartPole-v1': Gymnasium cannot render it \(pygame is not installed\)"):
        watch(task, RandomPolicy(task, 0))
