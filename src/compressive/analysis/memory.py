"""How much memory helps: the loss with all of it, with parts of it masked, and as it fills from empty.

Memories are hidden through their validity masks; weights and model code do not change. The result says how much this
model relies on a memory. A model trained without that memory may do better than this one with it hidden.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compressive.analysis.reading import Cut, Estimate, Floats, part, read, spread, to_numpy
from compressive.config import ModelConfig
from compressive.evaluation.score import Progress
from compressive.model.language_model import CompressiveLM
from compressive.model.memory import Memory
from compressive.plotting import COLOURS, INK, WIDTH, Panel, arrange, hover, save, tidy, tip

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERYTHING, NO_COMPRESSED, NOTHING = "everything", "compressed_memory_hidden", "all_memory_hidden"

LEAST = 1e-4
"""Lowest loss difference that the logarithmic axis of the figure shows, in bits."""
NEAR = 0.05
"""Bits above full memory that count as near it."""
FIRST_WINDOWS = 256
"""Starts from empty memory of which only the first window is read, at most. Few starts are read to the end, and what
the first tokens cost differs by whole bits from place to place."""
PASSAGE = 600
"""Tokens of a passage, about; whole windows."""
PASSAGES = 4
"""Passages whose single tokens are kept: spread over the text, and the one where compressed memory helped most."""


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens, read with full memories, and what each cost."""

    before: int  # the token before the first
    tokens: list[int]
    bits: list[float]
    gains: list[float] | None  # bits that compressed memory saved, by token; None if there is none
    chosen: str  # why this passage


@dataclass(frozen=True)
class Since:
    """Loss over a range of tokens read since an empty memory."""

    first: int  # first token of the range, counted from 1
    last: int  # last token, included
    bits: float  # per token
    excess: Estimate  # over the bits of the same tokens with full memories


@dataclass(frozen=True)
class MemoryUse:
    """What each memory is worth, in bits per token; standard errors are over streams, or over starts."""

    tokens: int
    streams: int
    conditions: dict[str, Estimate]
    compressed_worth: Estimate | None  # loss increase if compressed memory is hidden; None if there is none
    recent_worth: Estimate | None  # further increase if recent memory is hidden too
    starts: int  # how many times reading started from empty memory and went on as far as `since_empty` goes
    first_windows: int  # how many times it started, for the rows of `since_empty` within the first window
    since_empty: tuple[Since, ...]
    reach: tuple[int, int, int]  # how many tokens back window, recent and compressed memory reach, in the longest layer
    temporal_range: int
    passages: tuple[Passage, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the passages."""
        found = dataclasses.asdict(self)
        del found["passages"]
        return found

    def table(self) -> "RenderableType":
        """Return both results as terminal tables."""
        from rich.console import Group
        from rich.table import Table

        title = f"Loss by what is seen ({self.tokens:,} tokens in {self.streams} streams)"
        seen = Table("", "bits per token", title=title, title_justify="left", min_width=WIDTH)
        for name, bits in self.conditions.items():
            seen.add_row(name.replace("_", " "), str(bits))
        seen.add_section()
        for name, worth in (("compressed", self.compressed_worth), ("recent", self.recent_worth)):
            if worth is not None:
                seen.add_row(f"so {name} memory is worth", str(worth))
        title = f"Loss since an empty memory ({self._starts}; temporal range {self.temporal_range:,})"
        since = Table(
            "tokens read", "bits per token", "above full memory", title=title, title_justify="left", min_width=WIDTH
        )
        for row in self.since_empty:
            span = f"{row.first:,} to {row.last:,}" if row.last > row.first else f"{row.first}"
            since.add_row(span, f"{row.bits:.4f}", str(row.excess))
        return Group(seen, since)

    def panels(self) -> list[Panel]:
        """Return what each memory is worth, and the loss as memories fill from empty."""
        panels = []
        worths = {"compressed": self.compressed_worth, "recent": self.recent_worth}
        there = {place: worth for place, worth in worths.items() if worth is not None}
        if there:
            place, worth = next(iter(there.items()))
            caption = (
                f"Loss increase if a memory is hidden, on {self.tokens:,} tokens with full memories. "
                f"±: standard error over {self.streams} streams, paired."
            )
            panels.append(Panel(worth.verdict(f"{place} memory"), partial(_draw_worths, there), caption, height=1.9))
        panels.append(self._since_panel())
        return panels

    def plot(self, to: Path | BinaryIO) -> None:
        """Plot both results, side by side."""
        save(arrange(self.panels()), to)

    @property
    def _starts(self) -> str:
        return f"{self.starts} starts, {self.first_windows} for the first window"

    def _since_panel(self) -> Panel:
        shown = [row for row in self.since_empty if row.excess.mean > LEAST]
        far = [row.last for row in self.since_empty if row.excess.mean >= NEAR]
        claim = f"From empty, the loss stays {NEAR} bits or more above full memory"
        if not far or far[-1] < self.since_empty[-1].last:
            claim = f"From empty, the loss is within {NEAR} bits of full memory after {(far or [0])[-1]:,} tokens"
        caption = (
            f"Loss as memories fill, minus the loss of the same text with full memories; {self._starts}. "
            "Error bars, ±: standard error over starts; one that reaches 0 ends at the lowest value shown. Shaded: how "
            "far one layer reaches; older text arrives through the layers below. "
        )
        if hidden := [row for row in self.since_empty if row.excess.mean <= LEAST]:
            listed = ", ".join(f"{row.excess} at {row.first:,} to {row.last:,}" for row in hidden)
            caption += f"Too low for the logarithmic axis: {listed}."

        def draw(axes: Any) -> None:
            places = [math.sqrt(row.first * row.last) for row in self.since_empty]
            heights = [row.excess.mean if row in shown else math.nan for row in self.since_empty]  # gaps in the line
            # A bar that reaches 0 or below would have no lower end on a logarithmic axis.
            down = [min(row.excess.error, max(0.0, row.excess.mean - LEAST / 2)) for row in self.since_empty]
            up = [row.excess.error for row in self.since_empty]
            axes.errorbar(places, heights, yerr=[down, up], fmt="o-", markersize=4, capsize=2, color=INK)
            for x, row in zip(places, self.since_empty, strict=True):
                if row in shown:
                    text = f"tokens {row.first:,} to {row.last:,}: {row.excess} bits above full memory"
                    hover(axes, [(x, row.excess.mean)], [text])
            axes.set_xscale("log")
            axes.set_yscale("log" if shown else "linear")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xlim(0.8, 1.3 * max(self.reach[-1], self.since_empty[-1].last))
            edges = (0.8, *self.reach)
            for place, first, last in zip(("window", "recent", "compressed"), edges, edges[1:], strict=False):
                if last > first:
                    axes.axvspan(first, last, color=COLOURS[place], alpha=0.15, linewidth=0)
                    narrow = math.log(last / first) < 0.2 * math.log(1.6 * self.reach[-1])
                    axes.annotate(
                        place, (math.sqrt(first * last), 0.97), xycoords=("data", "axes fraction"), ha="center",
                        va="top", rotation=90 * narrow, fontsize=8, color=COLOURS[place], fontweight="bold",
                    )  # fmt: skip
            tidy(axes, "", "tokens read since empty", "bits above full memory")

        return Panel(claim, draw, caption.strip())


def _draw_worths(worths: dict[str, Estimate], axes: Any) -> None:
    for row, (place, worth) in enumerate(worths.items()):
        (bar,) = axes.barh(-row, worth.mean, 0.5, xerr=worth.error, color=COLOURS[place], ecolor=INK, capsize=3)
        tip(bar, f"{place} memory: {worth} bits per token")
        label = f"{place} memory: {worth}"
        axes.text(0, 0.31 - row, label, fontsize=8.5, color=COLOURS[place], fontweight="bold")
    axes.axvline(0, color=INK, linewidth=0.9)
    tidy(axes, "", "bits per token that it saves", grid="x")
    axes.set_yticks([])
    axes.margins(x=0.1, y=0.2)


def measure_memory(
    model: CompressiveLM,
    text: npt.NDArray[Any],
    *,
    tokens: int = 200_000,
    streams: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> MemoryUse:
    """Measure what each memory is worth on about `tokens` tokens of a text (n,), and the loss as memories fill."""
    config = model.config
    names = [EVERYTHING]
    if any(config.compressed_sizes):
        names.append(NO_COMPRESSED)
    if any(config.memory_sizes):
        names.append(NOTHING)
    cut = spread(model, text, tokens, streams)
    bits = _bits_by_condition(model, cut, names, part(progress, 0, 0.75))
    by_stream = {name: rows[:, cut.filling * cut.window :].mean(axis=1) for name, rows in bits.items()}
    seen_last = NO_COMPRESSED if NO_COMPRESSED in by_stream else EVERYTHING
    starts, firsts, since = _since_empty(
        model, cut, bits[EVERYTHING], tokens, len(names), seed, part(progress, 0.75, 1)
    )
    return MemoryUse(
        tokens=len(cut.tokens) * (cut.windows - cut.filling) * cut.window,
        streams=len(cut.tokens),
        conditions={name: Estimate.of(values) for name, values in by_stream.items()},
        compressed_worth=_difference(by_stream, NO_COMPRESSED, EVERYTHING),
        recent_worth=_difference(by_stream, NOTHING, seen_last),
        starts=starts,
        first_windows=firsts,
        since_empty=since,
        reach=_reach(config),
        temporal_range=config.temporal_range,
        passages=tuple(_passages(cut, bits)),
    )


def _passages(cut: Cut, bits: dict[str, Floats]) -> Iterator[Passage]:
    """Yield the passage where compressed memory helped most, if there is one, then some spread over the text."""
    T, seen = cut.window, bits[EVERYTHING]
    length = min(max(1, PASSAGE // T), cut.windows - cut.filling) * T
    begin, end = cut.filling * T, cut.windows * T
    gains = bits[NO_COMPRESSED] - seen if NO_COMPRESSED in bits else None

    def passage(stream: int, start: int, chosen: str) -> Passage:
        stop = start + length
        before, *tokens = cut.tokens[stream, start : stop + 1].tolist()
        saved = None if gains is None else gains[stream, start:stop].tolist()
        return Passage(before, tokens, seen[stream, start:stop].tolist(), saved, chosen)

    count = (end - begin) // length
    if gains is not None:
        parts = gains[:, begin : begin + count * length].reshape(len(gains), count, length).mean(axis=2)
        row, number = np.unravel_index(int(parts.argmax()), parts.shape)
        chosen = f"chosen: of {parts.size:,} passages the one where compressed memory helped most"
        yield passage(int(row), begin + int(number) * length, chosen)
    for i in range(min(PASSAGES - 1, len(seen))):
        stream = i * len(seen) // min(PASSAGES - 1, len(seen))
        yield passage(stream, begin, f"one of {min(PASSAGES - 1, len(seen))} spread evenly over the text")


def hide(memory: Memory, compressed: Tensor, recent: Tensor) -> Memory:
    """Mask compressed and recent memory in the batch rows marked by two (B,) bool masks."""
    layers = (
        dataclasses.replace(
            layer,
            compressed_valid=layer.compressed_valid & ~compressed[:, None],
            recent_valid=layer.recent_valid & ~recent[:, None],
        )
        for layer in memory.layers
    )
    return dataclasses.replace(memory, layers=tuple(layers))


def _bits_by_condition(
    model: CompressiveLM, cut: Cut, names: list[str], progress: Progress | None
) -> dict[str, Floats]:
    """Return the bits of every token, (B, n·T), in each condition; all conditions share one batch.

    Hidden memory is masked in every window, so no information passes through it into recent memory either.
    """
    count, device = len(cut.tokens), cut.tokens.device

    def flags(*hidden: str) -> Tensor:
        return torch.tensor([name in hidden for name in names], device=device).repeat_interleave(count)

    compressed, recent = flags(NO_COMPRESSED, NOTHING), flags(NOTHING)
    outs = read(
        model,
        cut.tokens.repeat(len(names), 1),
        model.initial_memory(len(names) * count),
        before=lambda memory: hide(memory, compressed, recent),
        progress=progress,
    )
    bits = _bits(outs)
    return dict(zip(names, np.split(bits, len(names)), strict=True))


def _since_empty(
    model: CompressiveLM, cut: Cut, full: Floats, tokens: int, share: int, seed: int, progress: Progress | None
) -> tuple[int, int, tuple[Since, ...]]:
    """Read from empty memory at random windows of the streams, up to the temporal range or the end of the text.

    Returns how many starts were read as far as that, of how many the first window was read, and what they cost.
    """
    T, measured = cut.window, cut.windows - cut.filling
    reach = min(measured, math.ceil(model.config.temporal_range / T) + 1)

    def sampled(length: int, count: int, progress: Progress | None) -> tuple[Floats, Floats]:
        """Bits of so many tokens from each start, (count, length), and how far they are above full memory."""
        places = [
            (stream, window * T)
            for stream in range(len(full))
            for window in range(cut.filling, cut.windows - length // T + 1)
        ]
        chosen = np.random.default_rng(seed).choice(len(places), min(len(places), count), replace=False)
        fresh, excess = [], []
        groups = np.array_split(chosen, math.ceil(len(chosen) / (share * len(full))))
        for index, group in enumerate(groups):
            origins = [places[i] for i in group]
            rows = torch.stack([cut.tokens[stream, start : start + length + 1] for stream, start in origins])
            memory = model.initial_memory(len(group))  # zeros or masked, as generation starts
            done = part(progress, index / len(groups), (index + 1) / len(groups))
            fresh.append(_bits(read(model, rows, memory, progress=done)))
            excess.append(fresh[-1] - np.stack([full[stream, start : start + length] for stream, start in origins]))
        return np.concatenate(fresh), np.concatenate(excess)

    whole = sampled(reach * T, max(2, tokens // (reach * T)), part(progress, 0, 0.7))
    first = sampled(T, min(FIRST_WINDOWS, max(2, tokens // T)), part(progress, 0.7, 1))
    if len(first[0]) < len(whole[0]):  # as many starts at least as are read to the end
        first = whole

    # Powers of two within the first window, then whole windows, as the loss depends on the position within a window.
    lasts = [2**i for i in range(64) if 2**i < T] + [T * 2**i for i in range(64) if 2**i < reach] + [reach * T]
    rows = []
    for begin, last in zip([0, *lasts], lasts, strict=False):
        bits, above = first if last <= T else whole
        rows.append(
            Since(begin + 1, last, float(bits[:, begin:last].mean()), Estimate.of(above[:, begin:last].mean(axis=1)))
        )
    return len(whole[0]), len(first[0]), tuple(rows)


def _reach(config: ModelConfig) -> tuple[int, int, int]:
    recent = config.window + max(config.memory_sizes)
    sizes = zip(config.memory_sizes, config.compression_rates, config.compressed_sizes, strict=True)
    return config.window, recent, config.window + max(memory + rate * compressed for memory, rate, compressed in sizes)


def _bits(outs: Any) -> Floats:
    """Concatenate the bits per token of all windows, (B, n·T)."""
    return to_numpy(torch.cat([out.nll for out in outs], dim=1)) / math.log(2)


def _difference(by_stream: dict[str, Floats], without: str, seen: str) -> Estimate | None:
    """Return the loss increase, paired by stream, which removes the variance between texts."""
    return Estimate.of(by_stream[without] - by_stream[seen]) if without in by_stream else None
