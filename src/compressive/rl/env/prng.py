"""Random numbers that depend on a key and a count alone: the same on every device, compiled or not, in any batch.

A lane of a task has a key of its own and counts its steps, so there is no state of a generator to be kept, moved or
captured, and nothing for a device to wait for.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def keys(seed: int, lanes: int, device: torch.device | str = "cpu") -> Tensor:
    """One key per lane, (lanes,); those of different seeds have nothing to do with each other."""
    return bits(torch.full((lanes,), seed, device=device), torch.arange(lanes, device=device))


def bits(key: Tensor, count: Tensor | int) -> Tensor:
    """32 random bits for each key and count, as int64."""
    return _mix(_mix(_mix(key & _MASK) + count & _MASK) + 0x3C6EF372 & _MASK)


def below(key: Tensor, count: Tensor | int, limit: int) -> Tensor:
    """Whole numbers from 0 to limit - 1, int64."""
    return bits(key, count) * limit >> 32


def uniform(key: Tensor, count: Tensor | int) -> Tensor:
    """Numbers between 0 and 1, neither included, float32."""
    return ((bits(key, count) >> 9).float() + 0.5) * 2.0**-23


def _mix(x: Tensor) -> Tensor:
    """Stir 32 bits; the multipliers lie below 2³¹, so that no product leaves int64."""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & _MASK
    x = x ^ x >> 15
    x = x * 0x21F0AAAD & _MASK
    return x ^ x >> 15
