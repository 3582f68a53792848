"""Score a text: -log p of every token, each exactly once, with memory carried from window to window.

B lanes, T tokens per window, n tokens in all.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compressive.config import Precision
from compressive.data.corpus import starts_within
from compressive.distributed import World
from compressive.model.language_model import CompressiveLM
from compressive.model.memory import Memory
from compressive.runtime import autocast, evaluating

Tokens = np.ndarray[Any, np.dtype[Any]]
Nats = np.ndarray[Any, np.dtype[np.float64]]
Progress = Callable[[int, int], None]

BLOCK = 32
"""How many windows travel to the device at a time."""
LONG = 2_000_000
"""From so many tokens on a text is read in `LANES` lanes, if nobody says in how many."""
LANES = 16


class Window(NamedTuple):
    """One window of every lane, on the device."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    starts: Tensor | None  # (B, T), bool: a new clip begins here; None for a text, which is one


def score(
    model: CompressiveLM,
    tokens: Tokens,
    *,
    lanes: int = 1,
    precision: Precision = "fp32",
    limit: int | None = None,
    progress: Progress | None = None,
    world: World | None = None,
    clips: Tokens | None = None,
) -> Nats:
    """Return -log p in nats of every token of a text, or of its first `limit` tokens.

    With one lane memory is carried through the whole text. More lanes are faster: the text is cut into as many
    stretches, each of which begins with empty memory, its first token predicted from the one before it alone.
    The very first token, which nothing precedes, costs ln(vocab_size). `progress` is told how many tokens are
    read, of how many. The processes of a world share the lanes, at least one each, and all get all the nats.
    `clips` says where in the text something new begins: nothing before is remembered from there on, as in training.
    """

    def read(window: Window, memory: Memory) -> tuple[Tensor, Memory]:
        out = model(window.tokens, memory, targets=window.targets, starts=window.starts)
        assert out.nll is not None
        return out.nll, out.memory

    with torch.no_grad(), autocast(model, precision):
        return read_through(model, tokens, read, lanes=lanes, limit=limit, progress=progress, world=world, clips=clips)


def read_through(
    model: CompressiveLM,
    tokens: Tokens,
    read: Callable[[Window, Memory], tuple[Tensor, Memory]],
    *,
    lanes: int,
    limit: int | None,
    progress: Progress | None,
    world: World | None = None,
    clips: Tokens | None = None,
) -> Nats:
    """Call `read` on window after window in evaluation mode, and gather the nats (B, T) that it gives.

    Nothing waits for the device before the end: tokens come in blocks from pinned memory, nats go back likewise.
    """
    device, world = next(model.parameters()).device, world or World()
    tokens = tokens if limit is None else tokens[: _at_least_1("limit", limit)]
    text = Stretches(tokens, lanes, model.config.vocab_size, world.rank, world.size, clips)
    memory, column, parts = model.initial_memory(len(text.own)), 0, []
    with evaluating(model):
        for windows in text.blocks(model.config.window, device):
            block = []
            for window in windows:
                nats, memory = read(window, memory)
                block.append(nats)
            parts.append(torch.cat(block, dim=1).to("cpu", non_blocking=device.type == "cuda"))
            column += parts[-1].shape[1]
            if progress is not None:
                progress(text.count_until(column), text.size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return world.sum(torch.from_numpy(text.gather([part.double().numpy() for part in parts]))).numpy()


def lanes_for(size: int) -> int:
    """In how many lanes to read a text: one, so that memory is as long as can be, or some where it is long."""
    return 1 if size < LONG else LANES


class Stretches:
    """A text cut into contiguous stretches, one per lane, that are read side by side.

    Every token but the first is to be predicted in exactly one lane. Lanes differ in length by one at most, so only
    the last window of each is padded, to full length: all windows have one shape, and a compiled model is compiled
    once. Of several processes each reads some of the lanes, its own; all read as many windows.
    """

    def __init__(
        self,
        tokens: Tokens,
        lanes: int,
        vocab_size: int,
        rank: int = 0,
        processes: int = 1,
        clips: Tokens | None = None,
    ) -> None:
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens of type {tokens.dtype} and shape {tokens.shape}: expected a row of integers")
        self.tokens, self.size, self.vocab_size = tokens, _at_least_1("tokens", len(tokens)), vocab_size
        self.clips = clips
        predicted = self.size - 1
        self.lanes = max(1, min(max(_at_least_1("lanes", lanes), processes), predicted))
        self.own = range(rank * self.lanes // processes, (rank + 1) * self.lanes // processes)
        self.edges = np.array([lane * predicted // self.lanes for lane in range(self.lanes + 1)])
        self.lengths = np.diff(self.edges)

    def blocks(self, window: int, device: torch.device) -> Iterator[list[Window]]:
        """Yield all windows, some at a time: they travel together."""
        count = -(-int(self.lengths.max()) // window)
        for first in range(0, count, BLOCK):
            start, stop = first * window, min(first + BLOCK, count) * window
            block = _to_device(self._columns(start, stop + 1), device)
            marks = None if self.clips is None else _to_device(self._starts(self.clips, start, stop), device)
            yield [
                Window(
                    block[:, i : i + window],
                    block[:, i + 1 : i + 1 + window],
                    None if marks is None else marks[:, i : i + window],
                )
                for i in range(0, stop - start, window)
            ]

    def count_until(self, column: int) -> int:
        """How many tokens are scored once every lane has been read up to this column."""
        return 1 + int(np.minimum(self.lengths, column).sum())

    def gather(self, parts: list[Nats]) -> Nats:
        """Put what was computed for all windows, (B, columns) in parts, back into the order of the text.

        What other processes compute stays 0 here.
        """
        nats, column = np.zeros(self.size), 0
        nats[0] = math.log(self.vocab_size) if self.own.start == 0 else 0.0
        for part in parts:
            for row, lane in enumerate(self.own):
                kept = part[row, : max(0, self.lengths[lane] - column)]
                nats[1 + self.edges[lane] + column :][: len(kept)] = kept
            column += part.shape[1]
        return nats

    def _starts(self, clips: Tokens, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Where clips begin in the inputs from `start` to `stop` of every own lane, (B, stop - start)."""
        return np.stack([starts_within(clips, int(self.edges[lane]), start, stop - start) for lane in self.own])

    def _columns(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens from `start` to `stop` of every own lane, (B, stop - start), zeros where a lane has run out."""
        columns = np.zeros((len(self.own), stop - start), dtype=np.int64)
        for row, lane in zip(columns, self.own, strict=True):
            edge, length = self.edges[lane], self.lengths[lane]
            found = self.tokens[edge + start : edge + max(start, min(stop, length + 1))]
            row[: len(found)] = found
        if columns.min() < 0 or columns.max() >= self.vocab_size:
            raise ValueError(
                f"tokens from {columns.min()} to {columns.max()}: expected 0 to {self.vocab_size - 1}, the model's "
                "vocab_size; score text of the corpus that the model was trained on"
            )
        return columns


def _to_device(columns: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    tokens = torch.from_numpy(columns)
    return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens.to(device)


def _at_least_1(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name}={value}: expected at least 1")
    return value
