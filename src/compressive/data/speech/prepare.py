"""Prepare a corpus from audio files, clip by clip, in bounded memory.

Each clip is resampled into a temporary buffer first, so that a damaged, short or silent clip is left out entirely.
Clips of the train split are written at once; those of valid and test are buffered in temporary files.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from compressive.console import bytes_read
from compressive.data.corpus import SPLITS, Clip, Corpus, write_corpus
from compressive.data.download import download
from compressive.data.speech.audio import SHORTEST, SILENCE, UnusableError, read_audio, require_audio
from compressive.data.speech.clips import EMBEDDED, PUBLISHED_SPEECH, Found, Source, find_clips, find_published
from compressive.data.speech.codes import RATE, MuLawTokenizer, PCMTokenizer
from compressive.data.tokenizer import Tokenizer

SPEECH = ("speech", *PUBLISHED_SPEECH)
TOKENIZERS = {"mulaw": MuLawTokenizer, "pcm16": PCMTokenizer}
IN_MEMORY = 1 << 24  # larger clips are buffered in a temporary file
BLOCK = 1 << 20
NAMED = 20
"""Number of skipped files that are listed by name."""


def find(corpus: str, source: Path | None, downloads: Path, split: tuple[float, float, float]) -> Source:
    """Return the clips of `source`, of a downloaded corpus, or, without either, of the package's sample."""
    require_audio()
    if corpus in PUBLISHED_SPEECH:
        urls = PUBLISHED_SPEECH[corpus].urls
        archives = [download(url, downloads / url.rsplit("/", 1)[-1], urls[url]) for url in urls] if not source else []
        return find_published(corpus, [source] if source else archives)
    if source is None:
        print("no --source: using the few seconds of speech in the package, enough to try things out", file=sys.stderr)
    return find_clips(source or EMBEDDED, split)


def write(folder: Path, name: str, source: Source, tokenizer: Tokenizer, settings: dict[str, str]) -> Corpus:
    """Read every clip once, write the corpus, report skipped clips, and return the corpus."""
    with _Reading(source, folder.parent) as reading:
        made = write_corpus(
            folder, name, tokenizer, {split: reading.split(split) for split in SPLITS}, source.sums,
            source.note, settings, clips=lambda: reading.clips,
        )  # fmt: skip
    reading.report()
    return made


class _Reading:
    """One pass over all clips, which yields split after split."""

    def __init__(self, source: Source, scratch: Path) -> None:
        self.source = source
        self.clips: list[Clip] = []
        self.left_out: list[tuple[str, str]] = []
        self.ends = dict.fromkeys(SPLITS, 0)
        scratch.mkdir(parents=True, exist_ok=True)
        self.waiting = {split: tempfile.TemporaryFile(dir=scratch) for split in SPLITS[1:]}  # noqa: SIM115

    def __enter__(self) -> "_Reading":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.waiting.values():
            file.close()

    def split(self, name: str) -> Iterator[bytes]:
        """The samples of a split; train first, which reads everything."""
        if name == "train":
            yield from self._read_all()
            return
        self.waiting[name].seek(0)
        yield from _blocks(self.waiting[name])

    def _read_all(self) -> Iterator[bytes]:
        with bytes_read("reading clips") as advance:
            for found in self.source.clips():
                with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY) as clip:
                    try:
                        size = _fill(clip, found)
                    except UnusableError as error:
                        self.left_out.append((found.name, str(error)))
                        continue
                    begin = self.ends[found.split]
                    self.ends[found.split] = begin + size
                    self.clips.append(Clip(found.split, begin, begin + size, found.name))
                    advance(2 * size)
                    clip.seek(0)
                    for block in _blocks(clip):
                        if found.split == "train":
                            yield block
                        else:
                            self.waiting[found.split].write(block)
        self.clips.sort(key=lambda clip: (SPLITS.index(clip.split), clip.start))
        self._refuse_nothing()

    def _refuse_nothing(self) -> None:
        """Raise ValueError with the reasons if a split has no usable clip."""
        for split in SPLITS:
            if not self.ends[split]:
                raise ValueError(
                    f"no usable clip for the {split} split, {len(self.left_out):,} left out"
                    + "".join(f"\n  {name}: {why}" for name, why in self.left_out[:NAMED])
                )

    def report(self) -> None:
        """Print the files that were skipped, and why."""
        others = self.source.others
        if others:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(others.items()))
            print(f"skipped, not audio: {kinds}", file=sys.stderr)
        if self.left_out:
            print(
                f"left out {len(self.left_out):,} of {len(self.left_out) + len(self.clips):,} clips:", file=sys.stderr
            )
        for name, why in self.left_out[:NAMED]:
            print(f"  {name}: {why}", file=sys.stderr)
        if len(self.left_out) > NAMED:
            print(f"  and {len(self.left_out) - NAMED:,} more", file=sys.stderr)


def _fill(clip: IO[bytes], found: Found) -> int:
    """Write a clip's samples to `clip` and return their number; raise UnusableError if it is unusable."""
    size, loudest = 0, 0
    with found.open() as file:
        if not file.read(1):
            raise UnusableError("is empty")
        file.seek(0)
        for samples in read_audio(file, found.start, found.end):
            clip.write(samples.astype("<i2").tobytes())
            size += len(samples)
            loudest = max(loudest, int(np.abs(samples.astype(np.int32)).max(initial=0)))
    if size < SHORTEST:
        raise UnusableError(f"is {1000 * size / RATE:.0f} ms long, expected at least {1000 * SHORTEST / RATE:.0f} ms")
    if loudest < SILENCE:
        raise UnusableError("is silent")
    return size


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block
