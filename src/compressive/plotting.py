"""Matplotlib guard and one look for all figures; renders without a display.

A figure's title states what it shows, lines are labelled directly at their ends, and chance and bounds are drawn in.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

COLOURS = {"compressed": "#c8553d", "recent": "#2f6690", "window": "#8a9ba8"}
"""One colour per place that a token can attend to."""
PALETTE = ("#c8553d", "#2f6690", "#4c8c5c", "#8f5ea2", "#c08a1e", "#3d8d99", "#a3546f", "#5b6470")
"""Colours of lines, in order; told apart in print and by most colour-blind readers."""
WIDTH = 76
"""Minimum width of terminal tables, so that titles stay on one line."""
INK, FAINT = "#33393f", "#d9dee2"


class PlotError(RuntimeError):
    """A plot cannot be made."""


def require_matplotlib() -> Any:
    """Return matplotlib's Figure class, which needs no display; raise PlotError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"a plot needs matplotlib: pip install -e '.[plots]' ({error})") from None
    return Figure


def figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, size in inches; raise PlotError if matplotlib is missing."""
    return require_matplotlib()(figsize=(width, height), layout="constrained")


def headline(fig: Any, claim: str, detail: str = "") -> None:
    """Write what the figure shows above it, and below that, smaller, how it was measured."""
    fig.suptitle(claim, x=0.01, ha="left", fontsize=12, color=INK, fontweight="bold")
    if detail:
        fig.supxlabel(detail, x=0.01, ha="left", fontsize=8, color=INK)


def tidy(axes: Any, title: str = "", x: str = "", y: str = "", grid: str = "y") -> None:
    """Set title and labels of axes, and remove the frame."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=10)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(colors=INK, labelsize=8.5, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    if grid:
        axes.grid(axis=grid, color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)


def bound(axes: Any, value: float, text: str) -> None:
    """Draw a horizontal line that results are measured by, such as chance, with its name; the axis will include it."""
    low, high = axes.get_ylim()
    margin = 0.06 * (max(high, value) - min(low, value))
    axes.set_ylim(min(low, value - margin), max(high, value + margin))
    axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.6)
    axes.annotate(
        text, (0, value), (3, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
        fontsize=8, color=INK, alpha=0.8,
    )  # fmt: skip


def label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name lines at the right edge of axes: (y, text, colour) each, moved apart where they would overlap.

    Call it when the limits of the y axis are final.
    """
    height = 11.0  # points, of one line of text
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    transform = axes.transData + axes.transAxes.inverted()
    placed: list[float] = []
    wanted = []
    ends = sorted(ends)
    for y, _, _ in ends:
        wanted.append(float(transform.transform((axes.get_xlim()[0], y))[1]) * points)
        placed.append(max(wanted[-1], placed[-1] + height) if placed else wanted[-1])
    excess = max(0.0, placed[-1] - points) if placed else 0.0
    for (y, text, colour), at, base in zip(ends, placed, wanted, strict=True):
        axes.annotate(
            text, (1, y), (5, at - excess - base), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", fontsize=8.5, color=colour, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Return ticks at 1 and 3 times powers of ten between two values, with labels, for a log axis."""
    ticks = [tick for power in range(-9, 10) for tick in (10.0**power, 3 * 10.0**power) if low <= tick <= high]
    return {"ticks": ticks, "labels": [f"{tick:g}" for tick in ticks]}


def check_format(path: Path) -> None:
    """Raise ValueError, before anything is computed, if figures cannot be written in the format of this ending."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: expected a figure as .png or .svg")


def save(fig: Any, to: Path | BinaryIO) -> None:
    """Write a figure as PNG, or as SVG if the path ends so."""
    kind = "png"
    if isinstance(to, Path):
        to.parent.mkdir(parents=True, exist_ok=True)
        kind = "svg" if to.suffix == ".svg" else "png"
    metadata = {"Date": None} if kind == "svg" else None  # the same figure gives the same file
    fig.savefig(to, dpi=160, format=kind, facecolor="white", metadata=metadata)
