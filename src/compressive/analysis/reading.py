"""Read text for an analysis: lanes spread over a split, window by window, and only what full memories give.

Letters as in the model's room: B lanes, T tokens in a window.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compressive.config import ModelConfig
from compressive.evaluation.score import Progress
from compressive.model.language_model import CompressiveLM, LMOutput
from compressive.model.memory import Memory
from compressive.runtime import evaluating

Floats = npt.NDArray[np.floating[Any]]

LEAST = 8
"""Windows per lane, once memory is full, below which fewer and longer lanes are taken."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Floats) -> Self:
        """Take independent values, at least two."""
        return cls(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.mean:z.4f} ± {self.error:.4f}"


class Cut(NamedTuple):
    """Stretches of a text, of equal length and as far apart as they can be."""

    tokens: Tensor  # (B, n·T + 1)
    window: int  # T
    filling: int  # so many of the n windows are read first, to fill the memory

    @property
    def windows(self) -> int:
        """Windows in each lane, n."""
        return (self.tokens.shape[1] - 1) // self.window


def spread(model: CompressiveLM, text: npt.NDArray[Any], tokens: int, lanes: int) -> Cut:
    """Lay lanes over a text such that about `tokens` tokens are read with full memories.

    Where the text is too short for so many lanes, fewer are taken.
    """
    window = model.config.window
    filling = tokens_to_fill(model.config) // window
    if tokens < 1 or lanes < 2:
        raise ValueError(f"tokens={tokens}, lanes={lanes}: expected at least 1 token and, for standard errors, 2 lanes")
    while lanes > 2 and (len(text) // lanes - 1) // window < filling + LEAST:
        lanes //= 2
    room = (len(text) // lanes - 1) // window
    if room < filling + 2:
        raise ValueError(
            f"a text of {len(text):,} tokens: expected at least {lanes * ((filling + 2) * window + 1):,}, as two lanes "
            "must fill their memories before anything is measured; take a longer split or smaller memory sizes"
        )
    count = min(room, filling + max(2, round(tokens / (lanes * window))))
    starts = [lane * (len(text) // lanes) for lane in range(lanes)]
    rows = np.stack([text[start : start + count * window + 1] for start in starts]).astype(np.int64)
    return Cut(torch.from_numpy(rows).to(next(model.parameters()).device), window, filling)


def tokens_to_fill(config: ModelConfig) -> int:
    """How many tokens, in whole windows, leave no slot of either memory empty."""

    def windows(recent: int, compressed: int, rate: int) -> int:
        # Once recent memory is full each window evicts as many memories as it has tokens.
        return math.ceil(recent / config.window) + math.ceil(compressed / max(1, config.window // rate))

    sizes = zip(config.memory_sizes, config.compressed_sizes, config.compression_rates, strict=True)
    return max(windows(*size) for size in sizes) * config.window


@torch.no_grad()
def read(
    model: CompressiveLM,
    tokens: Tensor,
    memory: Memory,
    before: Callable[[Memory], Memory] | None = None,
    progress: Progress | None = None,
) -> Iterator[LMOutput]:
    """Read tokens (B, n·T + 1) window by window; `before` may change the memory ahead of each."""
    window = model.config.window
    total = tokens.shape[1] - 1
    for start in range(0, total, window):
        x, y = (tokens[:, start + shift : start + shift + window] for shift in (0, 1))
        with evaluating(model):
            out = model(x, memory if before is None else before(memory), targets=y)
        memory = out.memory
        if progress is not None:
            progress(len(tokens) * (start + window), len(tokens) * total)
        yield out


def to_numpy(x: Tensor) -> Floats:
    """Bring numbers to the CPU, in double precision."""
    return x.double().cpu().numpy()


def part(progress: Progress | None, begin: float, end: float) -> Progress | None:
    """Tell of one part of a longer piece of work, from one fraction of it to another."""
    if progress is None:
        return None
    return lambda done, total: progress(round(1000 * (begin + (end - begin) * done / total)), 1000)
