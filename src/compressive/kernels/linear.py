"""Linear maps in mixed precision, with fewer passes over their matrices than torch's under autocast.

Under autocast torch rounds the gradient of a matrix to 16 bits and casts it to 32 in a pass of its own. Here the
product writes it in 32 bits (on a GPU, `torch.mm(out_dtype=...)`). A ReLU runs in the epilogue of the product. The
first `n_frozen` rows of the input get no gradient: Memory is detached, so the product for it is skipped.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False, n_frozen: int = 0) -> Tensor:
    """Map x (..., D), (B, N, D) where rows are frozen, by weight (E, D) and bias (E,) to (..., E).

    The product has the type that autocast gives; gradients of weight and bias have their own types.
    """
    (x,) = autocasted(x)
    out: Tensor = _Linear.apply(x, weight, bias, relu, n_frozen)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, n_frozen: int) -> Tensor:
        matrix, rows = weight.to(x.dtype), x.flatten(0, -2)
        if relu:
            assert bias is not None
            out = torch._addmm_activation(bias.to(x.dtype), rows, matrix.T)
        else:
            out = F.linear(rows, matrix, None if bias is None else bias.to(x.dtype))
        ctx.save_for_backward(rows, matrix, out if relu else None)
        ctx.shape, ctx.dtype, ctx.has_bias, ctx.n_frozen = x.shape, weight.dtype, bias is not None, n_frozen
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrix, out = ctx.saved_tensors
        d_out = d_out.flatten(0, -2)
        if out is not None:
            d_out = torch.where(out > 0, d_out, 0)  # the ReLU's input was negative where its output is 0
        d_x = None
        if ctx.needs_input_grad[0] and ctx.n_frozen:
            live = d_out.view(*ctx.shape[:-1], -1)[:, ctx.n_frozen :]
            d_x = F.pad(live @ matrix, (0, 0, ctx.n_frozen, 0))
        elif ctx.needs_input_grad[0]:
            d_x = (d_out @ matrix).view(ctx.shape)
        d_bias = d_out.sum(dim=0, dtype=ctx.dtype) if ctx.has_bias else None
        return d_x, _product(d_out.T, rows, ctx.dtype), d_bias, None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product a·b in a type of its own, unrounded where the device can."""
    if a.dtype == dtype or not a.is_cuda:
        return (a @ b).to(dtype)
    return torch.mm(a, b, out_dtype=dtype)


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the type that autocast gives to products, where it is on."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # the meta device has no autocast
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
