"""Tokens in and out: one table for both ends (Algorithm 1, line 3), plain or in bands of falling width.

The adaptive form is that of Baevski and Auli (2019) with all weights tied: the vocabulary, most frequent first,
is cut into bands; rarer bands have narrower tables and a projection. The softmax is hierarchical: a head over the
first band and one entry per further band, and inside a band a softmax of its own.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config import ModelConfig
from compressive.kernels.linear import autocasted
from compressive.model.attention import precise
from compressive.model.mixture import LogisticMixture

CHUNK = 2**23
"""How many logits `linear_nll` holds at a time."""


class TiedEmbedding(nn.Module):
    """One table that embeds tokens and, transposed, scores them.

    Line 3 has h = x W_emb. As in TransformerXL, and a departure from the line, it is scaled by sqrt(D), so that
    activations of unit size and logits of unit size come from one table.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        nn.init.normal_(self.table, std=config.d_model**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens of any shape, (...) to (..., D)."""
        return F.embedding(tokens, self.table) * math.sqrt(self.table.shape[1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Score all tokens, (..., D) to (..., V)."""
        return F.linear(hidden, self.table, self.bias)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return -log p of one token each, (B, T, D) and (B, T) to (B, T), never holding all logits."""
        return linear_nll(hidden.flatten(0, 1), self.table, self.bias, targets.flatten()).view_as(targets)


class AdaptiveEmbedding(nn.Module):
    """Adaptive input and adaptive softmax from one set of tables and projections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.d_model
        edges = (0, *config.adaptive_cutoffs, config.vocab_size)
        self.bands = list(pairwise(edges))
        widths = [D // config.adaptive_factor**i for i in range(len(self.bands))]
        self.tables = nn.ParameterList(
            torch.empty(high - low, width).normal_(std=width**-0.5)
            for (low, high), width in zip(self.bands, widths, strict=True)
        )
        self.biases = nn.ParameterList(torch.zeros(high - low) for low, high in self.bands)
        self.projections = nn.ParameterList(torch.empty(D, width).normal_(std=D**-0.5) for width in widths[1:])
        self.band_scores = nn.Linear(D, len(self.bands) - 1)
        nn.init.normal_(self.band_scores.weight, std=D**-0.5)
        nn.init.zeros_(self.band_scores.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens of any shape, (...) to (..., D)."""
        embedded = None
        for i, (low, high) in enumerate(self.bands):
            inside = (tokens >= low) & (tokens < high)
            band = F.embedding((tokens - low).clamp(0, high - low - 1), self.tables[i])
            band = (band if i == 0 else F.linear(band, self.projections[i - 1])) * inside[..., None]
            embedded = band if embedded is None else embedded + band
        assert embedded is not None
        return embedded * math.sqrt(embedded.shape[-1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all tokens, (..., D) to (..., V)."""
        weight, bias = self._head()
        head = F.linear(hidden, weight, bias).log_softmax(dim=-1)
        parts = [head[..., : self.bands[0][1]]]
        for i in range(1, len(self.bands)):
            inside = F.linear(self._narrow(hidden, i), self.tables[i], self.biases[i]).log_softmax(dim=-1)
            parts.append(head[..., self.bands[0][1] + i - 1, None] + inside)
        return torch.cat(parts, dim=-1)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return -log p of one token each, (B, T, D) and (B, T) to (B, T); a band's softmax only for its own tokens."""
        rows, y = hidden.flatten(0, 1), targets.flatten()
        head_target = y
        for i, (low, high) in enumerate(self.bands[1:]):
            head_target = torch.where((y >= low) & (y < high), self.bands[0][1] + i, head_target)
        nll = linear_nll(rows, *self._head(), head_target)
        for i, (low, high) in enumerate(self.bands[1:], start=1):
            band_target = torch.where((y >= low) & (y < high), y - low, -1)
            nll = nll + linear_nll(self._narrow(rows, i), self.tables[i], self.biases[i], band_target, some=True)
        return nll.view_as(targets)

    def _head(self) -> tuple[Tensor, Tensor]:
        """Weights and biases of the first band's tokens and of the other bands as wholes."""
        weight = torch.cat([self.tables[0], self.band_scores.weight])
        return weight, torch.cat([self.biases[0], self.band_scores.bias])

    def _narrow(self, hidden: Tensor, band: int) -> Tensor:
        return F.linear(hidden, self.projections[band - 1].T)


def build_embedding(config: ModelConfig) -> TiedEmbedding | AdaptiveEmbedding | LogisticMixture:
    """Return the embedding that the configuration asks for."""
    if config.head == "logistics":
        return LogisticMixture(config.vocab_size, config.d_model, config.d_model, config.mixtures)
    return AdaptiveEmbedding(config) if config.adaptive_cutoffs else TiedEmbedding(config)


def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool = False) -> Tensor:
    """Return -log softmax(hidden·weightᵀ + bias)[target], (n, D), (V, D), (V,) and (n,) to (n,), in chunks of rows.

    With `some`, rows of target -1 are left out: they cost nothing and give 0. Which they are must then be asked of the
    device; without it nothing waits. The backward pass computes its logits again rather than keep them.
    """
    nll: Tensor = _linear_nll(*autocasted(hidden, weight, bias), target, some)
    return nll


# An operator of its own, because which rows a band needs is known only at run time: the compiler takes it whole.
@torch.library.custom_op("compressive::linear_nll", mutates_args=())
def _linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool) -> Tensor:
    nll = _zeros_for(hidden, target)
    for rows in _chunks(target, len(weight), some):
        logits = precise(F.linear(hidden[rows], weight, bias))
        nll[rows] = logits.logsumexp(dim=1) - logits.gather(1, target[rows, None]).squeeze(1)
    return nll


@torch.library.custom_op("compressive::linear_nll_backward", mutates_args=())
def _linear_nll_backward(
    gradient: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden, d_weight, d_bias = torch.zeros_like(hidden), precise(weight) * 0, precise(bias) * 0
    for rows in _chunks(target, len(weight), some):
        d_logits = precise(F.linear(hidden[rows], weight, bias)).softmax(dim=1)
        d_logits.scatter_add_(1, target[rows, None], -torch.ones_like(d_logits[:, :1]))
        d_logits = (d_logits * gradient[rows, None]).to(hidden.dtype)
        d_hidden[rows] = d_logits @ weight
        d_weight += d_logits.T @ hidden[rows]  # summed over chunks in float32, bf16 would lose the small ones
        d_bias += d_logits.sum(dim=0)
    return d_hidden, d_weight.to(weight.dtype), d_bias.to(bias.dtype)


@_linear_nll.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool) -> Tensor:
    return _zeros_for(hidden, target)


@_linear_nll_backward.register_fake
def _(
    gradient: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(bias)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.some = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, gradient):  # type: ignore[no-untyped-def]
    return *_linear_nll_backward(gradient, *ctx.saved_tensors, ctx.some), None, None


_linear_nll.register_autograd(_differentiate, setup_context=_remember)


def _zeros_for(hidden: Tensor, target: Tensor) -> Tensor:
    return precise(hidden.new_zeros(target.shape))


def _chunks(target: Tensor, n_classes: int, some: bool) -> Sequence[slice | Tensor]:
    """The rows to compute, a few at a time."""
    size = max(1, CHUNK // n_classes)
    if some:
        return torch.split((target >= 0).nonzero().squeeze(1), size)
    return [slice(start, start + size) for start in range(0, len(target), size)]
