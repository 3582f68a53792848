"""Tokens in and out: one table for both ends (Algorithm 1, line 3), plain or in bands of falling width.

The adaptive form is that of Baevski and Auli (2019) with all weights tied: the vocabulary, most frequent first,
is cut into bands; rarer bands have narrower tables and a projection. The softmax is hierarchical: a head over the
first band and one entry per further band, and inside a band a softmax of its own. The published TransformerXL also
projects the first band, by one matrix before and by another after its table (`first_band_projections`).
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config import ModelConfig
from compressive.config.model import check_cutoffs
from compressive.kernels.dispatch import choose, operation
from compressive.model.attention import upcast
from compressive.model.mixture import LogisticMixture


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
        check_cutoffs(config)
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
        self.first_input: nn.Parameter | None = None
        self.first_output: nn.Parameter | None = None
        if config.first_band_projections:
            self.first_input = nn.Parameter(torch.empty(D, D).normal_(std=D**-0.5))
            self.first_output = nn.Parameter(torch.empty(D, D).normal_(std=D**-0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens of any shape, (...) to (..., D)."""
        embedded = None
        for i, (low, high) in enumerate(self.bands):
            inside = (tokens >= low) & (tokens < high)
            band = F.embedding((tokens - low).clamp(0, high - low - 1), self.tables[i])
            weight = self.first_input if i == 0 else self.projections[i - 1]
            band = (band if weight is None else F.linear(band, weight)) * inside[..., None]
            embedded = band if embedded is None else embedded + band
        assert embedded is not None
        return embedded * math.sqrt(embedded.shape[-1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all tokens, (..., D) to (..., V)."""
        weight, bias = self._head()
        head = F.linear(self._narrow(hidden, 0), weight, bias).log_softmax(dim=-1)
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
        nll = linear_nll(self._narrow(rows, 0), *self._head(), head_target)
        for i, (low, high) in enumerate(self.bands[1:], start=1):
            band_target = torch.where((y >= low) & (y < high), y - low, -1)
            nll = nll + band_nll(self._narrow(rows, i), self.tables[i], self.biases[i], band_target)
        return nll.view_as(targets)

    def _head(self) -> tuple[Tensor, Tensor]:
        """Weights and biases of the first band's tokens and of the other bands as wholes."""
        weight = torch.cat([self.tables[0], self.band_scores.weight])
        return weight, torch.cat([self.biases[0], self.band_scores.bias])

    def _narrow(self, hidden: Tensor, band: int) -> Tensor:
        weight = self.first_output if band == 0 else self.projections[band - 1]
        return hidden if weight is None else F.linear(hidden, weight.T)


def build_embedding(config: ModelConfig) -> TiedEmbedding | AdaptiveEmbedding | LogisticMixture:
    """Return the embedding that the configuration asks for."""
    if config.head == "logistics":
        return LogisticMixture(config.vocab_size, config.d_model, config.d_model, config.mixtures)
    return AdaptiveEmbedding(config) if config.adaptive_cutoffs else TiedEmbedding(config)


@operation("linear_nll")
def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, some: bool = False) -> Tensor:
    """Return -log softmax(hidden·weightᵀ + bias)[target], (n, D), (V, D), (V,) and (n,) to (n,).

    With `some`, rows of target -1 give 0; the kernel leaves them out.
    """
    nll = F.cross_entropy(upcast(F.linear(hidden, weight, bias)), target.clamp(min=0), reduction="none")
    return nll.masked_fill(target < 0, 0) if some else nll


@operation("band_nll")
def band_nll(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """Return -log softmax(hidden·weightᵀ + bias)[target], (n, D), (V, D), (V,) and (n,) to (n,); 0 for targets of -1.

    This form looks up the rows whose target is in the band. That needs a device sync; the kernel needs none.
    """
    return linear_nll(hidden, weight, bias, target, some=True)


def asks_for_shapes(embedding: object) -> bool:
    """Whether shapes depend on data: on which words are in which band of an adaptive softmax without a kernel."""
    if not isinstance(embedding, AdaptiveEmbedding):
        return False
    widest = embedding.tables[1]  # the first band is computed for all words
    return choose("band_nll", device=widest.device.type, dtype=widest.dtype, width=widest.shape[1]).form == "reference"
