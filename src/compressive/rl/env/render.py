"""What the player sees: a raycaster as a tensor program, all lanes at once.

One ray per column finds the nearest wall; every pixel is then wall, floor or sky by its height, and objects are flat
pictures that face the eye. Letters: B lanes, W columns, H rows, O objects in sight.
"""

import torch
from torch import Tensor

from compressive.rl.env import map as layout
from compressive.rl.env.objects import SIDE, pictures

_NEAR = 1.0
"""Nothing nearer than this is drawn, in units."""
_ORANGE, _BLUE, _GREY, _PAD, _SKY = range(5)
_MATERIALS = ((0.93, 0.52, 0.16), (0.18, 0.34, 0.78), (0.45, 0.45, 0.45), (0.35, 0.9, 0.45), (0.62, 0.8, 0.95))


class Renderer:
    """Renders views of a size; holds the tables that this needs, on one device."""

    def __init__(self, width: int, height: int, object_size: float, device: torch.device | str = "cpu") -> None:
        self.width, self.height, self.object_size = width, height, object_size
        half = width / 2  # a horizontal field of view of 90°
        self.across = ((torch.arange(width, device=device) + 0.5) - half) / half  # (W,), right is positive
        self.down = ((torch.arange(height, device=device) + 0.5) - height / 2) / half  # (H,)
        self.faces_x, self.faces_y = (torch.tensor(faces, device=device).T for faces in layout.FACES)  # (3, faces)
        drawn = pictures().flatten(0, 2)
        # One table of all colours: first the materials, then every pixel of every object.
        self.colours = torch.cat([torch.tensor(_MATERIALS), drawn[:, :3]]).to(device) * 255
        self.solid = (drawn[:, 3] > 0).to(device)

    def __call__(
        self, x: Tensor, y: Tensor, angle: Tensor, kinds: Tensor, places: Tensor, shown: Tensor, corridor: Tensor
    ) -> Tensor:
        """Give views (B, H, W, 3), uint8, from x, y and angle (B,).

        kinds (B, O), which objects; places (B, O, 2), where; shown (B, O), whether; corridor (B,), grey.
        """
        forward_x, forward_y = angle.cos()[:, None], angle.sin()[:, None]
        ray_x = forward_x + self.across * forward_y  # (B, W): right of (cos, sin) is (sin, -cos)
        ray_y = forward_y - self.across * forward_x
        depth, along, facing_x = self._walls(x[:, None], y[:, None], ray_x, ray_y)

        # Walls: panels of 32 units, lighter and darker by turns, and those along one axis darker than the others.
        d, down = depth[:, None], self.down[:, None]
        up = layout.EYE - down * d  # (B, H, W): height of the wall's point behind a pixel
        panel = ((along / 32).floor()[:, None] + (up / 32).floor()) % 2
        shade = ((0.75 + 0.25 * facing_x) * (1 - depth / 1200))[:, None] * (0.85 + 0.15 * panel)
        wall = torch.where(corridor, _GREY, _BLUE)[:, None, None]

        # The floor: where a ray below the horizon meets it; squares of 64 units.
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
        """Depth of the nearest wall in each column, where along it the ray hits, and whether it faces along x."""

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
        """Which pixel of an object's picture is behind each pixel of the view, and whether it is seen, (B, H, W)."""
        to_x, to_y = place[:, :1] - x[:, None], place[:, 1:] - y[:, None]
        ahead = to_x * forward_x + to_y * forward_y  # (B, 1)
        aside = to_x * forward_y - to_y * forward_x
        half = self.object_size / 2
        across = (self.across * ahead - aside) / half  # (B, W), from -1 to 1 on the object
        down = (self.down * ahead - (layout.EYE - layout.OBJECT_LIFT - half)) / half  # (B, H)
        column = ((across + 1) * (SIDE / 2)).clamp(0, SIDE - 1).long()
        row = ((down + 1) * (SIDE / 2)).clamp(0, SIDE - 1).long()
        pixel = ((kind[:, None] * SIDE + row) * SIDE)[:, :, None] + column[:, None]
        columns = (across.abs() < 1) & (ahead > _NEAR) & (ahead < depth) & shown[:, None]  # no wall before it
        return pixel, columns[:, None] & (down.abs() < 1)[:, :, None] & self.solid[pixel]
