"""One look for all figures: few colours, no frame, rendered without a display."""

from pathlib import Path
from typing import Any, BinaryIO

COLOURS = {"compressed": "#c8553d", "recent": "#2f6690", "window": "#8a9ba8"}
"""One colour for each place a token can attend to."""
WIDTH = 76
"""Least width of a table, so that its title stays on one line."""
INK, FAINT = "#33393f", "#d9dee2"


class PlotError(RuntimeError):
    """No plot can be made."""


def require_matplotlib() -> Any:
    """Return matplotlib's Figure, which renders without a display, or say how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"a plot needs matplotlib: pip install 'compressive[plots]' ({error})") from None
    return Figure


def figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, of a size in inches, or say how to get matplotlib."""
    return require_matplotlib()(figsize=(width, height), layout="constrained")


def tidy(axes: Any, title: str = "", x: str = "", y: str = "", grid: str = "y") -> None:
    """Give axes their titles and take away what does not inform."""
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
    """Return few round ticks between two values, with their labels, for a logarithmic axis."""
    ticks = [tick for power in range(-9, 10) for tick in (10.0**power, 3 * 10.0**power) if low <= tick <= high]
    return {"ticks": ticks, "labels": [f"{tick:g}" for tick in ticks]}


def save(drawn: Any, to: Path | BinaryIO) -> None:
    """Write a figure as PNG."""
    if isinstance(to, Path):
        to.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(to, dpi=160, format="png", facecolor="white")
