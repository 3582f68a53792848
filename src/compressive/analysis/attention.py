"""Attention over compressed memory, recent memory and the window, as in the paper's figure 2."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.analysis.reading import Estimate, read, spread, to_numpy
from compressive.evaluation.score import Progress
from compressive.model.language_model import CompressiveLM
from compressive.plotting import COLOURS, INK, WIDTH, figure, log_ticks, save, tidy

if TYPE_CHECKING:
    from rich.console import RenderableType

BUCKETS = 6
"""Buckets per place (compressed memory, recent memory, window), oldest first."""
PLACES = ("compressed", "recent", "window")


class Bucket(NamedTuple):
    """One of the 18 buckets: a sixth of one place."""

    place: str
    number: int  # from 1, the oldest
    slots: float  # a sixth of the place's slots, may be fractional; mean over layers


@dataclass(frozen=True)
class AttentionUse:
    """Share of attention per bucket, averaged over heads and queries; the shares sum to 1.

    Standard errors are over sequences, as in the paper: a sequence is one window of one stream.
    """

    sequences: int
    buckets: tuple[Bucket, ...]
    shares: tuple[Estimate, ...]  # averaged over layers
    by_layer: tuple[tuple[Estimate, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)

    def share(self, place: str) -> float:
        """Return the share of attention on one place: compressed, recent or window."""
        found = zip(self.buckets, self.shares, strict=True)
        return sum(share.mean for bucket, share in found if bucket.place == place)

    def table(self) -> "RenderableType":
        """Return a terminal table of the buckets, with the attention per slot."""
        from rich.table import Table

        title = f"Attention by bucket, oldest first ({self.sequences:,} sequences)"
        table = Table("bucket", "share of attention", "per slot", title=title, title_justify="left", min_width=WIDTH)
        for previous, bucket, share in zip((None, *self.buckets), self.buckets, self.shares, strict=False):
            if previous is not None and previous.place != bucket.place:
                table.add_section()
            table.add_row(f"{bucket.place} {bucket.number}", str(share), f"{share.mean / bucket.slots:.2e}")
        return table

    def plot(self, to: Path | BinaryIO) -> None:
        """Plot figure 2 as bars, and below it a heat map by layer."""
        layers, count = len(self.by_layer), len(self.buckets)
        fig = figure(9, 3.6 + 0.22 * layers)
        bars, grid = fig.subplots(2, 1, height_ratios=(3, 0.5 + 0.22 * layers))
        colours = [COLOURS[bucket.place] for bucket in self.buckets]
        bars.bar(
            range(count),
            [share.mean for share in self.shares],
            yerr=[share.error for share in self.shares],
            color=colours,
            width=0.85,
            ecolor=INK,
            capsize=2,
        )
        tidy(bars, "Attention by bucket, oldest to newest", y="share of attention")
        bars.set_xlim(-0.6, count - 0.4)
        bars.set_xticks([])
        for place in PLACES:
            found = [i for i, bucket in enumerate(self.buckets) if bucket.place == place]
            if found:
                name = f"{place}{'' if place == 'window' else ' memory'}: {self.share(place):.1%}"
                x = (found[0] + found[-1]) / 2
                bars.annotate(
                    name, (x, 0), (0, -14), xycoords=("data", "axes fraction"), textcoords="offset points",
                    ha="center", fontsize=9, color=COLOURS[place], fontweight="bold",
                )  # fmt: skip
        means = np.array([[share.mean for share in row] for row in self.by_layer])
        lowest = means[means > 0].min()  # a layer without memory has zeros, which a log scale cannot show
        image = grid.imshow(means.clip(lowest), aspect="auto", cmap="cividis", norm="log", interpolation="nearest")
        tidy(grid, "The same by layer", y="layer", grid="")
        grid.set_xlim(-0.6, count - 0.4)
        grid.set_xticks([])
        step = max(1, layers // 8)
        grid.set_yticks(range(0, layers, step), [str(i + 1) for i in range(0, layers, step)])
        scale = fig.colorbar(image, ax=grid, pad=0.01, fraction=0.03)
        scale.set_ticks(**log_ticks(lowest, means.max()))
        scale.minorticks_off()
        scale.outline.set_visible(False)
        scale.ax.tick_params(labelsize=8, colors=INK, length=2)
        save(fig, to)


def measure_attention(
    model: CompressiveLM,
    text: npt.NDArray[Any],
    *,
    tokens: int = 200_000,
    streams: int = 16,
    progress: Progress | None = None,
) -> AttentionUse:
    """Average attention over about `tokens` tokens of a text (n,), once memories are full."""
    cut = spread(model, text, tokens, streams)
    edges = [_edges(layer.n_compressed, layer.n_recent, cut.window) for layer in model.trunk.layers]
    found = []
    with watch_attention(model) as usages:
        for index, _ in enumerate(read(model, cut.tokens, model.initial_memory(len(cut.tokens)), progress=progress)):
            if index >= cut.filling:
                found.append(torch.stack([_sums(usage, e) for usage, e in zip(usages, edges, strict=True)]))
            usages.clear()
    shares = to_numpy(torch.cat(found, dim=1))  # (layers, sequences, 18)
    slots = np.mean([e.diff().tolist() for e in edges], axis=0)
    used = slots > 0
    return AttentionUse(
        sequences=shares.shape[1],
        buckets=tuple(
            Bucket(PLACES[i // BUCKETS], i % BUCKETS + 1, float(slots[i])) for i in used.nonzero()[0].tolist()
        ),
        shares=tuple(Estimate.of(values) for values in shares.mean(axis=0).T[used]),
        by_layer=tuple(tuple(Estimate.of(values) for values in layer.T[used]) for layer in shares),
    )


@contextmanager
def watch_attention(model: CompressiveLM) -> Iterator[list[Tensor]]:
    """Yield a list to which each layer of a forward pass appends its mean attention per slot, (B, N).

    Hooks pass `with_usage=True` to each attention module, and drop the returned usage again unless the layer itself
    had asked for it. The forward pass is otherwise unchanged.
    """
    usages: list[Tensor] = []
    requested: list[bool] = []

    def request(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        requested.append(kwargs.get("with_usage", False))
        return args, kwargs | {"with_usage": True}

    def collect(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        attended, usage = output
        usages.append(usage)
        return attended, usage if requested.pop() else None

    hooks = []
    for layer in model.trunk.layers:
        hooks.append(layer.attention.register_forward_pre_hook(request, with_kwargs=True))
        hooks.append(layer.attention.register_forward_hook(collect))
    try:
        yield usages
    finally:
        for hook in hooks:
            hook.remove()


def _edges(compressed: int, recent: int, window: int) -> Tensor:
    """Return the bucket edges over the slots [compressed, recent, window], (19,); evenly spaced within a place."""
    starts, sizes = (0, compressed, compressed + recent), (compressed, recent, window)
    cuts = [start + size * i / BUCKETS for start, size in zip(starts, sizes, strict=True) for i in range(BUCKETS)]
    return torch.tensor([*cuts, compressed + recent + window], dtype=torch.double)


def _sums(usage: Tensor, edges: Tensor) -> Tensor:
    """Sum attention (B, N) into buckets (B, 18); an edge inside a slot splits its attention in proportion."""
    reached = F.pad(usage.cpu().double().cumsum(dim=1), (1, 1))  # the last column only pads the index
    whole = edges.long()
    return torch.lerp(reached[:, whole], reached[:, whole + 1], edges - whole).diff(dim=1)
