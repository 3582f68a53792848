"""Bits per byte of xz, a general-purpose compressor, as a baseline for language models."""

import lzma

LARGEST = 2**30 + 2**29 - 1
"""Largest dictionary of LZMA, in bytes."""


def xz_bits(text: bytes) -> float:
    """Return bits per byte of `xz -9e` on a text."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def xz_bits_after(text: bytes, before: bytes) -> float:
    """Return bits per byte of a text compressed after another: xz(before + text) − xz(before).

    This is the stronger baseline, because the compressor has seen the training text too. The dictionary, 64 MiB in
    `xz -9e`, is enlarged to hold all of it.
    """
    longest = max(4096, min(len(before) + len(text), LARGEST))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": longest}]
    with_text, without = (len(lzma.compress(data, filters=filters)) for data in (before + text, before))
    return 8 * (with_text - without) / len(text)
