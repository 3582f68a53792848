"""Provenance: which tokens each slot of both memories was made of, through compression and forgetting.

Slots and their places move by the same rules: `fifo_out` and `fifo_in` of `model.memory`. A slot holds a layer's
activation at a token, which itself depends on what that layer saw; its place is the token alone.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from compressive.config.model import Compression
from compressive.model.memory import fifo_in, fifo_out

EMPTY = -1
"""The place of a slot that holds no token."""


class Places(NamedTuple):
    """The tokens behind the slots of one layer, oldest first, by their number in the text."""

    recent: Tensor  # (M,): the token of each slot, or EMPTY
    compressed: Tensor  # (C, 2): the first and the last token that each slot was made of, or EMPTY twice

    @classmethod
    def empty(cls, recent: int, compressed: int) -> Self:
        """Return the places of memories in which nothing was written."""
        return cls(torch.full((recent,), EMPTY), torch.full((compressed, 2), EMPTY))

    def resize(self, recent: int, compressed: int) -> Self:
        """Grow by empty slots or shrink by forgetting, at the old end, as `Memory.resize` does."""

        def fit(x: Tensor, size: int) -> Tensor:
            kept = x[max(0, len(x) - size) :]
            return F.pad(kept, (0, 0) * (x.ndim - 1) + (size - len(kept), 0), value=EMPTY)

        return type(self)(fit(self.recent, recent), fit(self.compressed, compressed))

    def push(self, first: int, count: int, rate: int, compression: Compression, kept: Tensor | None = None) -> Self:
        """Return the places after a window of `count` tokens from `first` on has entered (Algorithm 1, lines 8 to 11).

        `kept` (count // rate,) are the evicted slots that most-used compression keeps, by number.
        """
        entering = torch.arange(first, first + count)
        old = fifo_out(self.recent, entering, dim=0)
        new = _compressed(old, rate, compression, kept)
        return type(self)(fifo_in(self.recent, entering, dim=0), fifo_in(self.compressed, new, dim=0))


def _compressed(old: Tensor, rate: int, compression: Compression, kept: Tensor | None) -> Tensor:
    """First and last token (n // c, 2) behind what compression makes of evicted slots at places `old` (n,)."""
    if kept is not None:
        return old[kept, None].expand(-1, 2)
    reach = 7 if compression == "dilated" else 0  # three convolutions of width 3, dilated 1, 2 and 4
    begin = torch.arange(len(old) // rate) * rate
    first = old[(begin - reach).clamp(min=0)]
    last = old[(begin + rate - 1 + reach).clamp(max=len(old) - 1)]
    tokens = old[old != EMPTY]
    if len(tokens):  # they are consecutive, and empty slots come before them: a group may hold both
        first = torch.where(last == EMPTY, EMPTY, first.clamp(min=int(tokens[0])))
    return torch.stack([first, last], dim=1)
