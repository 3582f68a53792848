"""Raw texts of Project Gutenberg in folders, mirrors and archives.

A book's id is in its file name: `1234.txt`, `1234-8.txt` (Latin-1), `1234-0.txt` (UTF-8) or `pg1234.txt`. The folder
does not matter: it may be flat, or the mirrors' `1/2/3/1234/1234.txt`. The same names with `.zip` hold one book each.
Other .zip and .tar files hold many books, with members named in the same way. Archives are read as streams and never
extracted to disk.

If a book is found more than once, these rules choose, in this order:

1. a non-empty file before an empty one
2. the source given first
3. a file outside folders named `old`, where mirrors keep superseded versions
4. `1234.txt`, then `1234-8.txt`, `1234-0.txt`, `pg1234.txt`. PG-19 used the plain one: books full of French names, such
   as 10861 and 10939, match its SHA-256 without any accents
5. a plain file, then one in a .zip, then one in a .tar
6. alphabetical order of the name
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
_OTHER_FORMAT = re.compile(r"\d+-(?![08]\.)[\w-]+\.zip", re.IGNORECASE)  # 1234-h.zip is HTML, 1234-pdf.zip is PDF

DAMAGED = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error)
"""Exceptions of reading a damaged file; zipfile raises RuntimeError for encrypted members."""


@dataclass(frozen=True)
class Raw:
    """Location of a raw text."""

    id: int
    name: str
    """For the log: the name of the source, then the path inside it."""
    path: Path
    """The file on disk."""
    member: str | None
    """Name of the member, if the file is an archive."""
    size: int
    """Bytes on disk."""
    order: tuple[bool, int, bool, int, int, str]
    """Sort key among the texts of a book; the smallest is chosen."""


@dataclass(frozen=True)
class File:
    """A file of a source."""

    path: Path
    name: str
    """For the log."""
    source: int
    """Index of its source."""


@dataclass(frozen=True)
class Found:
    """All texts found in the sources."""

    books: dict[int, list[Raw]] = field(default_factory=dict)
    """Texts by book id; those in .tar files are added while these are read."""
    tars: list[File] = field(default_factory=list)
    """The .tar files, whose members are known only when read."""
    damaged: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    """Unreadable files by name: the id, if the name has one, and the reason."""
    unnamed: list[str] = field(default_factory=list)
    """Texts without an id in their name."""

    def ranked(self, book_id: int) -> list[Raw]:
        """Return the texts of a book, the preferred one first."""
        return sorted(self.books[book_id], key=lambda raw: raw.order)


def find_books(sources: Sequence[Path]) -> Found:
    """List all texts, except those in .tar files; raise FileNotFoundError if a source is missing."""
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
    """Return the bytes of a text that is not in a .tar; raises one of `DAMAGED` if it cannot be read."""
    if raw.member is None:
        return raw.path.read_bytes()
    with zipfile.ZipFile(raw.path) as archive:
        return archive.read(raw.member)


def stream(found: Found, advance: Callable[[int], None]) -> Iterator[tuple[Raw, bytes]]:
    """Read every .tar once, add its texts to `found`, and yield those that are preferred over all found so far.

    A book may be yielded twice; the second text then replaces the first. `advance` is called with the bytes read.
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
    """Return an error as one line, without the path, which the log has already."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or type(error).__name__


def _unpacked(file: IO[bytes], path: Path) -> IO[bytes]:
    """Return the decompressed stream of a file; unlike tarfile's own decompression, it raises on truncated input."""
    for ending, opener in (("xz", lzma.open), ("gz", gzip.open), ("bz2", bz2.open)):
        if path.name.lower().endswith(ending):
            return cast(IO[bytes], opener(file))
    return file


def _files(source: Path, index: int, found: Found) -> Iterator[File]:
    """Yield all files of a source, in alphabetical order."""
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
    """Add the texts of a file to `found`; a .tar file is only noted."""
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
    """Return the location of a text, or None, noted in `found.unnamed`, if `named` has no id."""
    inside = file.name if member is None else f"{file.name}/{member}"
    match = _NAME.fullmatch(named)
    if match is None:
        found.unnamed.append(inside)
        return None
    kind = _KINDS.index("pg" if match["pg"] else match["kind"] or "")
    packing = 0 if member is None else 2 if _TAR.search(file.path.name) else 1
    order = (empty, file.source, "old" in PurePosixPath(inside).parts, kind, packing, inside)
    return Raw(int(match["id"]), inside, file.path, member, size, order)
