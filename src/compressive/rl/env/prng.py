"""A counter-based random number generator: a number depends on a key and a counter alone.

Results are the same on every device, compiled or not, and in any batch. Each environment has its own key and counts
its steps, so there is no generator state to save, move or capture, and no device sync.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def keys(seed: int, n_envs: int, device: torch.device | str = "cpu") -> Tensor:
    """Return one key per environment, (n_envs,) int64. Keys of different seeds are independent."""
    return bits(torch.full((n_envs,), seed, device=device), torch.arange(n_envs, device=device))


def bits(key: Tensor, counter: Tensor | int) -> Tensor:
    """Return 32 random bits for each key and counter, as int64; the two broadcast.

    The counter is hashed before the key is added: otherwise the streams of all keys would be stretches of one sequence,
    and some of them would overlap.
    """
    at = torch.as_tensor(counter, device=key.device) & _MASK
    return _mix(_mix(_mix(at) + key & _MASK) + _mix(key & _MASK) & _MASK)


def randint(key: Tensor, counter: Tensor | int, high: int) -> Tensor:
    """Return integers from 0 to high - 1, int64."""
    return bits(key, counter) * high >> 32


def uniform(key: Tensor, counter: Tensor | int) -> Tensor:
    """Return numbers between 0 and 1, both excluded, float32."""
    return ((bits(key, counter) >> 9).float() + 0.5) * 2.0**-23


def _mix(x: Tensor) -> Tensor:
    """Hash 32 bits. The multipliers are below 2³¹, so that products fit into int64."""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & _MASK
    x = x ^ x >> 15
    x = x * 0x21F0AAAD & _MASK
    return x ^ x >> 15
