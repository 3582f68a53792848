"""One text that a model reads and continues, and that can be rewound, forked, edited and looked into at any token.

What the model knows after n tokens is a pure function of these tokens and of the memory sizes of each window, however
the text came about: memory at a window's start comes from reading whole windows, what follows in the window from
stepping. So going back is exact: the text after it goes on as if it had never gone further. Points at window starts
are kept to make it fast; where some were dropped to save space, windows are read again.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressive.inference.sampling import sample
from compressive.inference.text import TextStream, encode_prompt
from compressive.model.decoding import DecodingState
from compressive.web.engine import Engine, Engines, Point, Sizes
from compressive.web.places import EMPTY, Places

KEPT = 128 << 20
"""Bytes of points that one text keeps."""
LIKELY = 8
"""Most likely tokens that `Text.look` returns."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose the next token."""

    temperature: float = 1.0
    top_p: float = 0.98
    top_k: int = 0
    seed: int = 0


class Text:
    """Tokens, the surprise of each, and what going on from any of them takes. Not for use by several threads at once.

    Attributes:
        tokens: numbers of the tokens.
        pieces: what each token adds to the text; empty for a part of a character, whose last part has it whole.
        bits: the surprise of each token, -log2 p; None for the first, which nothing precedes.
        given: tokens up to here were read, the others sampled.

    """

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.bits: list[float | None] = []
        self.given = 0
        self._sizes: dict[int, Sizes] = {0: engines.default.sizes}  # by the first window in which they hold
        self._points: dict[int, Point] = {}  # by window, as the window before left them
        self._state: DecodingState | None = None  # within a window
        self._logits: Tensor | None = None  # (1, V)
        self._stream = TextStream(engines.text_model.tokenizer, None)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def window(self) -> int:
        """Tokens per window."""
        return self.engines.default.config.window

    @property
    def sizes(self) -> Sizes:
        """The memory sizes of the current window."""
        return self._sizes_in(len(self) // self.window)

    # Reading and writing. Generators yield after every token or window that they read, and may be left there.

    def read(self, tokens: list[int]) -> Iterator[int]:
        """Append tokens and read them, whole windows at once; yields how many are read."""
        done = 0
        while done < len(tokens):
            whole = tokens[done : done + self.window]
            if len(self) % self.window == 0 and len(whole) == self.window:
                self._append_window(whole)
                done += self.window
            else:
                self._append(whole[0])
                done += 1
            self.given = len(self)
            yield done

    def write(self, count: int, options: SamplingOptions) -> Iterator[int]:
        """Sample `count` tokens; yields how many are there. The same options give the same text after the same text."""
        for done in range(count):
            assert self._logits is not None  # a text begins with a prompt
            generator = torch.Generator(self._logits.device).manual_seed(_seed(options.seed, len(self)))
            token = sample(
                self._logits,
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                generator=generator,
            )
            self._append(int(token))
            yield done + 1

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is to go on; of a newline if it is empty."""
        tokens: list[int] = encode_prompt(self.engines.text_model.tokenizer, text.encode()).tolist()
        return tokens

    def whole(self, at: int) -> tuple[int, str]:
        """Return where to go back to so that text can follow token `at` - 1, and the text up to `at` that this drops.

        Within a character that is before its first byte, which may be in a token with other characters.
        """
        begin = at
        while self._stream_at(begin).finish():
            begin -= 1
        return begin, "".join(self.pieces[begin:at])

    # Changes.

    def rewind(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        window = length // self.window
        state = self._state if window == len(self) // self.window else None
        del self.tokens[length:], self.pieces[length:], self.bits[length:]
        self.given = min(self.given, length)
        self._sizes = {at: sizes for at, sizes in self._sizes.items() if at <= window}
        self._points = {at: point for at, point in self._points.items() if at <= window}
        self._restore(state)
        self._stream = self._stream_at(length)

    def fork(self, length: int) -> "Text":
        """Return a text of the first `length` tokens, which goes on by itself."""
        other = Text(self.engines)
        other.tokens, other.pieces, other.bits, other.given = self.tokens[:], self.pieces[:], self.bits[:], self.given
        other._sizes, other._points, other._state = dict(self._sizes), dict(self._points), self._state
        other.rewind(length)
        return other

    def resize(self, sizes: Sizes) -> None:
        """Change memory sizes from the beginning of the current window on, whose tokens are read again.

        Memories grow by empty slots and shrink by forgetting their oldest. Raises ValueError for sizes that the
        weights do not allow.
        """
        self.engines.of(sizes)
        self._sizes[len(self) // self.window] = sizes
        self._restore()

    def read_again(self, sizes: Sizes) -> Iterator[int]:
        """Read the whole text with other memory sizes; yields how many tokens are read. Raises as `resize` does.

        Nothing changes before all is read.
        """
        self.engines.of(sizes)
        again = Text(self.engines)
        again._sizes = {0: sizes}
        yield from again.read(self.tokens)
        again.given = self.given
        vars(self).update(vars(again))

    # Views.

    def memory(self) -> dict[str, Any]:
        """Return where the current window stands and what every memory slot was made of, for JSON."""
        start = len(self) // self.window * self.window
        point = self._engine(start // self.window).fit(self._point(start // self.window))
        return {"window": {"size": self.window, "start": start, "filled": len(self) - start}} | _drawn(point)

    def look(self, token: int) -> dict[str, Any]:
        """Return where each head looked when the model predicted a token, number 1 or later, for JSON.

        `layers` has one weight per head and slot, in the order compressed, recent, window; `memory` has the memories
        as they were; `likely` the tokens that the model found most likely.
        """
        at = token - 1  # the token that was read when this one was predicted
        start = at // self.window * self.window
        engine = self._engine(start // self.window)
        point = engine.fit(self._point(start // self.window))
        logits, weights = engine.look(self.tokens[start : start + self.window], at - start, point)
        drawn = {"window": {"size": self.window, "start": start, "filled": token - start}} | _drawn(point)
        filled = [layer[:, : layer.shape[1] - self.window + token - start] for layer in weights]
        places = (first for place in drawn["places"] for first in place["firsts"] + place["recent"])
        oldest = min([start, *(first for first in places if first != EMPTY)])
        return {
            "token": token,
            "piece": self.pieces[token],
            "bits": self.bits[token],
            "memory": drawn,
            "layers": [[[round(weight, 5) for weight in head] for head in layer.tolist()] for layer in filled],
            "likely": self._likely(logits, at),
            "context": {"start": oldest, "pieces": self.pieces[oldest:token]},
        }

    # How it works.

    def _sizes_in(self, window: int) -> Sizes:
        return self._sizes[max(at for at in self._sizes if at <= window)]

    def _engine(self, window: int) -> Engine:
        return self.engines.of(self._sizes_in(window))

    def _point(self, window: int) -> Point:
        """The point where a window begins, as the window before left it; read again if it was not kept."""
        if window == 0:
            return self._engine(0).beginning()
        if window in self._points:
            return self._points[window]
        at = max((known for known in self._points if known < window), default=0)
        point = self._points[at] if at else self._engine(0).beginning()
        for number in range(at, window):
            tokens = self.tokens[number * self.window : (number + 1) * self.window]
            engine = self._engine(number)
            point, _ = engine.read_window(tokens, number * self.window, engine.fit(point))
        self._keep(window, point)
        return point

    def _keep(self, window: int, point: Point) -> None:
        """Keep a point; above the space allowed every second one goes, so that no gap is much longer than another."""
        self._points[window] = point
        size = sum(tensor.nbytes for tensor in point.memory.state_dict().values())
        if len(self._points) > max(8, KEPT // max(1, size)):
            windows = sorted(self._points)
            self._points = {at: self._points[at] for at in {*windows[::2], window}}

    def _append(self, token: int) -> None:
        """Read one token: by a step, or with its whole window if it is the last of it."""
        self._note([token], [None if self._logits is None else _bits(self._logits, token)])
        window, filled = divmod(len(self), self.window)
        if filled == 0:
            self._end_window(window - 1)
            return
        engine = self._engine(window)
        if self._state is None:
            self._state = engine.begin(engine.fit(self._point(window)))
        self._logits, self._state = engine.step(token, self._state)

    def _append_window(self, tokens: list[int]) -> None:
        """Read a whole window at its beginning."""
        first = None if self._logits is None else _bits(self._logits, tokens[0])
        window = len(self) // self.window
        self._note(tokens, [first] + [None] * (len(tokens) - 1))
        nats = self._end_window(window)
        self.bits[-len(nats) :] = [nat / math.log(2) for nat in nats]

    def _end_window(self, window: int) -> list[float]:
        """Read the window that the text ends with, whole; return the nats of its tokens but the first."""
        start, engine = window * self.window, self._engine(window)
        point, nats = engine.read_window(self.tokens[start:], start, engine.fit(self._point(window)))
        self._keep(window + 1, point)
        self._state, self._logits = None, point.logits
        return nats

    def _note(self, tokens: list[int], bits: list[float | None]) -> None:
        self.tokens += tokens
        self.bits += bits
        self.pieces += [self._stream.push(token) for token in tokens]

    def _restore(self, state: DecodingState | None = None) -> None:
        """Find state and scores after the last token again, from a later state of the same window if there is one.

        Without, the window is stepped through, which also finds the surprise of its tokens with other memory sizes.
        """
        window, filled = divmod(len(self), self.window)
        engine = self._engine(window)
        if filled and state is not None:
            self._logits, self._state = engine.step(self.tokens[-1], engine.back(state, filled - 1))
            return
        self._state, self._logits = None, self._point(window).logits
        if filled:
            self._state = engine.begin(engine.fit(self._point(window)))
        for number in range(len(self) - filled, len(self)):
            assert self._state is not None
            token = self.tokens[number]
            self.bits[number] = None if self._logits is None else _bits(self._logits, token)
            self._logits, self._state = engine.step(token, self._state)

    def _stream_at(self, length: int) -> TextStream:
        """A stream that holds back the bytes of a character that the first `length` tokens end within."""
        start = max(0, length - LONGEST_CHARACTER)
        before = self.tokens[start - 1] if start else None
        stream = TextStream(self.engines.text_model.tokenizer, before)
        for token in self.tokens[start:length]:
            stream.push(token)
        return stream

    def _likely(self, logits: Tensor, before: int) -> list[dict[str, Any]]:
        probabilities, tokens = logits[0].float().softmax(dim=-1).topk(min(LIKELY, logits.shape[1]))
        tokenizer = self.engines.text_model.tokenizer
        return [
            {"piece": _shown(TextStream(tokenizer, self.tokens[before]), token), "probability": round(probability, 5)}
            for probability, token in zip(probabilities.tolist(), tokens.tolist(), strict=True)
        ]


def _seed(seed: int, position: int) -> int:
    """A seed for one position: the noise there does not depend on how the text came to it."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {position}".encode(), digest_size=4).digest())


def _bits(logits: Tensor, token: int) -> float:
    return -float(logits[0].float().log_softmax(dim=-1)[token]) / math.log(2)


def _shown(stream: TextStream, token: int) -> str:
    return stream.push(token) or f"byte {token:#04x}"


def _drawn(point: Point) -> dict[str, Any]:
    """Places for JSON: layers with equal ones share an entry of `places`, and `layers` has the entry of each layer.

    Of compressed slots `firsts` and `lasts` name tokens, of recent ones `recent` does; -1 stands for a slot without.
    """
    entries: list[dict[str, Any]] = []
    layers = []
    for places, memory in zip(point.places, point.memory.layers, strict=True):
        seen = _visible(places, memory.recent_valid[0].cpu(), memory.compressed_valid[0].cpu())
        entry = {
            "recent": seen.recent.tolist(),
            "firsts": seen.compressed[:, 0].tolist(),
            "lasts": seen.compressed[:, 1].tolist(),
        }
        if entry not in entries:
            entries.append(entry)
        layers.append(entries.index(entry))
    return {"places": entries, "layers": layers}


def _visible(places: Places, recent: Tensor, compressed: Tensor) -> Places:
    """Slots that may not be seen hold nothing for a reader."""
    return Places(places.recent.masked_fill(~recent, EMPTY), places.compressed.masked_fill(~compressed[:, None], EMPTY))
