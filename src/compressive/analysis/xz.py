"""Bits per byte of xz, a general-purpose compressor, as a baseline for language models.

Compressing all of a training text takes minutes, so results are kept in the corpus's folder, by checksum.
"""

import contextlib
import hashlib
import json
import lzma
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from compressive.data.corpus import Corpus
from compressive.runtime import write_atomically

Result = TypeVar("Result")

LARGEST = 2**30 + 2**29 - 1
"""Largest dictionary of LZMA, in bytes."""
BEFORE = 128_000_000
"""Tokens at the end of the training split that xz reads before the test text."""
FILE = "xz.json"
"""Where a corpus keeps results."""


class XzBits(NamedTuple):
    """Bits per byte of one text."""

    alone: float
    after_training: float


def xz_bits(text: bytes) -> float:
    """Return bits per byte of `xz -9e` on a text."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def xz_bits_after(text: bytes, before: bytes) -> float:
    """Return bits per byte of a text compressed after another: xz(before + text) − xz(before), on two cores.

    This is the stronger baseline, because the compressor has seen the training text too. The dictionary, 64 MiB in
    `xz -9e`, is enlarged to hold all of it.
    """
    longest = max(4096, min(len(before) + len(text), LARGEST))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": longest}]
    with_text = in_background(lambda: len(lzma.compress(before + text, filters=filters)))
    without = len(lzma.compress(before, filters=filters))
    return 8 * (with_text() - without) / len(text)


def known(corpus: Corpus, tokens: int) -> XzBits | None:
    """Return what xz makes of the first tokens of a test split if that has been computed for this corpus before."""
    found = _read(corpus.folder / FILE).get(_key(corpus, tokens))
    return XzBits(*found) if found else None


def compute(corpus: Corpus, tokens: int) -> XzBits:
    """Compress the first tokens of a test split, alone and after the training text; keep the result if possible."""
    if (found := known(corpus, tokens)) is not None:
        return found
    decode = corpus.tokenizer.decode
    text, before = decode(corpus.split("test")[:tokens]), decode(corpus.split("train")[-BEFORE:])
    found = XzBits(xz_bits(text), xz_bits_after(text, before))
    path = corpus.folder / FILE
    with contextlib.suppress(OSError):  # a corpus that is shared may be read-only
        write_atomically(path, json.dumps(_read(path) | {_key(corpus, tokens): found}, indent=1) + "\n")
    return found


def in_background(function: Callable[[], Result]) -> Callable[[], Result]:
    """Start a function in a thread that does not keep the process alive; return one that waits for its result."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)  # Ctrl-C need not wait for the compressor
    thread.start()

    def wait() -> Result:
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    return wait


def _key(corpus: Corpus, tokens: int) -> str:
    """Name what was compressed: the texts, by their checksums, and how much of them."""
    about = (corpus.fingerprint, min(tokens, len(corpus.split("test"))), BEFORE, LARGEST)
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _read(path: Path) -> dict[str, list[float]]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
