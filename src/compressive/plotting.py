"""Matplotlib guard and one look for all figures; renders without a display.

A figure's title states what it shows, lines are labelled directly at their ends, and chance and bounds are drawn in.
SVG figures show values on hover: artists that `tip` gave a text have it as their title.
"""

import html
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

COLOURS = {"compressed": "#c8553d", "recent": "#2f6690", "window": "#8a9ba8"}
"""One colour per place that a token can attend to."""
PALETTE = ("#c8553d", "#2f6690", "#4c8c5c", "#8f5ea2", "#c08a1e", "#3d8d99", "#a3546f", "#5b6470")
"""Colours of lines, in order; told apart in print and by most colour-blind readers."""
WIDTH = 76
"""Minimum width of terminal tables, so that titles stay on one line."""
INK, FAINT = "#33393f", "#d9dee2"


TIPS = 60
"""Points of a line that show their value on hover, at most; evenly spaced."""


class PlotError(RuntimeError):
    """A plot cannot be made."""


@dataclass(frozen=True)
class Panel:
    """One set of axes, to be drawn alone or beside others."""

    claim: str
    """What it shows, as a title."""
    draw: Callable[[Any], None]
    """Draws on matplotlib axes."""
    caption: str = ""
    """How it was measured, what ± means, and what the axes cannot show."""
    height: float = 2.7
    """In inches; the width is 4.6."""


def require_matplotlib() -> Any:
    """Return matplotlib's Figure class, which needs no display; raise PlotError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"a plot needs matplotlib: pip install 'compressive[plots]' ({error})") from None
    return Figure


def figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, size in inches; raise PlotError if matplotlib is missing."""
    return require_matplotlib()(figsize=(width, height), layout="constrained")


def headline(fig: Any, claim: str, detail: str = "") -> None:
    """Write what the figure shows above it, and below that, smaller, how it was measured."""
    width = fig.get_figwidth()  # in inches; about 10 letters of a claim fit into one, 15 of a detail
    look: dict[str, Any] = {"x": 0.01, "ha": "left", "color": INK, "parse_math": False}  # names may have a $
    fig.suptitle(_wrapped(claim, 10 * width), fontsize=12, fontweight="bold", **look)
    if detail:
        fig.supxlabel(_wrapped(detail, 15 * width), fontsize=8, **look)


def _wrapped(text: str, letters: float) -> str:
    return "\n".join(textwrap.fill(line, int(letters)) for line in text.splitlines())


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
            va="center", fontsize=8.5, color=colour, fontweight="bold", annotation_clip=False, parse_math=False,
        )  # fmt: skip


def tip(artist: Any, text: str) -> None:
    """Give an artist a text that SVG figures show on hover."""
    artist.set_gid(f"tip:{text}")


def hover(axes: Any, points: Sequence[tuple[float, float]], texts: Sequence[str]) -> None:
    """Make points of a line show texts on hover: some of them, if there are many."""
    every = max(1, -(-len(points) // TIPS))
    for (x, y), text in list(zip(points, texts, strict=True))[::-1][::every]:  # the last one always
        (dot,) = axes.plot([x], [y], marker="o", markersize=9, alpha=0, linestyle="none")
        tip(dot, text)


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Return ticks at 1 and 3 times powers of ten between two values, with labels, for a log axis."""
    ticks = [tick for power in range(-9, 10) for tick in (10.0**power, 3 * 10.0**power) if low <= tick <= high]
    return {"ticks": ticks, "labels": [f"{tick:g}" for tick in ticks]}


def check_format(path: Path) -> None:
    """Raise ValueError, before anything is computed, if figures cannot be written in the format of this ending."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: expected a figure as .png or .svg")


def arrange(panels: Sequence[Panel], columns: int = 2) -> Any:
    """Return a figure of panels in rows, each with its claim as title; their captions are below."""
    rows, width = -(-len(panels) // columns), 4.6 * min(columns, len(panels))
    tallest = [max(panel.height for panel in panels[row * columns : (row + 1) * columns]) for row in range(rows)]
    below = _wrapped("\n".join(panel.caption for panel in panels if panel.caption), 15 * width)
    fig = figure(width, sum(tallest) + 0.4 * rows + 0.15 * (below.count("\n") + 1))
    fig.supxlabel(below, x=0.01, ha="left", fontsize=8, color=INK)
    grid = fig.subplots(rows, min(columns, len(panels)), squeeze=False, height_ratios=tallest)
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel.draw(axes)
        axes.set_title(textwrap.fill(panel.claim, 52), loc="left", fontsize=10, color=INK, fontweight="bold", pad=8)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    return fig


def inline_svg(panel: Panel) -> str:
    """Return a panel, without its claim, as an SVG element to be put into a page.

    Values appear on hover. Colours are CSS variables with the printed colours as fallback, so that a page can set them
    for a dark background: `--ink`, `--faint`, and `--c33ff00` for a colour #33ff00.
    """
    fig = figure(4.6, panel.height)
    panel.draw(fig.subplots())
    svg = _svg(fig)
    for name, colour in {"ink": INK, "faint": FAINT, **{f"c{c[1:]}": c for c in (*PALETTE, *COLOURS.values())}}.items():
        svg = svg.replace(f": {colour}", f": var(--{name}, {colour})")
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)  # HTML needs none
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(panel.claim)}" ', 1)


def _svg(fig: Any) -> str:
    """Return the figure as an SVG element with texts as text, values on hover and a transparent background."""
    import matplotlib

    buffer = BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "compressive"}):
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue().decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="tip:([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r' id="[a-zA-Z0-9]+_\d+"', "", svg)  # names of artists, which nothing refers to
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)  # the view box is enough
    svg = re.sub(r'font-family: [^;"]*; ', "", svg)  # that of the page
    return re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would apply to the whole page


def save(fig: Any, to: Path | BinaryIO) -> None:
    """Write a figure as PNG, or as SVG with values on hover if the path ends so."""
    if isinstance(to, Path):
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.suffix == ".svg":
            head = '<svg style="background: white; font-family: sans-serif" '
            to.write_text(_svg(fig).replace("<svg ", head, 1), "utf-8")
            return
    fig.savefig(to, dpi=160, format="png", facecolor="white")
