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
from compressive.plotting import COLOURS, INK, WIDTH, Panel, arrange, save, tidy, tip

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

    def panels(self) -> list[Panel]:
        """Return figure 2 as bars, and the same by layer as a heat map."""
        held = {place: self.share(place) for place in PLACES if any(b.place == place for b in self.buckets)}
        names = {"compressed": "compressed memory", "recent": "recent memory", "window": "the window"}
        first = next(iter(held))
        claim = f"{held[first]:.1%} of attention goes to {names[first]}"
        caption = (
            f"Share of attention by bucket, six per place, oldest first; mean over layers, heads, queries and "
            f"{self.sequences:,} sequences. Error bars, ±: standard error over sequences. Fewer queries see the later "
            "buckets of the window, as attention is causal."
        )
        bars = Panel(claim, self._draw_bars, caption)
        by_layer = [sum(share.mean for b, share in self._of(layer) if b.place == first) for layer in self.by_layer]
        top = int(np.argmax(by_layer))
        claim = f"Layer {top + 1} looks at {names[first]} most: {by_layer[top]:.1%}"
        caption = "The same by layer; 1 is the lowest. The colour scale is logarithmic. "
        if zeros := sum(share.mean <= 0 for layer in self.by_layer for share in layer):
            caption += f"{zeros} cells are 0, which it cannot show; they have the colour of the lowest value."
        heat = Panel(claim, self._draw_heat, caption.strip(), height=max(1.6, 0.9 + 0.2 * len(self.by_layer)))
        return [bars, heat]

    def plot(self, to: Path | BinaryIO) -> None:
        """Plot figure 2, and beside it the same by layer."""
        save(arrange(self.panels()), to)

    def _of(self, layer: tuple[Estimate, ...]) -> Iterator[tuple[Bucket, Estimate]]:
        return zip(self.buckets, layer, strict=True)

    def _draw_bars(self, axes: Any) -> None:
        for i, (bucket, share) in enumerate(self._of(self.shares)):
            (bar,) = axes.bar(i, share.mean, yerr=share.error, color=COLOURS[bucket.place], width=0.85, ecolor=INK)
            tip(bar, f"{bucket.place} {bucket.number} of {BUCKETS}: {share.mean:.2%} ± {share.error:.2%}")
        tidy(axes, y="share of attention")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        self._name_places(axes, shares=True)

    def _draw_heat(self, axes: Any) -> None:
        import matplotlib
        from matplotlib.colors import LogNorm, to_hex

        values = [share.mean for layer in self.by_layer for share in layer if share.mean > 0]
        norm, colours = LogNorm(min(values), max(values)), matplotlib.colormaps["cividis"]
        for row, layer in enumerate(self.by_layer):
            for column, (bucket, share) in enumerate(self._of(layer)):
                colour = to_hex(colours(norm(max(share.mean, min(values)))))
                (cell,) = axes.bar(column, 1, bottom=row - 0.5, width=1, color=colour)
                tip(cell, f"layer {row + 1}, {bucket.place} {bucket.number}: {share.mean:.2%} ± {share.error:.2%}")
        tidy(axes, y="layer", grid="")
        layers = len(self.by_layer)
        axes.set_ylim(layers - 0.5, -0.5)
        shown = range(0, layers, max(1, layers // 8))
        axes.set_yticks(list(shown), [str(i + 1) for i in shown])
        axes.set_xlim(-0.5, len(self.buckets) - 0.5)
        self._name_places(axes, shares=False)

    def _name_places(self, axes: Any, shares: bool) -> None:
        """Write the places below their buckets."""
        axes.set_xticks([])
        for place in PLACES:
            found = [i for i, bucket in enumerate(self.buckets) if bucket.place == place]
            if found:
                axes.annotate(
                    f"{place} {self.share(place):.1%}" if shares else place,
                    ((found[0] + found[-1]) / 2, 0), (0, -12), xycoords=("data", "axes fraction"),
                    textcoords="offset points", ha="center", fontsize=8.5, color=COLOURS[place], fontweight="bold",
                )  # fmt: skip


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
