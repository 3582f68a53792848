"""Renders observations: a raycaster as a tensor program over all environments.

One ray per column finds the nearest wall. Every pixel is then wall, floor or sky, depending on its height. Objects are
flat images that face the eye. Dimensions: B environments, W columns, H rows, O objects.
"""

import torch
from torch import Tensor

from compressive.rl.env import map as layout
from compressive.rl.env.objects import SIDE, images

_NEAR = 1.0
"""Nothing nearer than this is rendered, in units."""
_ORANGE, _BLUE, _GREY, _PAD, _SKY = range(5)
_MATERIALS = ((0.93, 0.52, 0.16), (0.18, 0.34, 0.78), (0.45, 0.45, 0.45), (0.35, 0.9, 0.45), (0.62, 0.8, 0.95))


class Renderer:
    """Renders views of one size; holds the lookup tables for that on one device."""

    def __init__(self, width: int, height: int, object_size: float, device: torch.device | str = "cpu") -> None:
        self.width, self.height, self.object_size = width, height, object_size
        half = width / 2  # a horizontal field of view of 90°
        self.across = ((torch.arange(width, device=device) + 0.5) - half) / half  # (W,), right is positive
        self.down = ((torch.arange(height, device=device) + 0.5) - height / 2) / half  # (H,)
        self.faces_x, self.faces_y = (torch.tensor(faces, device=device).T for faces in layout.FACES)  # (3, faces)
        pixels = images().flatten(0, 2)
        # One table of colours: the materials, then every pixel of every object.
        self.colours = torch.cat([torch.tensor(_MATERIALS), pixels[:, :3]]).to(device) * 255
        self.solid = (pixels[:, 3] > 0).to(device)

    def __call__(
        self, x: Tensor, y: Tensor, angle: Tensor, kinds: Tensor, places: Tensor, shown: Tensor, corridor: Tensor
    ) -> Tensor:
        """Return views (B, H, W, 3), uint8, from the positions x, y and the angles, (B,) each.

        `kinds` (B, O) are the objects, `places` (B, O, 2) their positions, `shown` (B, O) whether they exist. Where
        `corridor` (B,) is True, walls are grey.
        """
        forward_x, forward_y = angle.cos()[:, None], angle.sin()[:, None]
        ray_x = forward_x + self.across * forward_y  # (B, W): right of (cos, sin) is (sin, -cos)
        ray_y = forward_y - self.across * forward_x
        depth, along, facing_x = self._walls(x[:, None], y[:, None], ray_x, ray_y)

        # Walls: panels of 32 units, alternately lighter and darker. Walls of constant y are darker than the others.
        d, down = depth[:, None], self.down[:, None]
        up = layout.EYE - down * d  # (B, H, W): height at which the ray of a pixel meets the wall
        panel = ((along / 32).floor()[:, None] + (up / 32).floor()) % 2
        shade = ((0.75 + 0.25 * facing_x) * (1 - depth / 1200))[:, None] * (0.85 + 0.15 * panel)
        wall = torch.where(corridor, _GREY, _BLUE)[:, None, None]

        # Floor: where the rays below the horizon meet it; squares of 64 units.
        reach = layout.EYE / down.clamp(min=1e-3)  # (H, 1)
        floor_x = x[:, None, None] + reach * ray_x[:, None]
        floor_y = y[:, None, None] + reach * ray_y[:, None]
        square = ((floor_x / 64).floor() + (floor_y / 64).floor()) % 2
        on_pad = (floor_x > layout.PAD.left) & (floor_x < layout.PAD.right)
        on_pad = on_pad & (floor_y > layout.PAD.bottom) & (floor_y < layout.PAD.top)
        floor_shade = (0.85 + 0.15 * square) * (1 - reach / 1200).clamp(min=0.3)

        is_floor, is_sky = up < 0, up > layout.WALL
        material = torch.where(is_floor, torch.where(on_pad, _PAD, _ORANGE), torch.where(is_sky, _SKY, wall))
        shade = torch.where(is_floor, floor_shade, torch.where(is_sky, 1 + 0.3 * down, shade))  # lighter at the horizon
        for i in range(kinds.shape[1]):
            pixel, seen = self._object(depth, x, y, forward_x, forward_y, kinds[:, i], places[:, i], shown[:, i])
            material = torch.where(seen, len(_MATERIALS) + pixel, material)
            shade = torch.where(seen, 1.0, shade)
        return (self.colours[material] * shade[..., None]).to(torch.uint8)

    def _walls(self, x: Tensor, y: Tensor, ray_x: Tensor, ray_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each column the depth of the nearest wall, the hit along it, and whether its x is constant."""

        def meet(at: Tensor, other: Tensor, ray: Tensor, ray_other: Tensor, faces: Tensor) -> tuple[Tensor, Tensor]:
            level, low, high = faces
            ray = torch.where(ray.abs() < 1e-6, 1e-6, ray)[..., None]
            distance = (level - at[..., None]) / ray
            hit = other[..., None] + distance * ray_other[..., None]
            counts = (distance > _NEAR / 4) & (hit > low - 0.01) & (hit < high + 0.01)
            nearest, which = torch.where(counts, distance, 1e4).min(dim=-1)
            return nearest, hit.gather(-1, which[..., None]).squeeze(-1)

        depth_x, along_x = meet(x, y, ray_x, ray_y, self.faces_x)
        depth_y, along_y = meet(y, x, ray_y, ray_x, self.faces_y)
        facing_x = depth_x < depth_y
        return torch.minimum(depth_x, depth_y), torch.where(facing_x, along_x, along_y), facing_x

    def _object(
        self,
        depth: Tensor,
        x: Tensor,
        y: Tensor,
        forward_x: Tensor,
        forward_y: Tensor,
        kind: Tensor,
        place: Tensor,
        shown: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return for each pixel of the view the pixel of the object's image and whether it is visible, (B, H, W)."""
        to_x, to_y = place[:, :1] - x[:, None], place[:, 1:] - y[:, None]
        ahead = to_x * forward_x + to_y * forward_y  # (B, 1)
        aside = to_x * forward_y - to_y * forward_x
        half = self.object_size / 2
        across = (self.across * ahead - aside) / half  # (B, W), from -1 to 1 on the object
        down = (self.down * ahead - (layout.EYE - layout.OBJECT_LIFT - half)) / half  # (B, H)
        column = ((across + 1) * (SIDE / 2)).clamp(0, SIDE - 1).long()
        row = ((down + 1) * (SIDE / 2)).clamp(0, SIDE - 1).long()
        pixel = ((kind[:, None] * SIDE + row) * SIDE)[:, :, None] + column[:, None]
        columns = (across.abs() < 1) & (ahead > _NEAR) & (ahead < depth) & shown[:, None]  # no wall in front of it
        return pixel, columns[:, None] & (down.abs() < 1)[:, :, None] & self.solid[pixel]
