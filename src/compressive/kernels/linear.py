"""Linear maps in mixed precision: fewer passes over their matrices than torch's under autocast, and nothing lost.

Under autocast on a GPU, torch rounds the gradient of a matrix to 16 bits and turns it into 32 again, in a pass of its
own. Here the product gives it in 32 bits right away. A ReLU comes along in the product's own kernel.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """A linear map."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., D)."""
        if not (x.is_cuda and torch.is_autocast_enabled("cuda") and torch.is_grad_enabled()):
            return F.linear(x, self.weight, self.bias)
        return _apply(x, self.weight, self.bias)


def linear_relu(x: Tensor, linear: nn.Linear) -> Tensor:
    """The ReLU of a linear map with a bias."""
    weight, bias = linear.weight, linear.bias
    return _apply(x, weight, bias, relu=True) if x.is_cuda else F.relu(F.linear(x, weight, bias))


def frozen_linear(x: Tensor, weight: Tensor, n_frozen: int) -> Tensor:
    """A linear map of x (B, N, D), with no gradient to the first `n_frozen` rows."""
    if n_frozen == 0 or not torch.is_grad_enabled():
        return F.linear(x, weight)
    return _apply(x, weight, n_frozen=n_frozen)


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False, n_frozen: int = 0) -> Tensor:
    (x,) = autocasted(x)
    out: Tensor = _Linear.apply(x, weight, bias, relu, n_frozen)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """A product in the type of its input; gradients of matrix and bias are of their own types."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, n_frozen: int) -> Tensor:
        matrix, rows = weight.to(x.dtype), x.flatten(0, -2)
        if relu:
            assert bias is not None
            out = torch._addmm_activation(bias.to(x.dtype), rows, matrix.T)
        else:
            out = F.linear(rows, matrix, None if bias is None else bias.to(x.dtype))
        ctx.save_for_backward(rows, matrix, out if relu else None)
        ctx.shape, ctx.kind, ctx.of_bias, ctx.n_frozen = x.shape, weight.dtype, bias is not None, n_frozen
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrix, out = ctx.saved_tensors
        gradient = gradient.flatten(0, -2)
        if out is not None:
            gradient = torch.where(out > 0, gradient, 0)  # what was negative is known by its zero
        d_x = None
        if ctx.needs_input_grad[0] and ctx.n_frozen:
            reached = gradient.view(*ctx.shape[:-1], -1)[:, ctx.n_frozen :]
            d_x = F.pad(reached @ matrix, (0, 0, ctx.n_frozen, 0))
        elif ctx.needs_input_grad[0]:
            d_x = (gradient @ matrix).view(ctx.shape)
        d_bias = gradient.sum(dim=0, dtype=ctx.kind) if ctx.of_bias else None
        return d_x, _product(gradient.T, rows, ctx.kind), d_bias, None, None


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    """A product in another type than its factors'."""
    if a.dtype == kind or not a.is_cuda:
        return (a @ b).to(kind)
    return torch.mm(a, b, out_dtype=kind)


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the type that autocast gives to products, where it is on."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta, where shapes alone are computed, has none
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
