"""Text and audio coloured by surprise, the bits that a token cost, and by what compressed memory gained on it."""

import html
import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from compressive.analysis.memory import Passage
from compressive.data.tokenizer import Tokenizer
from compressive.inference.text import TextStream

SURPRISES = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Bits at which a level of surprise ends."""
GAINS = (-2.0, -0.7, -0.25, -0.08, 0.08, 0.25, 0.7, 2.0)
"""Bits at which a level of gain ends."""
BLANK = re.compile(r"\n(?=(</b><b[^>]*>)?↵)")
"""A line break before another one: blank lines are shown as signs only."""
COLUMNS = 240
"""Columns that a wave is drawn in."""


class Piece(NamedTuple):
    """Some characters that one or more tokens made together."""

    text: str
    bits: float
    gain: float | None


def pieces(passage: Passage, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield the characters of a passage; a character of several tokens has the sum of their bits."""
    stream, bits, gain = TextStream(tokenizer, passage.before), 0.0, 0.0
    gains: Sequence[float] = passage.gains or [0.0] * len(passage.tokens)
    for token, cost, saved in zip(passage.tokens, passage.bits, gains, strict=True):
        bits, gain = bits + cost, gain + saved
        if text := stream.push(token):
            yield Piece(text, bits, None if passage.gains is None else gain)
            bits = gain = 0.0


def coloured_text(passages: Iterable[Passage], tokenizer: Tokenizer) -> str:
    """Return passages of text, one span per piece, with its bits on hover."""
    body = "".join(
        f"<h3>{html.escape(_heading(passage))}</h3><pre>"
        f"{BLANK.sub('', ''.join(_span(piece) for piece in pieces(passage, tokenizer)))}</pre>"
        for passage in passages
    )
    return switchable(body, any(passage.gains is not None for passage in passages))


def _span(piece: Piece) -> str:
    gain, about = "", f"{piece.bits:.2f} bits"
    if piece.gain is not None:
        gain = f" g{bisect(GAINS, piece.gain)}"
        about += f"; compressed memory {'saved' if piece.gain >= 0 else 'cost'} {abs(piece.gain):.2f}"
    shown = html.escape(piece.text).replace("\n", "↵\n")
    return f'<b class="s{bisect(SURPRISES, piece.bits)}{gain}" title="{about}">{shown}</b>'


def wave(samples: npt.NDArray[np.int16], bits: Sequence[float], gains: Sequence[float] | None, rate: int) -> str:
    """Return a clip (n,) as a wave, an SVG element; each column has the mean bits of its samples as colour."""
    parts = [part for part in np.array_split(np.arange(len(samples)), COLUMNS) if len(part)]
    top = max(1, int(np.abs(samples.astype(np.int64)).max()))
    columns = []
    for i, part in enumerate(parts):
        low, high = int(samples[part].min()), int(samples[part].max())
        cost = float(np.mean(np.asarray(bits)[part]))
        classes, about = f"s{bisect(SURPRISES, cost)}", f"{part[0] / rate:.3f} s: {cost:.2f} bits per sample"
        if gains is not None:
            gain = float(np.mean(np.asarray(gains)[part]))
            classes += f" g{bisect(GAINS, gain)}"
            about += f"; compressed memory {'saved' if gain >= 0 else 'cost'} {abs(gain):.3f}"
        y, height = 40 - 38 * high / top, max(1.0, 38 * (high - low) / top)
        columns.append(
            f'<rect x="{2 * i}" y="{y:.1f}" width="1.7" height="{height:.1f}" class="{classes}">'
            f"<title>{about}</title></rect>"
        )
    return f'<svg role="img" aria-label="wave" viewBox="0 0 {2 * len(parts)} 80">{"".join(columns)}</svg>'


def switchable(body: str, gains: bool) -> str:
    """Return passages with the key of their colours and, if there are gains, a switch between both colourings."""
    edges = ["0", *(f"{edge:g}" for edge in SURPRISES)]
    key = "".join(f'<b class="s{i}">{edge}</b>' for i, edge in enumerate(edges))
    keys = f'<div class="key surprise"><b>bits, from</b>{key}</div>'
    switch = ""
    if gains:
        named = ["costs 2 or more", *(f"{edge:+g}" for edge in GAINS)]
        key = "".join(f'<b class="g{i}">{name}</b>' for i, name in enumerate(named))
        keys += f'<div class="key gain"><b>bits that compressed memory saves, from</b>{key}</div>'
        switch = (
            '<fieldset class="switch"><legend>Colour by</legend>'
            '<label><input type="radio" name="colour" checked> surprise</label>'
            '<label><input type="radio" name="colour" id="by-gain"> what compressed memory gained</label></fieldset>'
        )
    return f'{switch}<div class="passages">{keys}{body}</div>'


def _heading(passage: Passage) -> str:
    text = f"{np.mean(passage.bits):.2f} bits per token"
    if passage.gains is not None:
        gain = float(np.mean(passage.gains))
        text += f", {abs(gain):.3f} {'saved' if gain >= 0 else 'lost'} by compressed memory"
    return f"{text} ({passage.chosen})"
