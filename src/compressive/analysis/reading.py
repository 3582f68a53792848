"""Read text for an analysis: streams spread over a split, read window by window, measured once memories are full.

Shapes: B streams, T tokens per window, as in `compressive.model`.
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
from compressive.evaluation.score import Progress, require_memory
from compressive.model.language_model import CompressiveLM, LMOutput
from compressive.model.memory import Memory
from compressive.runtime import evaluating

Floats = npt.NDArray[np.floating[Any]]

LEAST = 8
"""Least windows per stream with full memory; below it, fewer and longer streams are used."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Floats) -> Self:
        """Return the estimate from independent values (n,), n >= 2."""
        return cls(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.mean:z.4f} ± {self.error:.4f}"

    def verdict(self, what: str) -> str:
        """Say what something is worth in bits per token: saved, harmful, or no clear difference."""
        what = what[:1].upper() + what[1:]
        if abs(self.mean) <= 2 * self.error:
            return f"{what} makes no clear difference: {self} bits per token"
        return f"{what} {'saves' if self.mean > 0 else 'costs'} {abs(self.mean):.4f} ± {self.error:.4f} bits per token"


class Cut(NamedTuple):
    """Streams of equal length, evenly spaced over a text."""

    tokens: Tensor  # (B, n·T + 1)
    window: int  # T
    filling: int  # the first of the n windows, which only fill the memory

    @property
    def windows(self) -> int:
        """Number of windows in each stream, n."""
        return (self.tokens.shape[1] - 1) // self.window


def spread(model: CompressiveLM, text: npt.NDArray[Any], tokens: int, streams: int) -> Cut:
    """Cut streams out of a text (n,) so that about `tokens` tokens are read with full memories.

    A short text is read in fewer streams. Raises ValueError if even two streams cannot fill their memories, or if the
    device cannot hold these.
    """
    window = model.config.window
    filling = tokens_to_fill(model.config) // window
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: expected at least 1; about so many are measured, in whole windows")
    if streams < 2:
        raise ValueError(f"streams={streams}: expected at least 2, as standard errors are over streams")
    while streams > 2 and (len(text) // streams - 1) // window < filling + LEAST:
        streams //= 2
    available = (len(text) // streams - 1) // window
    if available < filling + 2:
        raise ValueError(
            f"a text of {len(text):,} tokens: expected at least {streams * ((filling + 2) * window + 1):,}, as two "
            "streams must fill their memories before anything is measured; use a longer split or smaller memory sizes"
        )
    device = next(model.parameters()).device
    require_memory(model.config, streams, device)
    count = min(available, filling + max(2, round(tokens / (streams * window))))
    starts = [stream * (len(text) // streams) for stream in range(streams)]
    rows = np.stack([text[start : start + count * window + 1] for start in starts]).astype(np.int64)
    return Cut(torch.from_numpy(rows).to(device), window, filling)


def tokens_to_fill(config: ModelConfig) -> int:
    """Return how many tokens, in whole windows, fill every slot of both memories."""

    def windows(recent: int, compressed: int, rate: int) -> int:
        # Once recent memory is full, each window evicts `window` memories.
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
    """Read tokens (B, n·T + 1) window by window; `before` may replace the memory ahead of each window."""
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
    """Copy a tensor to the CPU as a float64 array."""
    return x.cpu().double().numpy()  # MPS has no float64


def part(progress: Progress | None, begin: float, end: float) -> Progress | None:
    """Return a progress callback for the part of a longer job between the fractions `begin` and `end`."""
    if progress is None:
        return None
    return lambda done, total: progress(round(1000 * (begin + (end - begin) * done / total)), 1000)
