"""Video of an episode: the agent's observation, a map of the rooms beside it, and each reward as it comes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressive.config.agent import TaskConfig
from compressive.config.checks import require
from compressive.rl.env import map as layout
from compressive.rl.env.objects import images
from compressive.rl.env.rooms import ACTIONS, CORRIDOR, FIRST, SECOND, Rooms
from compressive.rl.env.task import Task
from compressive.rl.policies import Policy

MILLISECONDS = 67
"""Duration of a frame, at 15 steps per second."""
FLASH = 3
"""Frames for which a reward is shown."""
_HEIGHT, _MARGIN, _CAPTION = 288, 12, 32
_SMALL, _MEDIUM, _LARGE = 13, 17, 56
"""Sizes of letters, in pixels."""
_INK, _PAPER, _FLOOR, _PAD = (51, 57, 63), (255, 255, 255), (246, 226, 205), (120, 200, 140)
_GAIN, _LOSS = (38, 140, 70), (196, 50, 40)
_ROOMS = (layout.FIRST_ROOM, layout.VESTIBULE, layout.HALL)

Frame = NDArray[np.uint8]


@torch.no_grad()
def watch(task: Task, policy: Policy, seed: int = 0) -> tuple[list[Frame], float]:
    """Run one episode in a task of one environment; return its frames, (H, W, 3) uint8 each, and its return.

    Frames show the observations, or what the task renders if these are no images. Raises ValueError if it renders
    nothing, or if Pillow is missing.
    """
    observation, total, right, wrong = task.reset(seed), 0.0, 0, 0
    action = torch.zeros(1, dtype=torch.long, device=observation.device)
    reward = torch.zeros(1, device=observation.device)
    start, frames = torch.ones_like(action, dtype=torch.bool), []
    flash, since = 0.0, FLASH
    for number in range(1_000_000):
        action = policy.act(observation, action, reward, start)
        name = ACTIONS[int(action)] if isinstance(task, Rooms) else str(int(action))
        caption = f"step {number}    {name}    return {total:g}"
        if isinstance(task, Rooms):
            caption += f"    right {right}, wrong {wrong}"
        frames.append(_frame(task, _picture(task, observation), caption, flash if since < FLASH else 0.0))
        transition = task.step(action)
        observation, reward, start = transition.observation, transition.reward, transition.done
        total, right, wrong = total + float(reward), right + int(transition.right), wrong + int(transition.wrong)
        flash, since = (float(reward), 0) if reward else (flash, since + 1)
        if start:
            break
    return frames, total


def _picture(task: Task, observation: Tensor) -> Frame:
    seen = observation if observation.ndim == 4 else task.view()
    if seen is None:
        raise ValueError(
            f"observations of shape {task.observation_shape} and nothing rendered: only images can be watched; "
            "the environment has to offer the render mode rgb_array"
        )
    picture: Frame = seen[0].cpu().numpy()
    return picture


def check_out(out: Path) -> None:
    """Raise ValueError unless `write` can write there without touching files of another kind."""
    for parent in out.parents:
        require(not parent.is_file(), "out", str(out), f"a path below folders; {parent} is a file")
    if out.suffix.lower() == ".gif":
        require(not out.is_dir(), "out", str(out), "a file; this is a folder")
        if out.is_file():
            with out.open("rb") as file:
                require(file.read(4) == b"GIF8", "out", str(out), "a new file or a GIF; this file is no GIF")
        return
    require(not out.is_file(), "out", str(out), "a name that ends in .gif, or a folder for PNG files; this is a file")
    empty = not out.exists() or not any(out.iterdir())
    require(empty, "out", str(out), "a new or empty folder for PNG files, or a name that ends in .gif")


def frame_time(task: Task) -> int:
    """Return the milliseconds that a frame is shown: where the avatar is faster than in the full task, as many more."""
    speed = task.config.speed / TaskConfig.speed if isinstance(task, Rooms) else 1.0
    return round(MILLISECONDS * max(1.0, speed))


def write(frames: list[Frame], out: Path, milliseconds: int = MILLISECONDS) -> None:
    """Write a GIF or, if the name does not end in .gif, a folder of PNG files; folders are created."""
    images = [_pillow().fromarray(frame) for frame in frames]
    if out.suffix.lower() == ".gif":
        out.parent.mkdir(parents=True, exist_ok=True)
        images[0].save(out, save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
        return
    out.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        image.save(out / f"{number:04d}.png")


def _frame(task: Task, observation: Frame, caption: str, reward: float) -> Frame:
    """Return the enlarged observation with the map beside it, a caption below and, unless it is 0, the last reward."""
    image = _pillow()
    from PIL import ImageDraw

    scale = max(1, _HEIGHT // observation.shape[0])
    view = np.repeat(np.repeat(observation, scale, axis=0), scale, axis=1)
    view = np.broadcast_to(view, (*view.shape[:2], 3))
    chart = _chart(task, view.shape[0]) if isinstance(task, Rooms) else view[:, :0]
    sheet = image.fromarray(np.concatenate([view, chart], axis=1))
    page = image.new("RGB", (sheet.width, sheet.height + _CAPTION), _PAPER)
    page.paste(sheet)
    pen = ImageDraw.Draw(page)
    pen.text((_MARGIN, sheet.height + _CAPTION / 2), caption, fill=_INK, font=_font(_MEDIUM), anchor="lm")
    if reward:
        colour, (height, width) = _GAIN if reward > 0 else _LOSS, view.shape[:2]
        pen.rectangle([0, 0, width - 1, height - 1], outline=colour, width=10)
        look: dict[str, Any] = {"font": _font(_LARGE), "anchor": "mm", "stroke_width": 4, "stroke_fill": _PAPER}
        pen.text((width / 2, height / 4), f"{reward:+g}", fill=colour, **look)
    return np.array(page)


def _chart(task: Rooms, height: int) -> Frame:
    """Render the map of the rooms with the current objects and the avatar's field of view."""
    image, state = _pillow(), task.state
    from PIL import ImageDraw

    room = int(state.room)
    left, right = layout.FIRST_ROOM.left, layout.HALL.right
    bottom, top = layout.FIRST_ROOM.bottom, layout.FIRST_ROOM.top
    scale = (height - 2 * _MARGIN) / (top - bottom)
    page = image.new("RGB", (round((right - left) * scale) + 2 * _MARGIN, height), _PAPER)
    pen = ImageDraw.Draw(page)

    def at(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + (x - left) * scale, _MARGIN + (top - y) * scale

    def box(area: layout.Box, **colours: Any) -> None:
        pen.rectangle([*at(area.left, area.top), *at(area.right, area.bottom)], **colours)

    for area in _ROOMS:
        box(area, fill=_FLOOR, outline=_INK, width=2)
    door = layout.Box(layout.HALL.left - 4, layout.HALL.left + 4, layout.VESTIBULE.bottom + 4, layout.VESTIBULE.top - 4)
    box(door, fill=_FLOOR)
    box(layout.PAD, fill=_PAD)
    names = (
        ("room 1: remember", layout.FIRST_ROOM.left, layout.FIRST_ROOM.top),
        ("room 2: take the other", layout.HALL.left, layout.HALL.top),
    )
    for name, x, y in names:
        pen.text((at(x, y)[0] + 6, at(x, y)[1] + 5), name, fill=_INK, font=_font(_SMALL))
    middle = (layout.PAD.left + layout.PAD.right) / 2
    pen.text(at(middle, layout.PAD.bottom - 4), "pad", fill=_INK, font=_font(_SMALL), anchor="ma")
    shown: list[tuple[int, tuple[float, float]]] = []
    match, other = int(state.match), int(state.other)
    if room == FIRST:
        shown = [(match, layout.EXAMPLES[0 if state.example_left else 1])]
    elif room == SECOND:
        sides = (match, other) if state.match_left else (other, match)
        shown = list(zip(sides, layout.CHOICES, strict=True))
    for kind, place in shown:
        pixels = (images()[kind] * 255).to(torch.uint8).numpy()
        stamp = image.fromarray(pixels[..., :3])
        mask = image.fromarray(pixels[..., 3])
        x, y = at(*place)
        page.paste(stamp, (round(x) - stamp.width // 2, round(y) - stamp.height // 2), mask)
    if room == CORRIDOR:
        text = f"corridor: {int(state.waiting)} steps left"
        pen.text(at(layout.VESTIBULE.left, -190), text, fill=_INK, font=_font(_SMALL), anchor="mm")
        return np.array(page)
    x, y, angle = float(state.x), float(state.y), float(state.angle)
    eye = at(x, y)
    for side in (-math.pi / 4, math.pi / 4):
        pen.line([eye, at(x + 70 * math.cos(angle + side), y + 70 * math.sin(angle + side))], fill=_INK)
    radius = layout.AVATAR * scale
    pen.ellipse([eye[0] - radius, eye[1] - radius, eye[0] + radius, eye[1] + radius], fill=(200, 85, 61), outline=_INK)
    return np.array(page)


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"video needs Pillow: pip install 'compressive[rl]' ({error})") from None
    return Image
