"""Two models on the same text, token by token: by how much one predicts it better, for words also by their frequency.

The standard error is that of the text: how far the difference would move on another text of this kind. Seeds differ
besides, see `compressive.analysis.compare`.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from compressive.analysis.reading import Estimate
from compressive.data.tokenizer import WordTokenizer
from compressive.evaluation.metrics import Split, frequency_groups
from compressive.evaluation.score import Nats

if TYPE_CHECKING:
    from compressive.data.corpus import Corpus

STRETCHES = 100
"""The text is cut into so many stretches, whose means are taken as independent, ..."""
LEAST = 32
"""... or into fewer of this many tokens."""


@dataclass(frozen=True)
class Gain:
    """What one model gains over another on some tokens of a text."""

    name: str  # all, or how often the tokens occur in training
    tokens: int
    bits: float  # per token
    other_bits: float
    difference: float  # bits less other_bits
    standard_error: float | None  # of the difference; None for fewer than two stretches

    @classmethod
    def of(cls, name: str, nats: Nats, other: Nats) -> Self:
        """Return the gain from the nats of the same tokens (n,), n >= 1, in the order of the text."""
        bits, other_bits = (float(each.mean()) / math.log(2) for each in (nats, other))
        error, stretches = None, min(STRETCHES, len(nats) // LEAST)
        if stretches > 1:
            parts = np.array_split((nats - other) / math.log(2), stretches)
            error = Estimate.of(np.array([part.mean() for part in parts])).error
        return cls(name, len(nats), bits, other_bits, bits - other_bits, error)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: also both perplexities, and by how much the other's is higher, 0.2 for 20 %."""
        perplexity, other = (relative_gain(0, bits * math.log(2)) + 1 for bits in (self.bits, self.other_bits))
        gain = relative_gain(self.bits * math.log(2), self.other_bits * math.log(2))
        return {**dataclasses.asdict(self), "perplexity": perplexity, "other_perplexity": other, "relative_gain": gain}


def relative_gain(nats: float, other: float) -> float:
    """Return by how much a perplexity is above another one, from nats per token: 0.2 if `other` gives 20 % more."""
    with np.errstate(over="ignore"):  # a model that diverged has an infinite perplexity
        return float(np.expm1(other - nats))


def gains(nats: Nats, other: Nats, corpus: "Corpus", split: Split) -> tuple[Gain, ...]:
    """Compare the nats (n,) that two models give to a split, or to its first n tokens.

    Words are also compared by how often they occur in training; ranges that do not occur are left out. The last gain
    is that of all tokens.
    """
    groups = [("all", np.ones(len(nats), bool))]
    if isinstance(tokenizer := corpus.tokenizer, WordTokenizer):
        groups = [*frequency_groups(corpus.split(split)[: len(nats)], tokenizer.counts), *groups]
    return tuple(Gain.of(name, nats[inside], other[inside]) for name, inside in groups if inside.any())
