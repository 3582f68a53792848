"""Layer norm of a residual sum, layer_norm(x + y), in Triton: one kernel forward, one backward.

x and y are (rows, D). The sum is computed in float32 and never stored. Backward, each program sums the weight and bias
gradients of its own rows in registers and adds them atomically at the end. torch.compile sums them in five kernels of
9 µs a layer; at the paper's size these kernels brought a training step from 61.5 to 60.3 ms (docs/log.md).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 4
"""Rows that a program normalises at a time."""
BACKWARD_WARPS = 1584
"""Warps that share the rows backward: twelve for each of an H200's 132 multiprocessors."""
MAX_WIDTH = 4096
"""The widest rows that fit into registers."""


# --- Kernels --------------------------------------------------------------------------------------


@triton.jit
def _load_sum(x_ptr, y_ptr, rows, n_rows, D, offs_d):
    """Load x + y in float32, zeros out of bounds. Also returns the offsets and the mask of the tile."""
    mask = (rows < n_rows)[:, None] & (offs_d < D)[None, :]
    offs = rows.to(tl.int64)[:, None] * D + offs_d[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return offs, mask, x + tl.load(y_ptr + offs, mask=mask, other=0.0)


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, n_rows, D, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write out (rows, D), and the mean and reciprocal standard deviation of each row. Grid: (rows / BLOCK_ROWS,)."""
    rows, offs_d = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    offs, mask, z = _load_sum(x_ptr, y_ptr, rows, n_rows, D, offs_d)
    mean = tl.sum(z, 1) / D
    centred = tl.where(mask, z - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0)[None, :]
    bias = tl.load(bias_ptr + offs_d, mask=offs_d < D, other=0.0)[None, :]
    tl.store(out_ptr + offs, (centred * rstd[:, None] * weight + bias).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit
def _backward_kernel(
    x_ptr, y_ptr, weight_ptr, mean_ptr, rstd_ptr, do_ptr, dz_ptr, dweight_ptr, dbias_ptr, n_rows, D,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write dz, the gradient of x + y, and add to dweight and dbias. Grid: any number of programs share the rows.

    With z_hat the normalised sum and g = do * weight: dz = (g - mean(g) - z_hat * mean(g * z_hat)) * rstd.
    """
    offs_d = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0)[None, :]
    dweight = tl.zeros([BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_D], tl.float32)
    for first_row in range(tl.program_id(0) * BLOCK_ROWS, n_rows, tl.num_programs(0) * BLOCK_ROWS):
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        offs, mask, z = _load_sum(x_ptr, y_ptr, rows, n_rows, D, offs_d)
        g = tl.load(do_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        z_hat = tl.where(mask, (z - mean) * rstd, 0.0)
        dweight += tl.sum(g * z_hat, 0)
        dbias += tl.sum(g, 0)
        g *= weight
        g_dot_z_hat = tl.sum(g * z_hat, 1)[:, None] / D
        dz = (g - tl.sum(g, 1)[:, None] / D - z_hat * g_dot_z_hat) * rstd
        tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    tl.atomic_add(dweight_ptr + offs_d, dweight, mask=offs_d < D, sem="relaxed")
    tl.atomic_add(dbias_ptr + offs_d, dbias, mask=offs_d < D, sem="relaxed")


# --- Torch operators and autograd -----------------------------------------------------------------


def _tile_options(D: int) -> dict[str, int]:
    """Block sizes and num_warps for rows of width D: a warp per 256 columns, at most eight."""
    block_d = triton.next_power_of_2(D)
    return {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_D": block_d, "num_warps": min(max(block_d // 256, 1), 8)}


@torch.library.custom_op("compressive::norm", mutates_args=())
def norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of x + y, (..., D) each, in the type of y; and the mean and rstd of each row, (...,) in float32."""
    x, y = x.contiguous(), y.contiguous()
    D = y.shape[-1]
    out, mean = torch.empty_like(y), y.new_empty(y.shape[:-1], dtype=torch.float32)
    rstd, n_rows = torch.empty_like(mean), mean.numel()
    _forward_kernel[(triton.cdiv(n_rows, BLOCK_ROWS),)](
        x, y, weight, bias, out, mean, rstd, n_rows, D, eps, **_tile_options(D)
    )
    return out, mean, rstd


@torch.library.custom_op("compressive::norm_backward", mutates_args=())
def _norm_backward(
    x: Tensor, y: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, do: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x + y, in the type of y, and those of weight and bias, (2, D) in float32."""
    x, y, do = x.contiguous(), y.contiguous(), do.contiguous()
    n_rows, D = mean.numel(), y.shape[-1]
    dz, d_affine = torch.empty_like(y), mean.new_zeros(2, D)
    options = _tile_options(D)
    _backward_kernel[(min(BACKWARD_WARPS // options["num_warps"], triton.cdiv(n_rows, BLOCK_ROWS)),)](
        x, y, weight, mean, rstd, do, dz, *d_affine, n_rows, D, **options
    )
    return dz, d_affine


@norm.register_fake
def _(x: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean = y.new_empty(y.shape[:-1], dtype=torch.float32)
    return y.new_empty(y.shape), mean, torch.empty_like(mean)


@_norm_backward.register_fake
def _(x: Tensor, y: Tensor, weight: Tensor, mean: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), mean.new_empty(2, y.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, y, weight, _, _ = inputs
    ctx.save_for_backward(x, y, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, do: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dz, d_affine = _norm_backward(*ctx.saved_tensors, do)
    return dz.to(ctx.saved_tensors[0].dtype), dz, d_affine[0], d_affine[1], None


norm.register_autograd(_backward, setup_context=_setup_context)


# --- The public function --------------------------------------------------------------------------


def add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x + y, in the type of y.

    x and y are (..., D), D at most MAX_WIDTH, of any floating types; the sum is float32. weight and bias are (D,) in
    float32. Weight and bias gradients are summed atomically, in any order: they are not bitwise reproducible.
    """
    out: Tensor = norm(x, y, weight, bias, eps)[0]
    return out
