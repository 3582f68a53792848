"""Sound files: read at any rate, in any number of channels, as 16-bit samples at 24 kHz; written as wav.

Reading takes the `audio` extra, soundfile and soxr. Writing takes nothing.
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
"""What a sound file's name ends in."""
BLOCK = 1 << 16  # samples read at once
SHORTEST = RATE // 10
"""Samples of a tenth of a second: what is shorter is no clip of speech."""
SILENCE = 33
"""Sound whose loudest sample is below this, 60 dB under full scale, is silence."""

Samples = npt.NDArray[np.int16]


class AudioMissingError(RuntimeError):
    """What reads sound files is not installed."""


class UnusableError(ValueError):
    """A sound file that is no good; the message says why, without its name."""


def require_audio() -> tuple[Any, Any]:
    """Return soundfile and soxr, or say how to get them."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: soundfile without the library it wraps
        raise AudioMissingError(
            f"reading sound files needs soundfile and soxr: pip install 'compressive[audio]' ({error})"
        ) from None
    return soundfile, soxr


def read_audio(file: IO[bytes], start: int = 0, end: int | None = None) -> Iterator[Samples]:
    """Read a file, or some of its frames, block by block: channels averaged, resampled to 24 kHz, rounded to 16 bits.

    A mono file of 16 bits at 24 kHz comes out as it is.
    """
    soundfile, soxr = require_audio()
    try:
        with soundfile.SoundFile(file) as sound:
            if start:
                sound.seek(start)
            left = sound.frames - start if end is None else end - start
            same = sound.samplerate == RATE
            stream = None if same else soxr.ResampleStream(sound.samplerate, RATE, 1, dtype="float32", quality="VHQ")
            while left > 0:
                block = sound.read(min(BLOCK, left), dtype="float32", always_2d=True)
                left = left - len(block) if len(block) else 0
                mono = block.mean(axis=1, dtype=np.float32)
                if not np.isfinite(mono).all():
                    raise UnusableError("holds samples that are no numbers")
                yield _round(mono if stream is None else stream.resample_chunk(mono, last=left <= 0))
    except soundfile.SoundFileError as error:
        raise UnusableError(f"cannot be read as sound ({_first_line(error)})") from error


def _round(mono: npt.NDArray[np.float32]) -> Samples:
    return np.clip(np.rint(mono * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def _first_line(error: Exception) -> str:
    """Its reason, without the file object that soundfile names."""
    return str(error).splitlines()[0].split(": ")[-1].rstrip(".")


@contextmanager
def open_wav(path: Path) -> Iterator[wave.Wave_write]:
    """Open a mono wav of 24 kHz for 16-bit samples; it is whole when it is closed, however many came."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        yield file


def write_wav(path: Path, samples: bytes) -> None:
    """Write 16-bit samples, as bytes."""
    with open_wav(path) as file:
        file.writeframes(samples)


def read_wav(path: Path) -> Samples:
    """Read what was written so, without soundfile."""
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.int16)
