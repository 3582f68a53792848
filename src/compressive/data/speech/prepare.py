"""Prepare a corpus from audio files, clip by clip, in bounded memory.

Each clip is resampled into a temporary buffer first, so that a damaged, short or silent clip is left out entirely.
Clips of the train split are written at once; those of valid and test are buffered in temporary files, and so are those
that are split by shares, as the shares are of the clips that turned out to be usable.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from compressive.console import bytes_read, note, warn
from compressive.data.corpus import SPLITS, Clip, Corpus, write_corpus
from compressive.data.download import download
from compressive.data.speech.audio import (
    SHORTEST,
    SILENCE,
    UnusableError,
    audio_format,
    read_audio,
    require_audio,
)
from compressive.data.speech.clips import (
    EMBEDDED,
    PUBLISHED_SPEECH,
    Found,
    Source,
    by_shares,
    find_clips,
    find_published,
)
from compressive.data.speech.codes import RATE, MuLawTokenizer, PCMTokenizer
from compressive.data.tokenizer import Tokenizer

SPEECH = ("speech", *PUBLISHED_SPEECH)
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"mulaw": MuLawTokenizer, "pcm16": PCMTokenizer}
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
        note("no --source: using the few seconds of speech in the package, enough to try things out")
    return find_clips(source or EMBEDDED, split)


def write(folder: Path, name: str, source: Source, tokenizer: Tokenizer, settings: dict[str, str]) -> Corpus:
    """Read every clip once, write the corpus, report skipped clips, and return the corpus."""
    with _Reading(source, folder.parent) as reading:
        return write_corpus(
            folder, name, tokenizer, {split: reading.split(split) for split in SPLITS}, source.sums,
            reading.note, settings, clips=lambda: reading.clips,
        )  # fmt: skip


class _Reading:
    """One pass over all clips, which yields split after split."""

    def __init__(self, source: Source, scratch: Path) -> None:
        self.source = source
        self.clips: list[Clip] = []
        self.left_out: list[tuple[str, str]] = []
        self.rates: Counter[int] = Counter()
        """Usable clips by the sample rate of their file."""
        self.mixed = 0
        """Usable clips that have several channels."""
        self.ends = dict.fromkeys(SPLITS, 0)
        scratch.mkdir(parents=True, exist_ok=True)
        self.waiting = {split: tempfile.TemporaryFile(dir=scratch) for split in (*SPLITS[1:], None)}  # noqa: SIM115

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
        yield from _blocks(self.waiting[name], 2 * self.ends[name])

    def note(self) -> str:
        """What to know before comparing results: how clips were converted."""
        others = sorted(rate for rate in self.rates if rate != RATE)
        notes = [self.source.note] if self.source.note else []
        if others:
            kinds = ", ".join(f"{rate / 1000:g}" for rate in others)
            notes.append(f"{_clips(self.rates[rate] for rate in others)} resampled to 24 kHz (from {kinds} kHz)")
        if self.mixed:
            notes.append(f"{_clips([self.mixed])} mixed down to mono")
        return "; ".join(notes)

    def _read_all(self) -> Iterator[bytes]:
        unsplit: list[tuple[str, int]] = []  # names and sizes of the clips in waiting[None]
        with bytes_read("reading clips") as advance:
            for found in self.source.clips():
                with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY) as clip:
                    try:
                        size, rate, channels = _fill(clip, found)
                    except UnusableError as error:
                        self.left_out.append((found.name, str(error)))
                        continue
                    self.rates[rate] += 1
                    self.mixed += channels > 1
                    advance(2 * size)
                    clip.seek(0)
                    if found.split is None:
                        unsplit.append((found.name, size))
                        for block in _blocks(clip, 2 * size):
                            self.waiting[None].write(block)
                    else:
                        yield from self._place(found.split, found.name, size, clip)
        self._report(len(unsplit))
        if unsplit:
            splits = by_shares([name for name, _ in unsplit], self.source.shares)
            self.waiting[None].seek(0)
            for name, size in unsplit:
                yield from self._place(splits[name], name, size, self.waiting[None])
        self.clips.sort(key=lambda clip: (SPLITS.index(clip.split), clip.start))
        for split in SPLITS:
            if not self.ends[split]:
                raise ValueError(f"no usable clip for the {split} split, {len(self.left_out):,} left out")

    def _place(self, split: str, name: str, size: int, file: IO[bytes]) -> Iterator[bytes]:
        """Add a clip, which is the next `size` samples of the file, to a split; yield its samples if that is train."""
        begin = self.ends[split]
        self.ends[split] = begin + size
        self.clips.append(Clip(split, begin, begin + size, name))
        for block in _blocks(file, 2 * size):
            if split == "train":
                yield block
            else:
                self.waiting[split].write(block)

    def _report(self, unsplit: int) -> None:
        """Print the files that were skipped, and why."""
        if self.source.others:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.source.others.items()))
            note(f"skipped, not audio: {kinds}")
        if self.left_out:
            whole = len(self.left_out) + len(self.clips) + unsplit
            reasons = [f"  {name}: {why}" for name, why in self.left_out[:NAMED]]
            if len(self.left_out) > NAMED:
                reasons.append(f"  and {len(self.left_out) - NAMED:,} more")
            warn("\n".join([f"left out {len(self.left_out):,} of {whole:,} clips:", *reasons]))


def _clips(counts: Iterable[int]) -> str:
    count = sum(counts)
    return f"{count:,} clip{'s' * (count != 1)}"


def _fill(clip: IO[bytes], found: Found) -> tuple[int, int, int]:
    """Write a clip's samples to `clip`; raise UnusableError if it is unusable.

    Returns the number of samples, and the sample rate and number of channels of the file.
    """
    size, loudest = 0, 0
    with found.open() as file:
        if not file.read(1):
            raise UnusableError("is empty")
        file.seek(0)
        rate, channels = audio_format(file)
        file.seek(0)
        for samples in read_audio(file, found.start, found.end):
            clip.write(samples.astype("<i2").tobytes())
            size += len(samples)
            loudest = max(loudest, int(np.abs(samples.astype(np.int32)).max(initial=0)))
    if size < SHORTEST:
        raise UnusableError(f"is {1000 * size / RATE:.0f} ms long, expected at least {1000 * SHORTEST / RATE:.0f} ms")
    if loudest < SILENCE:
        raise UnusableError("is silent")
    return size, rate, channels


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file."""
    while size and (block := file.read(min(BLOCK, size))):
        size -= len(block)
        yield block
