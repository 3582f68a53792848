"""A prepared corpus: a folder of token files that are memory-mapped, and streams through them.

    train.bin valid.bin test.bin   tokens, little-endian, nothing else
    tokenizer.json                 from text to tokens and back
    clips.csv                      of sound only: where each clip begins and ends, and what it was made of
    manifest.json                  counts, checksums, where the text came from; written last

A folder is filled aside and takes its name when it is whole, so a folder with that name is a whole corpus.
"""

import csv
import dataclasses
import glob
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from compressive.data import tokenizer as tokenizers
from compressive.data.download import sha256_of
from compressive.data.tokenizer import Tokenizer, Tokens

FORMAT = 1
SPLITS = ("train", "valid", "test")
MANIFEST = "manifest.json"
CLIPS = "clips.csv"
ABANDONED = 24 * 3600.0  # seconds after which what a killed run left beside a corpus is cleared away


@dataclass(frozen=True)
class SplitInfo:
    """What is known of one split."""

    tokens: int
    """Number of tokens."""
    bytes: int
    """Bytes of the text that they were made of."""
    words: int
    """Words of that text, as white space (of ASCII) separates them."""
    sha256: str
    """Of the token file."""


@dataclass(frozen=True)
class Clip:
    """A stretch of a split that has nothing to do with what comes before it, as clips.csv has it."""

    split: str
    start: int
    end: int
    source: str

    @property
    def size(self) -> int:
        """Its tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class Manifest:
    """What a corpus is made of, as manifest.json has it."""

    name: str
    """The corpus."""
    tokenizer: str
    """Kind of its tokeniser: bytes, words or bpe; of sound mulaw or pcm16."""
    tokenizer_sha256: str
    """Of tokenizer.json."""
    vocab_size: int
    """Number of different tokens."""
    dtype: str
    """Type of a token on disk: uint8, uint16 or uint32."""
    splits: Mapping[str, SplitInfo]
    """Train, valid and test."""
    sources: Mapping[str, str]
    """The files that the text was read from, in order, and the SHA-256 of each."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What was asked for when it was prepared."""
    note: str = ""
    """What one must know about this text before comparing results on it."""
    clips_sha256: str = ""
    """Of clips.csv, where there is one."""
    format: int = FORMAT
    """Version of this format."""

    def save(self, folder: Path) -> None:
        """Write manifest.json."""
        _write_synced(folder / MANIFEST, (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read manifest.json."""
        path = folder / MANIFEST
        try:
            values: dict[str, Any] = json.loads(path.read_text("utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"it has format {values['format']}, expected {FORMAT}")
            values["splits"] = {name: SplitInfo(**values["splits"][name]) for name in SPLITS}
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be used ({error}): prepare the corpus again") from error


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, opened: its tokens stay on disk until they are used."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a prepared corpus; check that its files are there and of the right size."""
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(
                f"no corpus in {folder}: expected {MANIFEST} there; run: compressive data prepare {folder.name}"
            )
        corpus = cls(folder, Manifest.load(folder))
        for split in SPLITS:
            path, expected = corpus._path(split), corpus.manifest.splits[split].tokens * corpus._dtype.itemsize
            size = path.stat().st_size if path.is_file() else None
            if size != expected:
                found = "is not there" if size is None else f"has {size:,} bytes"
                raise ValueError(f"{path} {found}, expected {expected:,} bytes: prepare the corpus again")
        return corpus

    @property
    def name(self) -> str:
        """The corpus."""
        return self.manifest.name

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return self.manifest.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """From text to this corpus's tokens and back."""
        return tokenizers.load_tokenizer(self.folder)

    def split(self, name: str) -> "np.memmap[Any, np.dtype[np.unsignedinteger[Any]]]":
        """All tokens of a split, read-only and read from disk when touched."""
        self._info(name)
        return np.memmap(self._path(name), self._dtype, mode="r")

    @cached_property
    def clips(self) -> tuple[Clip, ...]:
        """All clips in order; none if the corpus is one text."""
        if not self.manifest.clips_sha256:
            return ()
        with (self.folder / CLIPS).open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            return tuple(Clip(row["split"], int(row["start"]), int(row["end"]), row["source"]) for row in rows)

    def starts(self, split: str) -> npt.NDArray[np.int64] | None:
        """Where in a split a clip begins, rising; None if the corpus is one text, never to be forgotten."""
        self._info(split)
        if not self.clips:
            return None
        return np.array([clip.start for clip in self.clips if clip.split == split], np.int64)

    def words(self, split: str) -> int:
        """Words of a split's text; what perplexity per word divides by, whatever the tokeniser."""
        return self._info(split).words

    def bytes(self, split: str) -> int:
        """Bytes of a split's text; what bits per character divide by, whatever the tokeniser."""
        return self._info(split).bytes

    def verify(self) -> None:
        """Read every file and compare it with its checksum."""
        expected = {self._path(split): self.manifest.splits[split].sha256 for split in SPLITS}
        expected[self.folder / tokenizers.FILE] = self.manifest.tokenizer_sha256
        if self.manifest.clips_sha256:
            expected[self.folder / CLIPS] = self.manifest.clips_sha256
        for path, checksum in expected.items():
            if (found := sha256_of(path)) != checksum:
                raise ValueError(f"{path} has SHA-256 {found}, expected {checksum}: prepare the corpus again")

    @property
    def _dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    def _path(self, split: str) -> Path:
        return self.folder / f"{split}.bin"

    def _info(self, split: str) -> SplitInfo:
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: expected one of {', '.join(SPLITS)}")
        return self.manifest.splits[split]


def write_corpus(
    folder: Path,
    name: str,
    tokenizer: Tokenizer,
    splits: Mapping[str, Iterable[bytes]],
    sources: Mapping[str, str],
    note: str = "",
    settings: Mapping[str, str] | None = None,
    workers: int = 1,
    clips: Callable[[], Sequence[Clip]] | None = None,
) -> Corpus:
    """Tokenise texts into a folder, in one pass and little memory; whatever fails leaves the folder as it was.

    The chunks of a split may be cut anywhere. Splits are read in the order train, valid, test. More than one worker
    are processes that tokenise side by side; what they write is the same. `clips` is asked once all is read.
    """
    if set(splits) != set(SPLITS):
        raise ValueError(f"splits {', '.join(splits)}: expected {', '.join(SPLITS)}")
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(folder)
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    aside.mkdir()
    try:
        tokenizer.save(aside)
        infos = {
            split: _write_split(aside / f"{split}.bin", name, split, tokenizer, splits[split], workers)
            for split in SPLITS
        }
        if clips is not None:
            _write_clips(aside / CLIPS, clips())
        Manifest(
            name=name,
            tokenizer=tokenizer.kind,
            tokenizer_sha256=sha256_of(aside / tokenizers.FILE),
            vocab_size=tokenizer.vocab_size,
            dtype=tokenizer.dtype.name,
            splits=infos,
            sources=sources,
            settings=settings or {},
            note=note,
            clips_sha256="" if clips is None else sha256_of(aside / CLIPS),
        ).save(aside)
        _take_place(aside, folder)
    except BaseException:  # an interrupt too
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Corpus.open(folder)


def refuse_foreign(folder: Path) -> None:
    """Refuse to replace what is not a corpus: it may be someone's texts."""
    if folder.exists() and not (folder / MANIFEST).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not a prepared corpus: choose another --name or --data-dir")


def _write_split(
    path: Path, name: str, split: str, tokenizer: Tokenizer, chunks: Iterable[bytes], workers: int
) -> SplitInfo:
    text, checksum, count = _TextCount(), hashlib.sha256(), 0
    dtype = tokenizer.dtype.newbyteorder("<")
    with path.open("wb") as file:
        for tokens in tokenizer.encode_chunks(text.watch(chunks), workers):
            data = tokens.astype(dtype, copy=False).tobytes()
            checksum.update(data)
            file.write(data)
            count += len(tokens)
        file.flush()
        os.fsync(file.fileno())
    if count == 0:
        raise ValueError(f"the {split} split of {name} is empty: expected some text; give more, or other shares")
    return SplitInfo(count, text.bytes, 0 if tokenizer.is_audio else text.words, checksum.hexdigest())


def _write_clips(path: Path, clips: Sequence[Clip]) -> None:
    file = StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(field.name for field in dataclasses.fields(Clip))
    rows.writerows(dataclasses.astuple(clip) for clip in clips)
    _write_synced(path, file.getvalue().encode())


def _take_place(aside: Path, folder: Path) -> None:
    """Give a whole folder its name; an older one steps aside for it and is removed after."""
    if not folder.exists():
        aside.rename(folder)
        return
    old = aside.with_suffix(".old")
    folder.rename(old)
    try:
        aside.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old)


def _clear_abandoned(folder: Path) -> None:
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{'[0-9a-f]' * 32}.*"):
        if time.time() - left.stat().st_mtime > ABANDONED:
            shutil.rmtree(left, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class _TextCount:
    """Counts the bytes and words of a text that passes by in chunks."""

    def __init__(self) -> None:
        self.bytes = 0
        self.words = 0

    def watch(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        blank = np.zeros(256, bool)
        blank[list(b" \t\n\r\v\f")] = True
        after_blank = True
        for chunk in chunks:
            if chunk:
                gaps = blank[np.frombuffer(chunk, np.uint8)]
                self.bytes += len(chunk)
                self.words += int(np.count_nonzero(gaps[:-1] & ~gaps[1:])) + bool(after_blank and not gaps[0])
                after_blank = bool(gaps[-1])
                yield chunk


class Streams:
    """A text as `batch` streams of equal length, one after the other, so that each row of a batch reads on and on.

    `first` and `count` choose some of these streams, as where several processes share a batch. What is left over after
    the last stream is dropped. Windows are views: nothing is copied before it is used. `clips` says where in the text
    something new begins, if anywhere: see `starts`.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch: int,
        first: int = 0,
        count: int | None = None,
        clips: npt.NDArray[np.int64] | None = None,
    ) -> None:
        count = batch - first if count is None else count
        if tokens.ndim != 1:
            raise ValueError(f"tokens of shape {tokens.shape}: expected one row")
        if batch < 1 or first < 0 or count < 1 or first + count > batch:
            raise ValueError(
                f"batch={batch}, first={first}, count={count}: expected at least one stream, within the batch"
            )
        size = len(tokens) // batch
        if size < 2:
            raise ValueError(
                f"batch={batch}: {len(tokens)} tokens give streams of {size}, expected at least 2 in each; "
                f"use a batch of at most {len(tokens) // 2}, or more text"
            )
        self.batch, self.first, self.count = batch, first, count
        self.length = size - 1
        """Tokens of a stream that can be inputs, as each has one that follows."""
        self._streams: npt.NDArray[np.unsignedinteger[Any]] = tokens[: batch * size].reshape(batch, size)[
            first : first + count
        ]
        self._size, self._clips = size, clips

    def window(self, start: int, size: int) -> tuple[Tokens, Tokens]:
        """Inputs and what follows each, (count, up to `size`) from `start` on; fewer than `size` only at the end."""
        if not 0 <= start < self.length or size < 1:
            raise ValueError(
                f"start={start}, size={size}: expected a start from 0 to {self.length - 1} and a size of at least 1"
            )
        end = min(start + size, self.length)
        return self._streams[:, start:end], self._streams[:, start + 1 : end + 1]

    def starts(self, start: int, size: int) -> npt.NDArray[np.bool_] | None:
        """Which inputs of that window begin a clip, (count, up to `size`); None where the text is one.

        A stream that begins in the midst of a clip begins one too: what it read last, before it began again, is
        another clip's.
        """
        if self._clips is None:
            return None
        shape = self.window(start, size)[0].shape
        return np.stack([starts_within(self._clips, stream * self._size, start, shape[1]) for stream in self._range()])

    def _range(self) -> range:
        return range(self.first, self.first + self.count)


def starts_within(clips: npt.NDArray[np.int64], edge: int, start: int, size: int) -> npt.NDArray[np.bool_]:
    """Mark which of `size` tokens begin a clip, from `start` on in a stream whose first token is the text's `edge`."""
    first, last = np.searchsorted(clips, [edge + start, edge + start + size])
    marks = np.zeros(size, bool)
    marks[clips[first:last] - (edge + start)] = True
    marks[:1] |= start == 0
    return marks
