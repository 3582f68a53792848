"""Score a text: -log p of every token, each exactly once, with memory carried from window to window.

Shapes: B streams, T tokens per window, n tokens in all.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compressive.config import AnyModelConfig, ModelConfig, Precision
from compressive.data.corpus import starts_within
from compressive.distributed import World
from compressive.model.embedding import asks_for_shapes
from compressive.model.language_model import LanguageModel
from compressive.model.memory import Memory
from compressive.runtime import Capture, autocast, cuda_graph, evaluating, memory_gib, synchronise

Tokens = np.ndarray[Any, np.dtype[Any]]
Nats = np.ndarray[Any, np.dtype[np.float64]]
Progress = Callable[[int, int], None]

BLOCK = 32
"""Windows copied to the device at a time."""
LONG = 2_000_000
"""Texts of at least this many tokens are read in `STREAMS` streams by default."""
STREAMS = 16
CALLED = 2
"""Windows that are read before reading is captured: compilation, and what libraries do once."""


class Window(NamedTuple):
    """One window of every stream, on the device."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    starts: Tensor | None  # (B, T), bool: a new clip begins here; None for text without clips


Read = Callable[[Window, Memory], tuple[Tensor, Memory]]
"""Reads a window of every stream; returns nats (B, T) and the next memory."""


def score(
    model: LanguageModel,
    tokens: Tokens,
    *,
    streams: int = 1,
    precision: Precision = "fp32",
    limit: int | None = None,
    progress: Progress | None = None,
    world: World | None = None,
    clips: Tokens | None = None,
) -> Nats:
    """Return -log p in nats of every token of a text (n,), or of its first `limit` tokens, as float64 (n,).

    With one stream, memory is carried through the whole text. More streams are faster: the text is cut into that
    many contiguous parts. Each part starts with empty memory, and its first token is predicted from the one token
    before it. The first token of the text has no context and costs ln(vocab_size). `progress` is called with the
    tokens read and their total. The processes of `world` share the streams, at least one each; all of them return
    the nats of the whole text. `clips` holds the positions where a new clip begins: memory is reset there, as in
    training. On a GPU windows are read as a CUDA graph, see `capture_for`. Raises ValueError if tokens are not one row
    of integers below vocab_size.
    """

    def read(window: Window, memory: Memory) -> tuple[Tensor, Memory]:
        out = model(window.tokens, memory, targets=window.targets, starts=window.starts)
        assert out.nll is not None
        return out.nll, out.memory

    capture = capture_for(model)
    with torch.no_grad(), autocast(next(model.parameters()).device, precision):
        return read_through(
            model, tokens, read if capture is None else Replayed(read, capture), streams=streams, precision=precision,
            limit=limit, progress=progress, world=world, clips=clips,
        )  # fmt: skip


def capture_for(model: LanguageModel) -> Capture | None:
    """Return what captures the reading of a window: CUDA graphs where a GPU holds the whole model, else None."""
    parameters = list(model.parameters())
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    return None if not parameters[0].is_cuda or sharded or asks_for_shapes(model.embedding) else cuda_graph


class Replayed:
    """Reads windows of one shape as `read` does: calls it for the first ones, then replays it as captured.

    What a graph reads and writes must stay where it is: the memory that is returned is overwritten by the next window.
    Autocast keeps the weights that it has cast: it must be entered within `read`, or stay on as long as this is used.
    """

    def __init__(self, read: Read, capture: Capture) -> None:
        self._read, self._capture = read, capture
        self._called = 0
        self._replay: Callable[[], object] | None = None
        self._window: Window  # these three from the first window on
        self._memory: Memory
        self._nats: Tensor

    def __call__(self, window: Window, memory: Memory) -> tuple[Tensor, Memory]:
        """Read a window; `memory` is what the last call returned."""
        if self._called < CALLED:
            self._called += 1
            nats, memory = self._read(window, memory)
            self._window = Window(*(None if x is None else x.clone() for x in window))  # type: ignore[arg-type]
            self._memory, self._nats = memory.clone(), nats.clone()
            return nats, self._memory
        for held, new in zip(self._window, window, strict=True):
            if held is not None and new is not None:
                held.copy_(new)
        if self._replay is None:
            self._replay = self._capture(self._in_place)
        self._replay()
        return self._nats.clone(), self._memory

    def _in_place(self) -> None:
        nats, memory = self._read(self._window, self._memory)
        self._nats.copy_(nats)
        self._memory.copy_(memory)


def read_through(
    model: LanguageModel,
    tokens: Tokens,
    read: Read,
    *,
    streams: int,
    precision: Precision = "fp32",
    limit: int | None,
    progress: Progress | None,
    world: World | None = None,
    clips: Tokens | None = None,
) -> Nats:
    """Call `read` on each window in evaluation mode, and put the nats (B, T) it returns into text order, (n,).

    The device is synchronised once, at the end: tokens are copied in blocks from pinned memory, and nats are copied
    back without blocking. `progress` is called after each block; on a CPU, where a block can take a minute and nothing
    has to be waited for, after each window.
    """
    device, world = next(model.parameters()).device, world or World()
    tokens = tokens if limit is None else tokens[: _at_least_1("limit", limit)]
    text = EvalStreams(tokens, streams, model.config.vocab_size, world.rank, world.size, clips)
    memory, column, parts = model.initial_memory(len(text.own), precision), 0, []
    with evaluating(model):
        for windows in text.blocks(model.config.window, device):
            block = []
            for window in windows:
                nats, memory = read(window, memory)
                block.append(nats)
                column += nats.shape[1]
                if progress is not None and device.type == "cpu":
                    progress(text.count_until(column), text.size)
            parts.append(torch.cat(block, dim=1).to("cpu", non_blocking=device.type == "cuda"))
            if progress is not None and device.type != "cpu":
                progress(text.count_until(column), text.size)
    synchronise(device)
    return world.sum(torch.from_numpy(text.gather([part.double().numpy() for part in parts]))).numpy()


def streams_for(size: int) -> int:
    """Return the default number of streams: 1, so that memory is never reset, or `STREAMS` for a long text."""
    return 1 if size < LONG else STREAMS


def memory_bytes(config: AnyModelConfig, rows: int, decoding: bool = False) -> int:
    """Return the bytes of the memories of so many batch rows; with `decoding`, of the state that generation steps from.

    Values are fp32, and counted twice: where a window ends, new memories are made beside the old ones. Weights and
    activations are not counted, so a model needs more than this.
    """
    if isinstance(config, ModelConfig):
        slots, windows = sum(config.memory_sizes) + sum(config.compressed_sizes), config.n_layers * config.window
        # Decoding keeps keys and values of all slots and of a window, and the window itself.
        values = config.d_model * (slots + (2 * (slots + windows) + windows if decoding else 0))
    else:
        values = config.residual * (config.receptive_field - 1)
    return 2 * 4 * rows * values


def require_memory(config: AnyModelConfig, rows: int, device: torch.device, decoding: bool = False) -> None:
    """Raise ValueError if a device cannot hold the memories of so many batch rows, see `memory_bytes`."""
    needed, there = memory_bytes(config, rows, decoding), memory_gib(device)
    if there is None or needed <= there * 2**30:
        return
    sizes = ("memory_size", "compressed_size") if isinstance(config, ModelConfig) else ()
    values = [f"{name}={getattr(config, name)}" for name in sizes] + [f"{'samples' if decoding else 'streams'}={rows}"]
    raise ValueError(
        f"{', '.join(values)}: memories of {-(-needed // 2**30):,} GiB or more, and "
        f"{'this machine' if device.type == 'cpu' else device} has {there:,.1f} GiB; give smaller numbers"
    )


class EvalStreams:
    """A text cut into contiguous parts, one per stream, that are read in one batch.

    Every token but the first is predicted in exactly one stream. Stream lengths differ by at most one. The last window
    is padded to full length, so all windows have the same shape and a compiled model is compiled once. With several
    processes, each reads its own streams (`own`), and all read the same number of windows.
    """

    def __init__(
        self,
        tokens: Tokens,
        streams: int,
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
        self.streams = max(1, min(max(_at_least_1("streams", streams), processes), predicted))
        self.own = range(rank * self.streams // processes, (rank + 1) * self.streams // processes)
        self.edges = np.array([stream * predicted // self.streams for stream in range(self.streams + 1)])
        self.lengths = np.diff(self.edges)

    def blocks(self, window: int, device: torch.device) -> Iterator[list[Window]]:
        """Yield all windows in blocks of up to `BLOCK`; each block is copied to the device at once."""
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
        """Return how many tokens are scored once every stream has been read up to this column."""
        return 1 + int(np.minimum(self.lengths, column).sum())

    def gather(self, parts: list[Nats]) -> Nats:
        """Put the nats of all windows, parts of shape (B, columns), into text order, (n,).

        Entries that other processes compute are 0.
        """
        nats, column = np.zeros(self.size), 0
        nats[0] = math.log(self.vocab_size) if self.own.start == 0 else 0.0
        for part in parts:
            for row, stream in enumerate(self.own):
                kept = part[row, : max(0, self.lengths[stream] - column)]
                nats[1 + self.edges[stream] + column :][: len(kept)] = kept
            column += part.shape[1]
        return nats

    def _starts(self, clips: Tokens, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Mark where clips begin in columns `start` to `stop` of this process's streams, bool (B, stop - start)."""
        return np.stack([starts_within(clips, int(self.edges[stream]), start, stop - start) for stream in self.own])

    def _columns(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return columns `start` to `stop` of this process's streams, (B, stop - start), padded with zeros."""
        columns = np.zeros((len(self.own), stop - start), dtype=np.int64)
        for row, stream in zip(columns, self.own, strict=True):
            edge, length = self.edges[stream], self.lengths[stream]
            found = self.tokens[edge + start : edge + max(start, min(stop, length + 1))]
            row[: len(found)] = found
        if columns.min() < 0 or columns.max() >= self.vocab_size:
            raise ValueError(
                f"tokens from {columns.min()} to {columns.max()}: expected 0 to {self.vocab_size - 1}, the model's "
                "vocab_size; score text of the corpus the model was trained on"
            )
        return columns


def _to_device(columns: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    tokens = torch.from_numpy(columns)
    return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens.to(device)


def _at_least_1(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name}={value}: expected at least 1")
    return value
