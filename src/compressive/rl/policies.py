"""Players that learn nothing: one that draws its actions, and one that sees the whole state and plays well."""

import math

import torch
from torch import Tensor

from compressive.rl import dice, layout
from compressive.rl.rooms import FIRST, SECOND, Rooms

_FORWARD, _LEFT, _RIGHT, _FORWARD_LEFT, _FORWARD_RIGHT = 0, 4, 5, 6, 7


def random_actions(key: Tensor, count: int, n_actions: int) -> Tensor:
    """Every action as likely as any other; one per key."""
    return dice.below(key, count, n_actions)


def oracle_actions(task: Rooms) -> Tensor:
    """Walk to the pad, then to the right object, by looking at what no player may see."""
    state = task.state
    target_x = torch.where(state.room == SECOND, layout.CHOICES[0][0], (layout.PAD.left + layout.PAD.right) / 2)
    right_side = torch.where(state.match_left, layout.CHOICES[1][1], layout.CHOICES[0][1])
    target_y = torch.where(state.room == SECOND, right_side, (layout.PAD.bottom + layout.PAD.top) / 2)
    wanted = torch.atan2(target_y - state.y, target_x - state.x)
    wanted = torch.where((state.room == SECOND) | (state.room == FIRST), wanted, 0.0)
    off = torch.remainder(wanted - state.angle + math.pi, 2 * math.pi) - math.pi
    turns, far = off.abs() > task.turn / 2, off.abs() > math.pi / 4
    turning = torch.where(far, torch.where(off > 0, _LEFT, _RIGHT), torch.where(off > 0, _FORWARD_LEFT, _FORWARD_RIGHT))
    return torch.where(turns, turning, _FORWARD)
