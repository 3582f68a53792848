"""Raw texts of Project Gutenberg, wherever they lie: folders, mirrors, archives.

A book's id is in the name of its file: `1234.txt`, `1234-8.txt` (Latin-1), `1234-0.txt` (UTF-8), `pg1234.txt`, in any
folder, so a flat one will do as well as the mirrors' `1/2/3/1234/1234.txt`. The same names with `.zip` hold one book
each; other .zip and .tar files hold many, each member named like that. Archives are read as streams: nothing is
unpacked.

Where a book is there more than once, this decides, the first thing first:

1. a file with something in it before an empty one
2. the source that was given first
3. a file that is not in a folder `old`, where mirrors keep what was corrected later
4. `1234.txt`, then `1234-8.txt`, `1234-0.txt`, `pg1234.txt`: PG-19 has the plain one, for books full of French names,
   10861 and 10939 among them, match its SHA-256 without a single accent
5. a plain file, then one in a .zip, then one in a .tar
6. the name, in alphabetical order
"""

import bz2
import gzip
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, cast

_NAME = re.compile(r"(?P<pg>pg)?(?P<id>\d{1,9})(?P<kind>-[08])?\.(?:txt(?:\.utf-?8)?|zip)", re.IGNORECASE)
_KINDS = ("", "-8", "-0", "pg")
_TEXT = re.compile(r"\.txt(?:\.utf-?8)?$", re.IGNORECASE)
_TAR = re.compile(r"\.(?:tar(?:\.(?:xz|gz|bz2))?|txz|tgz|tbz2)$", re.IGNORECASE)
_OTHER_FORMAT = re.compile(r"\d+-(?![08]\.)[\w-]+\.zip", re.IGNORECASE)  # 1234-h.zip is HTML, -pdf.zip a PDF

DAMAGED = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error)
"""What reading a file may raise; RuntimeError is how zipfile says that a member is encrypted."""


@dataclass(frozen=True)
class Raw:
    """Where a raw text is."""

    id: int
    name: str
    """For the log: the source's own name, then the path inside it."""
    path: Path
    """The file on disk."""
    member: str | None
    """The name inside it, if it is an archive."""
    size: int
    """Bytes that it takes on disk."""
    order: tuple[bool, int, bool, int, int, str]
    """Of several texts of a book, the one with the least is taken."""


@dataclass(frozen=True)
class File:
    """A file of a source."""

    path: Path
    name: str
    """For the log."""
    source: int
    """Which of the sources it is from."""


@dataclass(frozen=True)
class Found:
    """What there is in the sources."""

    books: dict[int, list[Raw]] = field(default_factory=dict)
    """The texts of every book; those in a .tar join them as they come by."""
    tars: list[File] = field(default_factory=list)
    """Archives whose texts are not known before they are read."""
    damaged: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    """Files that could not be looked into, by name: the id, if the name has one, and why."""
    unnamed: list[str] = field(default_factory=list)
    """Texts that have no id in their name."""

    def ranked(self, book_id: int) -> list[Raw]:
        """The texts of a book, the one to take first."""
        return sorted(self.books[book_id], key=lambda raw: raw.order)


def find_books(sources: Sequence[Path]) -> Found:
    """List all texts but those in a .tar."""
    found = Found()
    for index, source in enumerate(sources):
        if not source.exists():
            raise FileNotFoundError(f"{source} does not exist: expected a folder with raw texts, a .zip or a .tar")
        for file in _files(source, index, found):
            try:
                _list(file, found)
            except DAMAGED as error:
                named = _NAME.fullmatch(file.path.name)
                found.damaged[file.name] = (int(named["id"]) if named else None, why(error))
    return found


def read(raw: Raw) -> bytes:
    """The bytes of a text that is not in a .tar; any of `DAMAGED` may be raised."""
    if raw.member is None:
        return raw.path.read_bytes()
    with zipfile.ZipFile(raw.path) as archive:
        return archive.read(raw.member)


def stream(found: Found, advance: Callable[[int], None]) -> Iterator[tuple[Raw, bytes]]:
    """Read every .tar once, and add its texts to the others; those that none so far is better than are handed out.

    So a book may come twice, and then the second is the better one. `advance` is told the bytes read from disk.
    """
    for tar in found.tars:
        try:
            with (
                tar.path.open("rb") as file,
                _unpacked(file, tar.path) as plain,
                tarfile.open(fileobj=plain, mode="r|") as archive,
            ):
                at = 0
                for entry in archive:
                    at, before = file.tell(), at
                    advance(at - before)
                    if not (entry.isfile() and _TEXT.search(entry.name)):
                        continue
                    raw = _raw(tar, entry.name, PurePosixPath(entry.name).name, entry.size, entry.size == 0, found)
                    content = archive.extractfile(entry)
                    if raw is None or content is None:
                        continue
                    try:
                        data = content.read()
                    except DAMAGED as error:
                        found.damaged[raw.name] = (raw.id, why(error))
                        raise
                    found.books.setdefault(raw.id, []).append(raw)
                    if raw is found.ranked(raw.id)[0]:
                        yield raw, data
        except DAMAGED as error:
            found.damaged[tar.name] = (None, why(error))


def why(error: BaseException) -> str:
    """An error in one line, without the path, which the log gives as a name."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or type(error).__name__


def _unpacked(file: IO[bytes], path: Path) -> IO[bytes]:
    """What is in a compressed file; where it is cut off this raises, and tarfile's own way would take it for whole."""
    for ending, opener in (("xz", lzma.open), ("gz", gzip.open), ("bz2", bz2.open)):
        if path.name.lower().endswith(ending):
            return cast(IO[bytes], opener(file))
    return file


def _files(source: Path, index: int, found: Found) -> Iterator[File]:
    """All files of a source, in alphabetical order."""
    root = source.resolve().name
    if source.is_file():
        yield File(source, root, index)
        return

    def unreadable(error: OSError) -> None:
        found.damaged[f"{root}/{Path(error.filename).relative_to(source).as_posix()}"] = (None, why(error))

    for folder, folders, names in os.walk(source, onerror=unreadable):
        folders.sort()
        for path in (Path(folder, name) for name in sorted(names)):
            yield File(path, f"{root}/{path.relative_to(source).as_posix()}", index)


def _list(file: File, found: Found) -> None:
    """Add the texts of a file to those found, or put it among the .tar files."""
    path, raws = file.path, []
    if _TAR.search(path.name):
        found.tars.append(file)
    elif _TEXT.search(path.name):
        size = path.stat().st_size
        raws = [_raw(file, None, path.name, size, size == 0, found)]
    elif path.suffix.lower() == ".zip" and not _OTHER_FORMAT.fullmatch(path.name):
        with zipfile.ZipFile(path) as archive:
            texts = [entry for entry in archive.infolist() if _TEXT.search(entry.filename)]
        for entry in texts:
            named = PurePosixPath(entry.filename).name
            if len(texts) == 1 and not _NAME.fullmatch(named):  # as in old archives: 11.zip holds alice30.txt
                named = path.name
            raws.append(_raw(file, entry.filename, named, entry.compress_size, entry.file_size == 0, found))
    for raw in raws:
        if raw is not None:
            found.books.setdefault(raw.id, []).append(raw)


def _raw(file: File, member: str | None, named: str, size: int, empty: bool, found: Found) -> Raw | None:
    """Where a text is, if `named` has an id; otherwise it is put among those without."""
    inside = file.name if member is None else f"{file.name}/{member}"
    match = _NAME.fullmatch(named)
    if match is None:
        found.unnamed.append(inside)
        return None
    kind = _KINDS.index("pg" if match["pg"] else match["kind"] or "")
    packing = 0 if member is None else 2 if _TAR.search(file.path.name) else 1
    order = (empty, file.source, "old" in PurePosixPath(inside).parts, kind, packing, inside)
    return Raw(int(match["id"]), inside, file.path, member, size, order)
