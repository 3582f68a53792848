"""A prepared corpus: a folder of memory-mapped token files, and the streams that training reads from them.

    train.bin valid.bin test.bin   tokens, little-endian, without a header
    tokenizer.json                 the tokeniser
    clips.csv                      for audio only: start, end and source of each clip
    manifest.json                  counts, checksums, sources; written last

A corpus is written to a temporary folder and renamed when complete, so an existing folder is a complete corpus.
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
ABANDONED = 24 * 3600.0  # seconds after which temporary folders of killed processes are deleted


@dataclass(frozen=True)
class SplitInfo:
    """Counts and checksum of one split."""

    tokens: int
    """Number of tokens."""
    bytes: int
    """Bytes of the original text."""
    words: int
    """Words of the original text, separated by ASCII white space."""
    sha256: str
    """SHA-256 of the token file."""


@dataclass(frozen=True)
class Clip:
    """One row of clips.csv: a range of a split that is independent of what precedes it."""

    split: str
    start: int
    end: int
    source: str

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    name: str
    """Name of the corpus."""
    tokenizer: str
    """Kind of tokeniser: bytes, words or bpe; for audio mulaw or pcm16."""
    tokenizer_sha256: str
    """SHA-256 of tokenizer.json."""
    vocab_size: int
    """Vocabulary size."""
    dtype: str
    """Type of a token on disk: uint8, uint16 or uint32."""
    splits: Mapping[str, SplitInfo]
    """Counts and checksums of train, valid and test."""
    sources: Mapping[str, str]
    """Source files in order, with the SHA-256 of each."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Options that it was prepared with."""
    note: str = ""
    """What to know before comparing results on this corpus, such as missing books."""
    clips_sha256: str = ""
    """SHA-256 of clips.csv, or empty if there is none."""
    format: int = FORMAT
    """Version of this format."""

    def save(self, folder: Path) -> None:
        """Write manifest.json."""
        _write_synced(folder / MANIFEST, (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read manifest.json; raise ValueError if it is damaged or of another format."""
        path = folder / MANIFEST
        try:
            values: dict[str, Any] = json.loads(path.read_text("utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"it has format {values['format']}, expected {FORMAT}")
            values["splits"] = {name: SplitInfo(**values["splits"][name]) for name in SPLITS}
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be used ({error}): prepare it again with --force") from error


@dataclass(frozen=True)
class Corpus:
    """An opened corpus; its tokens are memory-mapped."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a prepared corpus.

        Raises FileNotFoundError if there is none, ValueError if a file is missing or has the wrong size.
        """
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"no corpus in {folder}: {_how_to_prepare(folder)}")
        corpus = cls(folder, Manifest.load(folder))
        for split in SPLITS:
            path, expected = corpus._path(split), corpus.manifest.splits[split].tokens * corpus._dtype.itemsize
            size = path.stat().st_size if path.is_file() else None
            if size != expected:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise ValueError(f"{path} {found}, expected {expected:,} bytes: prepare it again with --force")
        return corpus

    @property
    def name(self) -> str:
        """Name of the corpus."""
        return self.manifest.name

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""
        return self.manifest.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the checksums of tokens, clips and tokeniser: equal for equal corpora, whatever their names."""
        manifest = self.manifest
        sums = [manifest.tokenizer_sha256, manifest.clips_sha256, *(manifest.splits[name].sha256 for name in SPLITS)]
        return hashlib.sha256(" ".join(sums).encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokeniser of this corpus."""
        return tokenizers.load_tokenizer(self.folder)

    def split(self, name: str) -> "np.memmap[Any, np.dtype[np.unsignedinteger[Any]]]":
        """Return all tokens of a split (n,), memory-mapped and read-only."""
        self._info(name)
        return np.memmap(self._path(name), self._dtype, mode="r")

    @cached_property
    def clips(self) -> tuple[Clip, ...]:
        """All clips in order; empty for a corpus without clips."""
        if not self.manifest.clips_sha256:
            return ()
        with (self.folder / CLIPS).open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            return tuple(Clip(row["split"], int(row["start"]), int(row["end"]), row["source"]) for row in rows)

    def starts(self, split: str) -> npt.NDArray[np.int64] | None:
        """Return the first token of each clip in a split, increasing; None for a corpus without clips."""
        self._info(split)
        if not self.clips:
            return None
        return np.array([clip.start for clip in self.clips if clip.split == split], np.int64)

    def words(self, split: str) -> int:
        """Return the words of a split's text, which word-level perplexity is normalised by."""
        return self._info(split).words

    def bytes(self, split: str) -> int:
        """Return the bytes of a split's text, which bits per byte are normalised by."""
        return self._info(split).bytes

    def verify(self) -> None:
        """Compare every file with its checksum; raise ValueError if one differs."""
        expected = {self._path(split): self.manifest.splits[split].sha256 for split in SPLITS}
        expected[self.folder / tokenizers.FILE] = self.manifest.tokenizer_sha256
        if self.manifest.clips_sha256:
            expected[self.folder / CLIPS] = self.manifest.clips_sha256
        for path, checksum in expected.items():
            if (found := sha256_of(path)) != checksum:
                raise ValueError(f"{path} has SHA-256 {found}, expected {checksum}: prepare it again with --force")

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
    note: str | Callable[[], str] = "",
    settings: Mapping[str, str] | None = None,
    workers: int = 1,
    clips: Callable[[], Sequence[Clip]] | None = None,
) -> Corpus:
    """Tokenise texts into a folder in one pass, in bounded memory; on an error the folder is left unchanged.

    Chunks of a split may end anywhere. Splits are read in the order train, valid, test. Several worker processes
    tokenise in parallel and give the same result. `clips`, and `note` if it is a function, are called after all splits
    have been read. A corpus that is in `folder` is replaced. Raises ValueError if a split is empty, or if `folder`
    exists and is not a corpus.
    """
    if set(splits) != set(SPLITS):
        raise ValueError(f"splits {', '.join(splits)}: expected {', '.join(SPLITS)}")
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(folder)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    partial.mkdir()
    try:
        tokenizer.save(partial)
        infos = {
            split: _write_split(partial / f"{split}.bin", name, split, tokenizer, splits[split], workers)
            for split in SPLITS
        }
        if clips is not None:
            _write_clips(partial / CLIPS, clips())
        Manifest(
            name=name,
            tokenizer=tokenizer.kind,
            tokenizer_sha256=sha256_of(partial / tokenizers.FILE),
            vocab_size=tokenizer.vocab_size,
            dtype=tokenizer.dtype.name,
            splits=infos,
            sources=sources,
            settings=settings or {},
            note=note if isinstance(note, str) else note(),
            clips_sha256="" if clips is None else sha256_of(partial / CLIPS),
        ).save(partial)
        _replace_folder(partial, folder)
    except BaseException:  # including KeyboardInterrupt
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Corpus.open(folder)


def _how_to_prepare(folder: Path) -> str:
    """Return the command that prepares a corpus of this name, and which corpora are there."""
    from compressive.data.sources import PUBLISHED  # circular: these import this module
    from compressive.data.speech.clips import PUBLISHED_SPEECH

    name = folder.name
    if name in (*PUBLISHED, *PUBLISHED_SPEECH):
        command = f"compressive data prepare {name}"
    elif name.startswith("pg19"):
        command = f"compressive data prepare pg19 --source BUILT --name {name}"
    elif name == "speech":
        command = "compressive data prepare speech FOLDER"
    else:
        command = f"compressive data prepare text FOLDER --name {name} (for audio: speech FOLDER)"
    present = sorted(path.parent.name for path in folder.parent.glob(f"[!.]*/{MANIFEST}"))
    held = f"{folder.parent} has {', '.join(present) or 'no corpora'}"
    return f"run: {command}; {held}; another folder: --data-dir, in train --data.data-dir"


def refuse_foreign(folder: Path) -> None:
    """Raise ValueError if `folder` holds anything but a corpus, so that user files are never replaced."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if names and MANIFEST not in names:
        raise ValueError(f"{folder} exists and is not a prepared corpus: choose another --name or --data-dir")
    own = {MANIFEST, CLIPS, tokenizers.FILE, *(f"{split}.bin" for split in SPLITS)}
    if foreign := sorted(name for name in names - own if not name.startswith(".")):
        raise ValueError(
            f"{folder} holds {foreign[0]}, which is no file of a corpus: move it, or choose another --name"
        )


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
        raise ValueError(
            f"the {split} split of {name} is empty: give more text (it is cut at line ends), other shares with "
            "--split, or a folder with train/, valid/ and test/"
        )
    return SplitInfo(count, text.bytes, 0 if tokenizer.is_audio else text.words, checksum.hexdigest())


def _write_clips(path: Path, clips: Sequence[Clip]) -> None:
    file = StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(field.name for field in dataclasses.fields(Clip))
    rows.writerows(dataclasses.astuple(clip) for clip in clips)
    _write_synced(path, file.getvalue().encode())


def _replace_folder(partial: Path, folder: Path) -> None:
    """Rename a complete folder into place; an older one is renamed away first and deleted after."""
    if not folder.exists():
        partial.rename(folder)
        return
    old = partial.with_suffix(".old")
    folder.rename(old)
    try:
        partial.rename(folder)
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
    """Counts the bytes and words of a text read in chunks."""

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
    """A text (n,) cut into `batch` contiguous streams of equal length, one per batch row.

    `first` and `count` select a range of the streams, for processes that share a batch. Tokens after the last stream
    are dropped. Windows are views, without copies. `clips` holds the first token of each clip, see `starts`. Raises
    ValueError if the range is invalid or the streams are shorter than 2 tokens.
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
        """Inputs per stream: all tokens but the last, which has no target."""
        self._streams: npt.NDArray[np.unsignedinteger[Any]] = tokens[: batch * size].reshape(batch, size)[
            first : first + count
        ]
        self._size, self._clips = size, clips

    def window(self, start: int, size: int) -> tuple[Tokens, Tokens]:
        """Return inputs and targets from `start` on, (count, size) each, shorter only at the end of the streams.

        Raises ValueError if `start` is outside the streams.
        """
        if not 0 <= start < self.length or size < 1:
            raise ValueError(
                f"start={start}, size={size}: expected a start from 0 to {self.length - 1} and a size of at least 1"
            )
        end = min(start + size, self.length)
        return self._streams[:, start:end], self._streams[:, start + 1 : end + 1]

    def starts(self, start: int, size: int) -> npt.NDArray[np.bool_] | None:
        """Return which inputs of `window(start, size)` begin a clip, bool of the same shape; None without clips.

        The first token of a stream always counts as a start: when training wraps around, memory holds the end of
        the stream, which is another clip.
        """
        if self._clips is None:
            return None
        shape = self.window(start, size)[0].shape
        return np.stack([starts_within(self._clips, stream * self._size, start, shape[1]) for stream in self._range()])

    def _range(self) -> range:
        return range(self.first, self.first + self.count)


def starts_within(clips: npt.NDArray[np.int64], edge: int, start: int, size: int) -> npt.NDArray[np.bool_]:
    """Return which of the tokens `start` to `start + size` of a stream begin a clip, bool (size,).

    `clips` (k,) holds the first token of each clip, and `edge` the first token of the stream, both as positions in the
    text. The first token of the stream always counts as a start.
    """
    first, last = np.searchsorted(clips, [edge + start, edge + start + size])
    marks = np.zeros(size, bool)
    marks[clips[first:last] - (edge + start)] = True
    marks[:1] |= start == 0
    return marks
