"""The 36 objects: 12 shapes in 3 variants each, rendered once into a table of images.

The originals are textured 3D models of DeepMind Lab. The task only requires that objects can be told apart, even at a
width of eight pixels. So each object has its own hue, and each variant its own pattern.
"""

import colorsys

import torch
from torch import Tensor

SHAPES = (
    "disc", "square", "triangle", "diamond", "ring", "plus", "cross", "star", "crescent", "hourglass", "hexagon",
    "arch",
)  # fmt: skip
VARIANTS = ("plain", "striped", "spotted")
COUNT = len(SHAPES) * len(VARIANTS)
SIDE = 32
"""Width and height of an object's image, in pixels."""


def images() -> Tensor:
    """Return all objects, (COUNT, SIDE, SIDE, 4) float32 from 0 to 1: red, green, blue, and opacity (0 or 1)."""
    axis = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
    y, x = -axis[:, None].expand(SIDE, SIDE), axis.expand(SIDE, SIDE)  # y points up
    patterns = (torch.zeros_like(x, dtype=torch.bool), (y * 3).floor() % 2 == 0, x.square() + y.square() < 0.16)
    rendered = []
    for number, shape in enumerate(SHAPES):
        inside = _inside(shape, x, y)
        for variant, pattern in enumerate(patterns):
            hue = (number * len(VARIANTS) + variant * 13) % COUNT / COUNT
            light = torch.tensor(colorsys.hsv_to_rgb(hue, 0.95, 1.0))
            dark = light * 0.25 if variant == 1 else torch.ones(3)
            colour = torch.where(pattern[..., None], dark, light)
            rendered.append(torch.cat([colour, inside[..., None].float()], dim=-1))
    return torch.stack(rendered)


def _inside(shape: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the mask of a shape within the square from -1 to 1."""
    r, angle = (x.square() + y.square()).sqrt(), torch.atan2(x, y)
    match shape:
        case "disc":
            return r < 0.95
        case "square":
            return torch.maximum(x.abs(), y.abs()) < 0.82
        case "triangle":
            return (y > -0.8) & (x.abs() < (0.95 - y) * 0.55)
        case "diamond":
            return x.abs() + y.abs() < 0.98
        case "ring":
            return (r < 0.95) & (r > 0.5)
        case "plus":
            return torch.minimum(x.abs(), y.abs()) < 0.3
        case "cross":
            return torch.minimum((x - y).abs(), (x + y).abs()) < 0.4
        case "star":
            return r < 0.62 + 0.36 * torch.cos(5 * angle)
        case "crescent":
            return (r < 0.95) & ((x - 0.45).square() + y.square() > 0.5)
        case "hourglass":
            return (y.abs() < 0.95) & (x.abs() < 0.15 + 0.8 * y.abs())
        case "hexagon":
            return torch.maximum(y.abs(), x.abs() * 0.866 + y.abs() * 0.5) < 0.85
        case "arch":
            return (y > -0.9) & (x.abs() < 0.9) & ~((x.abs() < 0.4) & (y < 0.25))
    raise ValueError(f"shape={shape!r}: expected one of {', '.join(SHAPES)}")
