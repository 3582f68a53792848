"""The masks that the attention kernels compute for a seed, written out: for tests alone. Needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressive.kernels.relative_attention_kernels import PHILOX_ROUNDS, dropout_mask, philox

TILE = 64


@triton.jit
def _mask_kernel(seed_ptr, mask_ptr, T, N, threshold, TILE: tl.constexpr):
    """Write mask (H * B, T, N). Grid: (T / TILE, N / TILE, H * B)."""
    t, n, bh = tl.program_id(0) * TILE, tl.program_id(1) * TILE, tl.program_id(2)
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    mask = dropout_mask(tl.load(seed_ptr), bh, t, n, rows, columns, threshold)
    tl.store(mask_ptr + (bh * T + t + rows) * N + n + columns, mask, mask=(t + rows < T) & (n + columns < N))


def kept_weights(seed: Tensor, B: int, H: int, T: int, N: int, dropout: float) -> Tensor:
    """Return which weights the kernels keep, (B, H, T, N), bool."""
    mask = torch.empty(H, B, T, N, dtype=torch.bool, device=seed.device)
    threshold = round(dropout * 2**32) - 2**31
    _mask_kernel[(triton.cdiv(T, TILE), triton.cdiv(N, TILE), H * B)](seed, mask, T, N, threshold, TILE=TILE)
    return mask.transpose(0, 1)


@triton.jit
def _philox_kernel(seed_ptr, out_ptr, ROUNDS: tl.constexpr, OURS: tl.constexpr, SIZE: tl.constexpr):
    """Write four random numbers for each of SIZE counters, out (4, SIZE)."""
    c = tl.arange(0, SIZE)
    c0, c1, c2, c3 = c.to(tl.uint32), (c * 77 + 5).to(tl.uint32), (c // 3).to(tl.uint32), (c * c).to(tl.uint32)
    if OURS:
        r0, r1, r2, r3 = philox(tl.load(seed_ptr), c0, c1, c2, c3)
    else:
        r0, r1, r2, r3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3, ROUNDS)
    tl.store(out_ptr + c, r0.to(tl.int32, bitcast=True))
    tl.store(out_ptr + SIZE + c, r1.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * SIZE + c, r2.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3 * SIZE + c, r3.to(tl.int32, bitcast=True))


def random_numbers(seed: Tensor, ours: bool) -> Tensor:
    """Return the numbers of some counters, (4, 64), int32, by our Philox or by Triton's."""
    out = torch.empty(4, 64, dtype=torch.int32, device=seed.device)
    _philox_kernel[(1,)](seed, out, ROUNDS=PHILOX_ROUNDS, OURS=ours, SIZE=64)
    return out
