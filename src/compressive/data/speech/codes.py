"""Tokenisers for 16-bit audio samples: 8-bit mu-law codes, or all 16 bits.

In a corpus, audio is a text whose bytes are 16-bit little-endian samples, full scale 32,768. Clips are not normalised.
"""

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from compressive.data.tokenizer import Ids, Tokenizer, Tokens

RATE = 24_000
"""Sample rate of all audio in Hz, as in the paper."""
FULL_SCALE = 32_768
MU = 255


def mu_law_edges() -> npt.NDArray[np.float64]:
    """Return the 257 decision thresholds between codes, for full scale 1; the outer two are infinite."""
    edges = _expand((np.arange(MU + 2) - 0.5) / MU * 2 - 1)
    edges[[0, -1]] = -np.inf, np.inf
    return edges


def mu_law_amplitudes() -> npt.NDArray[np.float64]:
    """Return the amplitude of each of the 256 codes, for full scale 1."""
    return _expand(np.arange(MU + 1) / MU * 2 - 1)


def _expand(y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    expanded: npt.NDArray[np.float64] = np.sign(y) * ((1.0 + MU) ** np.abs(y) - 1) / MU
    return expanded


def _compress(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    compressed: npt.NDArray[np.float64] = np.sign(x) * np.log1p(MU * np.abs(x)) / np.log1p(MU)
    return compressed


class _SampleTokenizer(Tokenizer):
    """One token per sample."""

    is_audio = True

    @staticmethod
    def last_cut(text: bytes) -> int:
        """Return the end of the last whole sample."""
        return len(text) // 2 * 2

    def _encode(self, text: bytes, offset: int) -> Tokens:
        if len(text) % 2:
            raise ValueError(f"{offset + len(text):,} bytes: expected 16-bit samples, two bytes each")
        return self._codes(np.frombuffer(text, "<i2").astype(np.int32) + FULL_SCALE)

    def _codes(self, shifted: npt.NDArray[np.int32]) -> Tokens:
        """Return the tokens of samples shifted to 0 to 65,535."""
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _restore(cls, state: dict[str, Any]) -> Self:
        return cls()


class MuLawTokenizer(_SampleTokenizer):
    """256 codes, finer at low amplitudes: sign(x)·ln(1 + 255|x|) / ln 256, rounded."""

    kind = "mulaw"

    def __init__(self) -> None:
        y = _compress(np.arange(-FULL_SCALE, FULL_SCALE) / FULL_SCALE)
        self._table = np.floor((y + 1) / 2 * MU + 0.5).astype(np.uint8)
        levels = np.round(mu_law_amplitudes() * FULL_SCALE)
        self._levels = np.clip(levels, -FULL_SCALE, FULL_SCALE - 1).astype("<i2")

    @property
    def vocab_size(self) -> int:
        """256, 8 bits."""
        return MU + 1

    def decode(self, ids: Ids) -> bytes:
        """Return the samples of the codes, as bytes."""
        samples: bytes = self._levels[self._checked(ids)].tobytes()
        return samples

    def _codes(self, shifted: npt.NDArray[np.int32]) -> Tokens:
        return self._table[shifted]


class PCMTokenizer(_SampleTokenizer):
    """65,536 codes ordered by amplitude; silence is 32,768."""

    kind = "pcm16"

    @property
    def vocab_size(self) -> int:
        """65,536, 16 bits."""
        return 2 * FULL_SCALE

    def decode(self, ids: Ids) -> bytes:
        """Return the samples, as bytes."""
        return (self._checked(ids).astype(np.int32) - FULL_SCALE).astype("<i2").tobytes()

    def _codes(self, shifted: npt.NDArray[np.int32]) -> Tokens:
        return shifted.astype(np.uint16)
