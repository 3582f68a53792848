"""A skip connection and the layer norm after it as Triton kernels: one forward, one backward.

What torch's compiler makes of it sums up the gradients of weight and bias in passes of their own, which take longer
than everything else on the way back. Here every program adds its own sums to them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
"""So many rows are normed side by side."""
WARPS = 1584
"""As many share the rows on the way back: twelve for each of a large GPU's multiprocessors."""
MAX_WIDTH = 4096
"""Rows up to so wide fit into registers."""


@triton.jit
def _sums(x, y, rows, n_rows, D, columns):
    """Rows of x + y, and where there are any."""
    there = (rows < n_rows)[:, None] & (columns < D)[None, :]
    at = rows.to(tl.int64)[:, None] * D + columns[None, :]
    return at, there, tl.load(x + at, mask=there, other=0.0).to(tl.float32) + tl.load(y + at, mask=there, other=0.0)


@triton.jit
def _norm(
    x, y, weight, bias, out, means, scales, n_rows, D, epsilon, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, there, total = _sums(x, y, rows, n_rows, D, columns)
    mean = tl.sum(total, 1) / D
    off = tl.where(there, total - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(off * off, 1) / D + epsilon)
    w = tl.load(weight + columns, mask=columns < D, other=0.0)[None, :]
    b = tl.load(bias + columns, mask=columns < D, other=0.0)[None, :]
    tl.store(out + at, (off * scale[:, None] * w + b).to(out.dtype.element_ty), mask=there)
    tl.store(means + rows, mean, mask=rows < n_rows)
    tl.store(scales + rows, scale, mask=rows < n_rows)


@triton.jit
def _backward(
    x, y, weight, means, scales, d_out, d_sum, d_weight, d_bias, n_rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    w = tl.load(weight + columns, mask=columns < D, other=0.0)[None, :]
    to_weight = tl.zeros([BLOCK], tl.float32)
    to_bias = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        at, there, total = _sums(x, y, rows, n_rows, D, columns)
        given = tl.load(d_out + at, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(means + rows, mask=rows < n_rows, other=0.0)[:, None]
        scale = tl.load(scales + rows, mask=rows < n_rows, other=0.0)[:, None]
        normed = tl.where(there, (total - mean) * scale, 0.0)
        to_weight += tl.sum(given * normed, 0)
        to_bias += tl.sum(given, 0)
        given *= w
        along = tl.sum(given * normed, 1)[:, None] / D
        given = (given - tl.sum(given, 1)[:, None] / D - normed * along) * scale
        tl.store(d_sum + at, given.to(d_sum.dtype.element_ty), mask=there)
    tl.atomic_add(d_weight + columns, to_weight, mask=columns < D, sem="relaxed")
    tl.atomic_add(d_bias + columns, to_bias, mask=columns < D, sem="relaxed")


def _tile(D: int) -> dict[str, int]:
    block = triton.next_power_of_2(D)
    return {"ROWS": ROWS, "BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}


@torch.library.custom_op("compressive::norm", mutates_args=())
def norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The layer norm of x + y, (..., D) each, in the type of y; also mean and scale of every row."""
    x, y = x.contiguous(), y.contiguous()
    D = y.shape[-1]
    out, means = torch.empty_like(y), y.new_empty(y.shape[:-1], dtype=torch.float32)
    scales, n_rows = torch.empty_like(means), means.numel()
    _norm[(triton.cdiv(n_rows, ROWS),)](x, y, weight, bias, out, means, scales, n_rows, D, epsilon, **_tile(D))
    return out, means, scales


@torch.library.custom_op("compressive::norm_backward", mutates_args=())
def _norm_backward(
    x: Tensor, y: Tensor, weight: Tensor, means: Tensor, scales: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum, and of weight and bias, (2, D)."""
    x, y, d_out = x.contiguous(), y.contiguous(), d_out.contiguous()
    n_rows, D = means.numel(), y.shape[-1]
    d_sum, d_affine = torch.empty_like(y), means.new_zeros(2, D)
    tile = _tile(D)
    _backward[(min(WARPS // tile["num_warps"], triton.cdiv(n_rows, ROWS)),)](
        x, y, weight, means, scales, d_out, d_sum, *d_affine, n_rows, D, **tile
    )
    return d_sum, d_affine


@norm.register_fake
def _(x: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    means = y.new_empty(y.shape[:-1], dtype=torch.float32)
    return y.new_empty(y.shape), means, torch.empty_like(means)


@_norm_backward.register_fake
def _(x: Tensor, y: Tensor, weight: Tensor, means: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), means.new_empty(2, y.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, y, weight, _, _ = inputs
    ctx.save_for_backward(x, y, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_sum, d_affine = _norm_backward(*ctx.saved_tensors, d_out)
    return d_sum.to(ctx.saved_tensors[0].dtype), d_sum, d_affine[0], d_affine[1], None


norm.register_autograd(_differentiate, setup_context=_keep)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x + y, (..., D) each, in the type of y."""
    out: Tensor = norm(x, y, weight, bias, eps)[0]
    return out
