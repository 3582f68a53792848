"""Lists of PG-19's books: the official one, shipped with this package, or a user's file."""

import csv
import io
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from compressive.data.sources import read_blocks

SPLITS = ("train", "validation", "test")
OFFICIAL = "official"
_HEADER = ("split", "book_id", "short_title", "publication_date", "pg19_bytes", "pg19_sha256")


@dataclass(frozen=True)
class Book:
    """A book's entry in a list."""

    id: int
    title: str
    year: int | None
    split: str
    bytes: int
    """Size of the official text."""
    sha256: str
    """SHA-256 of the official text; empty if the book is not in the official list."""


@cache
def official() -> dict[int, Book]:
    """Return the 28,752 books of PG-19 by id, with size and SHA-256 of their official texts."""
    packed = files(__package__).joinpath("official.csv.xz").read_bytes()
    return {book.id: book for book in _parse(lzma.decompress(packed).decode("utf-8"), "official.csv.xz")}


def read_catalogue(source: str) -> dict[int, Book]:
    """Return books by id, from the word "official" or from a file, plain, .xz or .gz.

    The file is the release's `metadata.csv` (id, title, year, address), or has the columns of `official.csv.xz`, named
    in its first line. `metadata.csv` has no splits: official ones are used, and train for other books. Raises
    FileNotFoundError or ValueError if the file cannot be used.
    """
    if source == OFFICIAL:
        return official()
    path = Path(source)
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {found}: expected PG-19's metadata.csv, or the word {OFFICIAL}")
    try:
        text = b"".join(read_blocks(path)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): expected PG-19's metadata.csv") from error
    books = {book.id: book for book in _parse(text, path.name)}
    if not books:
        raise ValueError(f"{path} is empty: expected PG-19's metadata.csv")
    return books


def require_built(folder: Path) -> None:
    """Raise FileNotFoundError if this is no folder, so cannot hold built books."""
    if not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {found}: expected one with {', '.join(SPLITS)}; run: compressive data pg19 build --source TEXTS "
            "--out BUILT"
        )


def _parse(text: str, name: str) -> Iterator[Book]:
    rows = csv.reader(io.StringIO(text, newline=""))
    columns: dict[str, int] = {}
    for row in rows:
        if rows.line_num == 1 and "book_id" in row:
            columns = {column: i for i, column in enumerate(row)}
            if missing := [column for column in _HEADER if column not in columns]:
                raise ValueError(f"{name} has no column {', '.join(missing)}: expected {', '.join(_HEADER)}")
        elif row:
            try:
                yield _listed(*(row[columns[column]] for column in _HEADER)) if columns else _released(row)
            except (ValueError, TypeError, IndexError) as error:
                raise ValueError(
                    f"{name}, line {rows.line_num}: cannot read {','.join(row)!r} ({error}); expected id,title,year,"
                    f"address, or a first line that names the columns {','.join(_HEADER)}"
                ) from error


def _listed(split: str, book_id: str, title: str, year: str, size: str, sha256: str) -> Book:
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}")
    return Book(int(book_id), title, int(year) if year else None, split, int(size), sha256)


def _released(row: list[str]) -> Book:
    if len(row) < 3:
        raise ValueError("too few columns")
    book_id, title, year = row[:3]
    known = official().get(int(book_id))
    split, size, sha256 = (known.split, known.bytes, known.sha256) if known else ("train", 0, "")
    return Book(int(book_id), title, int(year) if year else None, split, size, sha256)
