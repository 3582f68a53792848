"""DeepMind Lab's adapter, on a stand-in with the real API's names and shapes."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from rl_helpers import CPU

from compressive.config.agent import TaskConfig
from compressive.rl.env.build import build_task
from compressive.rl.env.dmlab import ACTIONS, FIELDS, LabEnv

LEVEL = "contributed/dmlab30/rooms_select_nonmatching_object"


class Lab:
    """Answers as deepmind_lab.Lab does; an episode takes 40 frames."""

    made: list["Lab"] = []  # noqa: RUF012

    def __init__(self, level, observations, config=None, renderer="software", level_cache=None, temp_folder=""):
        assert observations == ["RGB_INTERLEAVED"]
        self.level, self.config, self.taken = level, config, []
        self.frames = None
        Lab.made.append(self)

    def action_spec(self):
        limits = {"LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": 512, "LOOK_DOWN_UP_PIXELS_PER_FRAME": 512}
        return [{"name": name, "min": -limits.get(name, 1), "max": limits.get(name, 1)} for name in FIELDS]

    def observation_spec(self):
        return [{"name": "RGB_INTERLEAVED", "shape": (0, 0, 3), "dtype": np.uint8}]

    def reset(self, episode=-1, seed=None):
        assert isinstance(seed, int)
        self.frames = 0
        return True

    def is_running(self):
        return self.frames is not None and self.frames < 40

    def observations(self):
        if not self.is_running():
            raise RuntimeError("Environment in wrong status for call to observations()")
        shape = int(self.config["height"]), int(self.config["width"]), 3
        return {"RGB_INTERLEAVED": np.full(shape, self.frames, dtype=np.uint8)}

    def step(self, action, num_steps=1):
        assert action.dtype == np.intc
        assert action.shape == (7,)
        if not self.is_running():
            raise RuntimeError("Environment in wrong status to step")
        self.taken.append(action.tolist())
        self.frames += num_steps
        return 1.0

    def close(self):
        pass


@pytest.fixture
def lab(monkeypatch):
    module: Any = ModuleType("deepmind_lab")
    module.Lab = Lab
    Lab.made = []
    monkeypatch.setitem(sys.modules, "deepmind_lab", module)


def test_gymnasium_s_checker_passes(lab):
    check_env(LabEnv(LEVEL, 16, 12), skip_render_check=True)


def test_lab_is_a_task_like_any_other(lab):
    task = build_task(TaskConfig(f"lab:{LEVEL}", envs=2), 0, CPU)
    assert task.observation_shape == (72, 96, 3)
    assert task.n_actions == 9
    assert task.reset().shape == (2, 72, 96, 3)
    ends = []
    for step in range(20):
        transition = task.step(torch.tensor([step % 9, 0]))
        ends.append(bool(transition.done.all()))
        assert transition.reward.tolist() == [1, 1]
        assert (transition.observation == 4 * ((step + 1) % 10)).all()  # frame 0 of the next episode after an end
    assert [i for i, end in enumerate(ends) if end] == [9, 19]  # 40 frames, four a step
    assert Lab.made[0].level == LEVEL
    assert Lab.made[0].config == {"width": "96", "height": "72"}


def test_actions_are_impala_s(lab):
    env = LabEnv(LEVEL)
    env.reset(seed=0)
    for action in range(9):
        env.step(action)
    assert env.lab.taken == [
        [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, -1, 0, 0, 0], [0, 0, -1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0],
        [-20, 0, 0, 0, 0, 0, 0], [20, 0, 0, 0, 0, 0, 0], [-20, 0, 0, 1, 0, 0, 0], [20, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
    ]  # fmt: skip
    assert len(ACTIONS) == 9


def test_if_it_is_not_installed_the_error_says_what_to_do():
    with pytest.raises(ValueError, match=r"deepmind_lab is not installed .* or use the task rooms"):
        LabEnv(LEVEL)
