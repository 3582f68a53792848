"""Sound from a model, sample by sample, the way that text is drawn; written as it comes."""

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
"""Samples that are held back at most before they are written."""


def prompt_samples(path: Path | None, tokenizer: Tokenizer, length: int | None) -> Tokens:
    """Tokens of a sound file to be continued, or of one silent sample, as a model needs one to begin with."""
    if path is None:
        return tokenizer.encode(b"\0\0")
    try:
        with path.open("rb") as file:
            sound = b"".join(block.astype("<i2").tobytes() for block in read_audio(file))
    except UnusableError as error:
        raise ValueError(f"{path} {error}: expected a wav or flac to continue") from error
    if not sound:
        raise ValueError(f"{path} holds no sound: expected some to continue; leave it out to begin from silence")
    return tokenizer.encode(sound)[:length]


def write_samples(drawn: Iterator[Tensor], tokenizer: Tokenizer, paths: Sequence[Path]) -> Iterator[int]:
    """Write drawn samples (len(paths),), each into its wav; yields how many there are of each, now and then.

    What is drawn when something goes wrong is in the files, which are whole at any time they are closed.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_wav(path)) for path in paths]
        held: list[Tensor] = []
        count = 0

        def flush() -> None:
            if held:
                rows = torch.stack(held, dim=1).cpu().numpy()
                for file, row in zip(files, rows, strict=True):
                    file.writeframes(tokenizer.decode(row))
                held.clear()

        stack.callback(flush)  # before the files are closed, whatever ends the drawing
        for tokens in drawn:
            held.append(tokens)
            count += 1
            if len(held) == FLUSH:
                flush()
                yield count
        flush()
        yield count


def real_audio(corpus: Corpus, size: int) -> Samples:
    """The beginning of the first clip of the test split that is long enough, else of the longest, for comparison."""
    clips = [clip for clip in corpus.clips if clip.split == "test"]
    clip = next((clip for clip in clips if clip.size >= size), max(clips, key=lambda clip: clip.size))
    codes = np.asarray(corpus.split("test")[clip.start : clip.start + min(size, clip.size)])
    return np.frombuffer(corpus.tokenizer.decode(codes), "<i2").astype(np.int16)
