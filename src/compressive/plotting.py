"""Matplotlib guard and common style of all figures; renders without a display."""

from pathlib import Path
from typing import Any, BinaryIO

COLOURS = {"compressed": "#c8553d", "recent": "#2f6690", "window": "#8a9ba8"}
"""One colour per place that a token can attend to."""
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


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Return ticks at 1 and 3 times powers of ten between two values, with labels, for a log axis."""
    ticks = [tick for power in range(-9, 10) for tick in (10.0**power, 3 * 10.0**power) if low <= tick <= high]
    return {"ticks": ticks, "labels": [f"{tick:g}" for tick in ticks]}


def save(fig: Any, to: Path | BinaryIO) -> None:
    """Write a figure as PNG."""
    if isinstance(to, Path):
        to.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(to, dpi=160, format="png", facecolor="white")
