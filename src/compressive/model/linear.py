"""Linear maps that do less than torch's, or more in one go."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def frozen_linear(x: Tensor, weight: Tensor, n_frozen: int) -> Tensor:
    """F.linear, in the type that autocast gives it, with no gradient to the first `n_frozen` rows of x (B, N, D)."""
    if n_frozen == 0 or not torch.is_grad_enabled():
        return F.linear(x, weight)
    out: Tensor = _FrozenLinear.apply(*autocasted(x, weight), n_frozen)  # type: ignore[no-untyped-call]
    return out


def linear_relu(x: Tensor, linear: nn.Linear) -> Tensor:
    """The ReLU of a linear map of x (B, T, D); on a GPU by the product's own kernel, and not in a second pass."""
    if not x.is_cuda:
        return F.relu(linear(x))
    out: Tensor = _LinearReLU.apply(*autocasted(x, linear.weight, linear.bias))  # type: ignore[no-untyped-call]
    return out


class _FrozenLinear(torch.autograd.Function):
    """A product with a matrix whose first rows of input get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, n_frozen: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.n_frozen = n_frozen
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        d_x = F.pad(gradient[:, ctx.n_frozen :] @ weight, (0, 0, ctx.n_frozen, 0))
        return d_x, gradient.flatten(0, 1).T @ x.flatten(0, 1), None


class _LinearReLU(torch.autograd.Function):
    """Product, bias and ReLU; what was negative is known by its zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        out = torch._addmm_activation(bias, rows, weight.T)
        ctx.save_for_backward(rows, weight, out)
        ctx.shape = x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, weight, out = ctx.saved_tensors
        gradient = torch.where(out > 0, gradient.flatten(0, -2), 0)
        return (gradient @ weight).view(ctx.shape), gradient.T @ rows, gradient.sum(dim=0)


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the type that autocast gives to products, where it is on."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta, where shapes alone are computed, has none
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
