"""The page that reports are written on: a table of contents, figures with values on hover, light and dark.

Nothing is loaded from elsewhere. Without the few lines of script at its end, values still appear on hover, later.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

from compressive.plotting import COLOURS, FAINT, INK, PALETTE, Panel, inline_svg


class Tile(NamedTuple):
    """A main number, and what it is to be compared with."""

    figure: str
    unit: str
    note: str


class Section(NamedTuple):
    """A part of the page, listed in the table of contents."""

    title: str
    body: str  # HTML

    @property
    def anchor(self) -> str:
        """Its place on the page."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@dataclass(frozen=True)
class Page:
    """A report, verdict first."""

    name: str
    verdict: str
    about: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    status: str = ""
    """A line about a run that still trains."""
    refresh: int | None = None
    """Seconds after which a browser loads the page again; None for a page that is final."""

    def html(self) -> str:
        """Return the page."""
        again = "" if self.refresh is None else f'\n<meta http-equiv="refresh" content="{self.refresh}">'
        status = f'<p class="status">{html.escape(self.status)}</p>' if self.status else ""
        contents = "".join(f'<li><a href="#{s.anchor}">{html.escape(s.title)}</a></li>' for s in self.sections)
        tiles = "".join(
            f"<div><b>{html.escape(tile.figure)}</b><span>{html.escape(tile.unit)}</span>"
            f"<small>{html.escape(tile.note)}</small></div>"
            for tile in self.tiles
        )
        sections = "".join(
            f'<section id="{s.anchor}"><h2>{html.escape(s.title)}</h2>{s.body}</section>\n' for s in self.sections
        )
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">{again}
<title>{html.escape(self.name)}: {html.escape(self.verdict)}</title>
<style>
{_style()}</style>
</head>
<body>
<header>
<p class="name">{html.escape(self.name)}</p>
<h1>{html.escape(self.verdict)}</h1>
<p class="about">{html.escape(self.about)}</p>
{status}
</header>
<div class="tiles">{tiles}</div>
<nav aria-label="contents"><ol>{contents}</ol></nav>
<main>
{sections}</main>
<script>
{_resource("page.js")}</script>
</body>
</html>
"""


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


def figures(panels: Iterable[Panel]) -> str:
    """Return panels as figures side by side, or below each other where there is no room."""
    drawn = "".join(
        f"<figure><h3>{html.escape(panel.claim)}</h3>{inline_svg(panel)}"
        f"<figcaption>{html.escape(panel.caption)}</figcaption></figure>"
        for panel in panels
    )
    return f'<div class="figures">{drawn}</div>' if drawn else ""


def table(rows: Mapping[str, str]) -> str:
    """Return a table of names and values; empty values are left out."""
    lines = (f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items() if v)
    return f"<table>{''.join(lines)}</table>"


def details(title: str, body: str, is_open: bool = False) -> str:
    """Return a part that can be opened and closed; `body` is HTML."""
    return f"<details{' open' if is_open else ''}><summary>{html.escape(title)}</summary>{body}</details>"


def preformatted(text: str) -> str:
    """Return text as it is, in one width."""
    return f"<pre>{html.escape(text)}</pre>"


def commands(lines: Mapping[str, str]) -> str:
    """Return commands, each with what it does."""
    rows = (f"<dt>{html.escape(what)}</dt><dd><code>{html.escape(line)}</code></dd>" for line, what in lines.items())
    return f"<dl>{''.join(rows)}</dl>"


DARK = {
    INK: "#d7dce0", FAINT: "#3a424a", "#c8553d": "#e2775f", "#2f6690": "#6ba6d3", "#8a9ba8": "#93a4b1",
    "#4c8c5c": "#71b483", "#8f5ea2": "#b78acb", "#c08a1e": "#d9a945", "#3d8d99": "#5fb4c1", "#a3546f": "#cb7c97",
    "#5b6470": "#9aa3ad",
}  # fmt: skip
"""Colours of figures on a dark background."""
_NAMES = {INK: "ink", FAINT: "faint"} | {colour: f"c{colour[1:]}" for colour in (*PALETTE, *COLOURS.values())}


def _variables(dark: bool) -> str:
    return " ".join(f"--{name}: {DARK[colour] if dark else colour};" for colour, name in _NAMES.items())


SURPRISE = (0.0, 0.08, 0.16, 0.26, 0.38, 0.5, 0.64, 0.8)
"""Opacity of the colour of each level of surprise, see `passages.py`."""
GAIN = (0.75, 0.5, 0.3, 0.15, 0.0, 0.15, 0.3, 0.5, 0.75)
"""The same for what compressed memory gained: four levels of loss, none, four of gain."""


CHOSEN = {"surprise": ":root:not(:has(#by-gain:checked)) .passages", "gain": ":root:has(#by-gain:checked) .passages"}
"""The passages, while the switch stands on one of its two colourings."""


def _levels() -> str:
    """Return the rules that colour characters (background) and parts of waves (fill) by level."""
    rules = []
    for way, letter, shades in (("surprise", "s", SURPRISE), ("gain", "g", GAIN)):
        for level, shade in enumerate(shades):
            name = _NAMES["#c8553d" if way == "surprise" else "#c08a1e" if level < len(GAIN) // 2 else "#2f6690"]
            colour = f"var(--{name})"
            mixed = f"color-mix(in srgb, {colour} {shade:.0%}, transparent)"
            solid = f"color-mix(in srgb, {colour} {0.15 + 0.85 * shade / 0.8:.0%}, var(--faint))"
            rules.append(f"{CHOSEN[way]} .{letter}{level} {{ background: {mixed}; fill: {solid}; }}")
    return "\n".join(rules)


def _style() -> str:
    colours = f":root {{ {_variables(dark=False)} }}"
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(dark=True)} }} }}"
    return f"{_resource('page.css')}\n{colours}\n{dark}\n{_levels()}\n"


def _resource(name: str) -> str:
    return (resources.files("compressive.analysis.report") / name).read_text("utf-8")
