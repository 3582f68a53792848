"""Audio files: read at any rate and number of channels as 16-bit samples at 24 kHz; written as wav.

Reading needs the `audio` extra, soundfile and soxr. Writing needs only the standard library.
"""

import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from compressive.data.speech.codes import FULL_SCALE, RATE

EXTENSIONS = (".wav", ".flac", ".ogg", ".aif", ".aiff")
"""File name extensions of audio files."""
BLOCK = 1 << 16  # samples read at a time
SHORTEST = RATE // 10
"""Minimum length of a clip in samples, 0.1 s."""
SILENCE = 33
"""A clip is silent if its peak is below this, 60 dB under full scale."""

Samples = npt.NDArray[np.int16]


class AudioMissingError(RuntimeError):
    """The packages that read audio files are not installed."""


class UnusableError(ValueError):
    """An unusable audio file; the message gives the reason, without the file name."""


def require_audio() -> tuple[Any, Any]:
    """Return the modules soundfile and soxr; raise AudioMissingError if they are not installed."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise AudioMissingError(
            f"reading audio files needs soundfile and soxr: pip install 'compressive[audio]' ({error})"
        ) from None
    return soundfile, soxr


def audio_format(file: IO[bytes]) -> tuple[int, int]:
    """Return the sample rate in Hz and the number of channels; raise UnusableError if the file cannot be read."""
    soundfile, _ = require_audio()
    try:
        with soundfile.SoundFile(file) as audio:
            return audio.samplerate, audio.channels
    except soundfile.SoundFileError as error:
        raise UnusableError(f"cannot be read as audio ({_first_line(error)})") from error


def read_audio(file: IO[bytes], start: int = 0, end: int | None = None) -> Iterator[Samples]:
    """Yield blocks of a file, or of its frames `start` to `end`, as int16 (n,) at 24 kHz, channels averaged.

    A mono 16-bit file at 24 kHz is returned unchanged. Raises UnusableError if the file cannot be read.
    """
    soundfile, soxr = require_audio()
    try:
        with soundfile.SoundFile(file) as audio:
            if start:
                audio.seek(start)
            left = audio.frames - start if end is None else end - start
            same = audio.samplerate == RATE
            stream = None if same else soxr.ResampleStream(audio.samplerate, RATE, 1, dtype="float32", quality="VHQ")
            while left > 0:
                block = audio.read(min(BLOCK, left), dtype="float32", always_2d=True)
                left = left - len(block) if len(block) else 0
                mono = block.mean(axis=1, dtype=np.float32)
                if not np.isfinite(mono).all():
                    raise UnusableError("holds NaN or infinite samples")
                yield _round(mono if stream is None else stream.resample_chunk(mono, last=left <= 0))
    except soundfile.SoundFileError as error:
        raise UnusableError(f"cannot be read as audio ({_first_line(error)})") from error


def _round(mono: npt.NDArray[np.float32]) -> Samples:
    return np.clip(np.rint(mono * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def _first_line(error: Exception) -> str:
    """Return the reason in soundfile's message, without the file object."""
    return str(error).splitlines()[0].split(": ")[-1].rstrip(".")


@contextmanager
def open_wav(path: Path) -> Iterator[wave.Wave_write]:
    """Open a mono 16-bit wav at 24 kHz for writing; its header is completed on close."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        yield file


def write_wav(path: Path, samples: bytes) -> None:
    """Write a wav from bytes of 16-bit little-endian samples."""
    with open_wav(path) as file:
        file.writeframes(samples)


def read_wav(path: Path) -> Samples:
    """Read a wav written by `write_wav`, without soundfile, as int16 (n,)."""
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.int16)
