"""Audio from a model: prompts, streaming output to wav files, and real audio for comparison."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compressive.data.corpus import Corpus
from compressive.data.speech.audio import Samples, UnusableError, open_wav, read_audio
from compressive.data.speech.codes import RATE
from compressive.data.tokenizer import Tokenizer, Tokens

FLUSH = RATE // 10
"""Maximum samples buffered before a write."""


def prompt_samples(path: Path | None, tokenizer: Tokenizer, length: int | None) -> Tokens:
    """Return the first `length` tokens (n,) of an audio file, or one silent sample without a file.

    Raises ValueError if the file cannot be read as audio or is empty.
    """
    if path is None:
        return tokenizer.encode(b"\0\0")
    try:
        with path.open("rb") as file:
            audio = b"".join(block.astype("<i2").tobytes() for block in read_audio(file))
    except UnusableError as error:
        raise ValueError(f"{path} {error}: expected a wav or flac file to continue") from error
    if not audio:
        raise ValueError(f"{path} holds no samples: expected audio to continue; leave it out to start from silence")
    return tokenizer.encode(audio)[:length]


def write_samples(sampled: Iterator[Tensor], tokenizer: Tokenizer, paths: Sequence[Path]) -> Iterator[int]:
    """Write sampled tokens, (len(paths),) at a time, one wav file per row; yield the count now and then.

    After an error the files hold all samples up to it, and are valid.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_wav(path)) for path in paths]
        buffer: list[Tensor] = []
        count = 0

        def flush() -> None:
            if buffer:
                rows = torch.stack(buffer, dim=1).cpu().numpy()
                for file, row in zip(files, rows, strict=True):
                    file.writeframes(tokenizer.decode(row))
                buffer.clear()

        stack.callback(flush)  # runs before the files are closed, also after an error
        for tokens in sampled:
            buffer.append(tokens)
            count += 1
            if len(buffer) == FLUSH:
                flush()
                yield count
        flush()
        yield count


def real_audio(corpus: Corpus, size: int) -> Samples:
    """Return up to `size` samples of a test clip, int16: the first clip that is long enough, else the longest."""
    clips = [clip for clip in corpus.clips if clip.split == "test"]
    clip = next((clip for clip in clips if clip.size >= size), max(clips, key=lambda clip: clip.size))
    codes = np.asarray(corpus.split("test")[clip.start : clip.start + min(size, clip.size)])
    return np.frombuffer(corpus.tokenizer.decode(codes), "<i2").astype(np.int16)
