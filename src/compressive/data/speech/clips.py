"""Sources of clips: folders and archives of audio files, and published corpora with their own splits.

Archives are read as streams, member by member, and never extracted to disk.
"""

import csv
import hashlib
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from compressive.console import bytes_read
from compressive.data.corpus import SPLITS
from compressive.data.download import sha256_of
from compressive.data.sources import members
from compressive.data.speech.audio import EXTENSIONS, UnusableError

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
CUTS = "manifest.csv"
"""Lists start and end of every clip, in a folder with one file each for train, valid and test."""
EMBEDDED = Path(__file__).parent / "callie"
"""A few seconds of speech shipped with the package, with their licence."""
IN_MEMORY = 1 << 26  # larger archive members are buffered in a temporary file


@dataclass(frozen=True)
class Found:
    """A clip before it is read."""

    name: str
    split: str | None
    """None if it is split by the shares of its source."""
    open: Callable[[], IO[bytes]]
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Source:
    """The clips of one source."""

    sums: Mapping[str, str]
    """Source files, with the SHA-256 of each."""
    clips: Callable[[], Iterator[Found]]
    """Returns a new pass over the clips, in order; each must be read before the next is requested."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Number of files that are not audio, by extension."""
    note: str = ""
    """What to know before comparing results on them."""
    shares: tuple[float, float, float] = (0.9, 0.05, 0.05)
    """Shares of train, valid and test among the usable clips whose split is None."""


@dataclass(frozen=True)
class PublishedSpeech:
    """A published speech corpus: addresses, checksums and splits."""

    title: str
    urls: Mapping[str, str]
    """Addresses of its archives, with the SHA-256 of each."""
    split: Callable[[PurePosixPath], str | None]
    """Returns the split of a clip by its path; None for files that are not part of the corpus."""


def _ljspeech(path: PurePosixPath) -> str | None:
    """Split by chapter, so that adjacent sentences share a split: LJ049 is valid, LJ050 is test."""
    chapter = re.match(r"LJ(\d{3})-\d{4}", path.stem)
    return None if chapter is None else {"049": "valid", "050": "test"}.get(chapter[1], "train")


def _libritts(path: PurePosixPath) -> str | None:
    """Split by the official folders; no speaker is in two splits."""
    folders = {"train-clean-100": "train", "dev-clean": "valid", "test-clean": "test"}
    return next((folders[part] for part in path.parts if part in folders), None)


_OPENSLR = "http://www.openslr.org/resources/60"
PUBLISHED_SPEECH = {
    "ljspeech": PublishedSpeech(
        title="LJSpeech 1.1",
        urls={
            "https://data.keithito.com/data/speech/LJSpeech-1.1.tar.bz2": (
                "be1a30453f28eb8dd26af4101ae40cbf2c50413b1bb21936cbcdc6fae3de8aa5"
            )
        },
        split=_ljspeech,
    ),
    # The checksums are torchaudio's for these addresses.
    "libritts": PublishedSpeech(
        title="LibriTTS, train-clean-100, dev-clean and test-clean",
        urls={
            f"{_OPENSLR}/train-clean-100.tar.gz": "c5608bf1ef74bb621935382b8399c5cdd51cd3ee47cec51f00f885a64c6c7f6b",
            f"{_OPENSLR}/dev-clean.tar.gz": "da0864e1bd26debed35da8a869dd5c04dfc27682921936de7cff9c8a254dbe1a",
            f"{_OPENSLR}/test-clean.tar.gz": "234ea5b25859102a87024a4b9b86641f5b5aaaf1197335c95090cde04fe9a4f5",
        },
        split=_libritts,
    ),
}


def find_published(name: str, paths: Sequence[Path]) -> Source:
    """Return the clips of a published corpus, from its archives or from a folder of archives or extracted files."""
    return _source(paths, lambda names: PUBLISHED_SPEECH[name].split)


def find_clips(path: Path, shares: tuple[float, float, float]) -> Source:
    """Return the clips of a user's folder or archive; no clip is in two splits.

    A folder with manifest.csv (split, start, end) and one file each for train, valid and test is cut accordingly. A
    folder with subfolders train, valid and test keeps these splits. Otherwise the split of a clip is None: `by_shares`
    assigns it when it is known which clips can be read.
    """
    if path.is_dir() and (rows := _cuts(path)):
        return _cut_files(path, rows)

    def split(names: Sequence[str]) -> Callable[[PurePosixPath], str | None] | None:
        firsts = {part for name in names for part in PurePosixPath(name).parts[:-1] if part in SPLITS}
        if firsts == set(SPLITS):
            return lambda name: next((part for part in name.parts if part in SPLITS), None)
        by_shares(names, shares)  # raises if there are too few, even if all can be read
        return None

    return _source([path], split, shares)


def by_shares(names: Sequence[str], shares: tuple[float, float, float]) -> dict[str, str]:
    """Return the split of each clip: shuffled by a hash of their names, always the same order, then cut by shares.

    Every split gets at least one clip. Raises ValueError if there are too few.
    """
    if len(names) < len(SPLITS):
        raise ValueError(
            f"{len(names)} clips to split: expected at least 3, one for each of train, valid and test; cut long "
            "recordings into clips, or give a folder with train/, valid/ and test/"
        )
    shuffled = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    valid, test = (max(1, round(len(names) * share)) for share in shares[1:])
    train = len(names) - valid - test
    if train < 1:
        raise ValueError(f"split={shares}: leaves none of {len(names)} clips for training; give train a larger share")
    splits = ["train"] * train + ["valid"] * valid + ["test"] * test
    return dict(zip(shuffled, splits, strict=True))


def _source(
    paths: Sequence[Path],
    choose: Callable[[Sequence[str]], Callable[[PurePosixPath], str | None] | None],
    shares: tuple[float, float, float] = Source.shares,
) -> Source:
    """Return all audio files of folders and archives.

    `choose` maps their names to a function that gives the split of each, None for files that are left out; or to None
    if all are split by shares.
    """
    files: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: expected a folder or an archive of audio files")
        inside = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        files |= {file.relative_to(path).as_posix() if path.is_dir() else file.name: file for file in inside}

    others: dict[str, int] = {}
    names: list[str] = []
    for name in _names(files):
        if name.lower().endswith(EXTENSIONS):
            names.append(name)
        else:
            kind = PurePosixPath(name).suffix or PurePosixPath(name).name
            others[kind] = others.get(kind, 0) + 1
    if not names:
        found = ", ".join(sorted(others)) or "nothing"
        raise ValueError(f"{paths[0]} has no audio: expected files in {', '.join(EXTENSIONS)}, found {found}")
    split = choose(names)

    def clips() -> Iterator[Found]:
        for name, open_it in _open_all(files):
            part = None if split is None else split(PurePosixPath(name))
            if name.lower().endswith(EXTENSIONS) and (split is None or part is not None):
                yield Found(name, part, open_it)

    used = {name: file for name, file in files.items() if name.lower().endswith((*EXTENSIONS, *ARCHIVES))}
    return Source({name: sha256_of(file) for name, file in used.items()}, clips, others, shares=shares)


def _cuts(folder: Path) -> list[dict[str, str]]:
    """Return the rows of manifest.csv; none if it is missing or has other columns."""
    if not (folder / CUTS).is_file():
        return []
    with (folder / CUTS).open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.DictReader(file)
        return list(rows) if {"split", "start", "end"} <= set(rows.fieldnames or ()) else []


def _cut_files(folder: Path, rows: Sequence[Mapping[str, str]]) -> Source:
    """Return the clips of files that hold many clips each, cut by the rows of manifest.csv."""
    files: dict[str, Path] = {}
    for split in SPLITS:
        found = [folder / f"{split}{kind}" for kind in EXTENSIONS if (folder / f"{split}{kind}").is_file()]
        if not found:
            raise FileNotFoundError(f"{folder} has no {split}.flac or {split}.wav, whose clips {CUTS} lists")
        files[split] = found[0]

    def clips() -> Iterator[Found]:
        for number, row in enumerate(rows, start=2):
            if row["split"] not in files:
                raise ValueError(f"{folder / CUTS} line {number}: split {row['split']!r}, expected {', '.join(SPLITS)}")
            file = files[row["split"]]
            if not (row["start"].isdecimal() and row["end"].isdecimal()):
                raise ValueError(f"{folder / CUTS} line {number}: {row['start']!r} to {row['end']!r}, expected samples")
            name = row.get("source_path") or f"{file.name} from {row['start']}"
            yield Found(name, row["split"], partial(_open, file), int(row["start"]), int(row["end"]))

    sums = {file.name: sha256_of(file) for file in (*files.values(), folder / CUTS)}
    note = "A few seconds of speech for trying things out: results on them mean nothing." if folder == EMBEDDED else ""
    return Source(sums, clips, note=note)


def _names(files: Mapping[str, Path]) -> Iterator[str]:
    """Yield the names of all files; members of an archive are named archive/member."""
    for name, path in files.items():
        if path.name.lower().endswith(".zip"):
            yield from (f"{name}/{member}" for member in members(path))
        elif path.name.lower().endswith(ARCHIVES):
            with _tar(path) as archive, bytes_read(f"listing {path.name}") as advance:
                for member in archive:
                    advance(member.size)
                    if member.isfile():
                        yield f"{name}/{_safe(path, member.name)}"
        else:
            yield name


def _open_all(files: Mapping[str, Path]) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    """Yield names and functions that open each file; a member must be opened before the next is requested."""
    for name, path in files.items():
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for member in members(path):
                    yield f"{name}/{member}", partial(_copy, archive, member)
        elif path.name.lower().endswith(ARCHIVES):
            with _tar(path) as packed:
                for entry in packed:
                    if entry.isfile():
                        yield f"{name}/{entry.name}", partial(_copy, packed, entry)
        else:
            yield name, partial(_open, path)


@contextmanager
def _tar(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path) as archive:
            yield archive
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged or not an archive ({error}): download it again") from error


def _safe(path: Path, name: str) -> str:
    """Return the name of a member; raise ValueError if it leaves its folder."""
    if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name):
        raise ValueError(f"{path} has a member {name!r} outside its folder: refused; get the archive elsewhere")
    return name


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _copy(archive: zipfile.ZipFile | tarfile.TarFile, member: Any) -> IO[bytes]:
    """Return a seekable copy of a member, which soundfile needs."""
    copy = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115  # closed by the reader
    try:
        packed = archive.open(member) if isinstance(archive, zipfile.ZipFile) else archive.extractfile(member)
        with cast(IO[bytes], packed) as stream:
            shutil.copyfileobj(stream, copy)
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # zipfile raises RuntimeError if encrypted
        copy.close()
        raise UnusableError(f"cannot be decompressed ({error})") from error
    copy.seek(0)
    return cast(IO[bytes], copy)
