"""Observations of the rooms: size, perspective, objects and walls."""

import dataclasses
import math

import pytest
import torch
from rl_helpers import actions, place

from compressive.config.agent import TaskConfig
from compressive.rl.env import map as layout
from compressive.rl.env.objects import COUNT, images
from compressive.rl.env.rooms import SECOND, Rooms

LEFT = 4


def test_observations_are_images_of_the_configured_size():
    task = Rooms(TaskConfig(envs=2))
    seen = task.reset()
    assert (seen.shape, seen.dtype) == ((2, 72, 96, 3), torch.uint8)
    sky, floor = seen[:, 0].float().mean(dim=(0, 1)), seen[:, -1].float().mean(dim=(0, 1))
    assert sky[2] > sky[0]  # blue above
    assert floor[0] > floor[2]  # orange below
    assert Rooms(TaskConfig(envs=1, width=32, height=24)).reset().shape == (1, 24, 32, 3)


def test_turning_moves_the_image():
    task = Rooms(TaskConfig(envs=1))
    place(task, example_left=True, match=0)
    before = task.observe(task.state)
    after = task.step(actions(LEFT)).observation
    # Looking left by 8.4 degrees shifts what is ahead to the right, by about 48·tan(8.4°) = 7 columns.
    shifts = [
        (before[:, 20:36, 30:60].float() - after[:, 20:36, 30 + s : 60 + s].float()).abs().mean() for s in range(12)
    ]
    assert torch.stack(shifts).argmin() in (6, 7, 8)


def test_the_36_objects_can_be_told_apart_from_where_a_trial_begins():
    task = Rooms(TaskConfig(envs=COUNT))
    task.reset()
    everyone = torch.ones(COUNT, dtype=torch.bool)
    task.state = dataclasses.replace(task.state, match=torch.arange(COUNT), example_left=everyone)
    views = task.observe(task.state).float().flatten(1)
    distance = torch.cdist(views, views) + 1e9 * torch.eye(COUNT)
    assert distance.min() > 100  # some pixels differ by much
    assert images().shape == (36, 32, 32, 4)


@pytest.mark.parametrize("size", [60, 120])
def test_objects_have_the_configured_size_and_hover_above_the_floor(size):
    task = Rooms(TaskConfig(envs=2, object_size=size))
    task.reset()
    discs = torch.tensor([0, 2])  # one plain, one spotted and of another hue
    task.state = dataclasses.replace(task.state, match=discs, example_left=torch.ones(2, dtype=torch.bool))
    plain, spotted = task.observe(task.state)
    rows, columns = (plain != spotted).any(dim=-1).nonzero().T
    per_unit = 48 / (layout.EXAMPLES[0][0] - layout.SPAWN[0])  # pixels, at that distance
    assert columns.max() - columns.min() + 1 == pytest.approx(0.95 * size * per_unit, abs=1)
    bottom = layout.OBJECT_LIFT + 0.05 * size / 2  # a disc does not quite fill its square
    assert rows.max() + 1 == pytest.approx(36 + (layout.EYE - bottom) * per_unit, abs=1)
    assert rows.min() == pytest.approx(36 + (layout.EYE - bottom - 0.95 * size) * per_unit, abs=1)


def test_objects_hide_behind_walls():
    """From the vestibule's corner the hall's left object is not in sight, though it is ahead."""
    task = Rooms(TaskConfig(envs=1))
    task.reset()
    place(task, room=SECOND, x=271.0, y=-15.0, angle=math.pi / 4)
    a = task.observe(task.state)
    place(task, match=(int(task.state.match) + 1) % 36, other=(int(task.state.other) + 1) % 36)
    assert torch.equal(a, task.observe(task.state))
