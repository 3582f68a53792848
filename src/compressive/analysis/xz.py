"""What a general compressor makes of the same text: the figure that any model of it must beat."""

import lzma

LARGEST = 2**30 + 2**29 - 1
"""LZMA's longest dictionary."""


def xz_bits(text: bytes) -> float:
    """Bits per byte of `xz -9e`."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def xz_bits_after(text: bytes, before: bytes) -> float:
    """Bits per byte that a text adds to one that was read before: xz(before + text) − xz(before).

    The harder comparison, as the compressor too has seen the training text. Its dictionary, which `xz -9e` ends at 64
    MiB, holds all of it.
    """
    longest = max(4096, min(len(before) + len(text), LARGEST))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": longest}]
    with_text, without = (len(lzma.compress(data, filters=filters)) for data in (before + text, before))
    return 8 * (with_text - without) / len(text)
