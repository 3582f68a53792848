"""-log softmax of one target per row, in chunks of rows: all logits of a window are never held at once.

The backward pass computes the logits again rather than keep them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compressive.kernels.linear import autocasted

CHUNK = 2**23
"""How many logits are held at a time."""


def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool = False) -> Tensor:
    """Return -log softmax(hidden·weightᵀ + bias)[target], (n, D), (V, D), (V,) and (n,) to (n,).

    With `some`, rows of target -1 are left out: they cost nothing and give 0. Finding them needs a device sync.
    """
    nll: Tensor = _linear_nll(*autocasted(hidden, weight, bias), target, some)
    return nll


# A custom operator, because which rows a band needs is known only at run time: the compiler takes it whole.
@torch.library.custom_op("compressive::linear_nll", mutates_args=())
def _linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool) -> Tensor:
    nll = _zeros_for(hidden, target)
    for rows in _chunks(target, len(weight), some):
        logits = _upcast(F.linear(hidden[rows], weight, bias))
        nll[rows] = logits.logsumexp(dim=1) - logits.gather(1, target[rows, None]).squeeze(1)
    return nll


@torch.library.custom_op("compressive::linear_nll_backward", mutates_args=())
def _linear_nll_backward(
    d_nll: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden, d_weight, d_bias = torch.zeros_like(hidden), _upcast(weight) * 0, _upcast(bias) * 0
    for rows in _chunks(target, len(weight), some):
        d_logits = _upcast(F.linear(hidden[rows], weight, bias)).softmax(dim=1)
        d_logits.scatter_add_(1, target[rows, None], -torch.ones_like(d_logits[:, :1]))
        d_logits = (d_logits * d_nll[rows, None]).to(hidden.dtype)
        d_hidden[rows] = d_logits @ weight
        d_weight += d_logits.T @ hidden[rows]  # summed over chunks in float32: bf16 would lose the small ones
        d_bias += d_logits.sum(dim=0)
    return d_hidden, d_weight.to(weight.dtype), d_bias.to(bias.dtype)


@_linear_nll.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool) -> Tensor:
    return _zeros_for(hidden, target)


@_linear_nll_backward.register_fake
def _(
    d_nll: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.some = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_nll: Tensor) -> tuple[Tensor | None, ...]:
    return *_linear_nll_backward(d_nll, *ctx.saved_tensors, ctx.some), None, None


_linear_nll.register_autograd(_backward, setup_context=_setup_context)


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _zeros_for(hidden: Tensor, target: Tensor) -> Tensor:
    return _upcast(hidden.new_zeros(target.shape))


def _chunks(target: Tensor, n_classes: int, some: bool) -> Sequence[slice | Tensor]:
    """The rows to compute, a few at a time."""
    size = max(1, CHUNK // n_classes)
    if some:
        return torch.split((target >= 0).nonzero().squeeze(1), size)
    return [slice(start, start + size) for start in range(0, len(target), size)]
