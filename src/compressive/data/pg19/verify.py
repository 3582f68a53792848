"""Compare built books with the official ones by size and SHA-256."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressive.console import bytes_read
from compressive.data.download import sha256_of
from compressive.data.pg19.catalogue import SPLITS, Book, require_built

SHOWN = 10  # differing books listed in the text; the report has all


@dataclass(frozen=True)
class Report:
    """Result of a comparison; books are given by id."""

    built: int
    """Number of built books."""
    matched: Sequence[int]
    """Books that match the official text."""
    different: Mapping[int, int]
    """Books that differ: size minus the official size."""
    wrong_split: Mapping[int, str]
    """Books in another split than the official one: the split they are in."""
    unknown: Sequence[int]
    """Built books that are not in the list."""
    missing: Mapping[str, Sequence[int]]
    """Books in the list that are not built, by split."""

    @property
    def good(self) -> bool:
        """Whether every built book matches and is in the right split."""
        return not (self.different or self.wrong_split or self.unknown)

    def __str__(self) -> str:
        """Return the report as text."""
        lines = [f"{len(self.matched):,} of {self.built:,} built books match ({len(self.matched) / self.built:.1%})"]
        if self.different:
            shown = [f"{book_id} by {size:+,}" for book_id, size in list(self.different.items())[:SHOWN]]
            more = ["..."] if len(self.different) > SHOWN else []
            lines.append(f"  different {len(self.different):,}, size minus the official: {', '.join(shown + more)}")
        for what, ids in (("in the wrong split", list(self.wrong_split)), ("not in the list", self.unknown)):
            if ids:
                lines.append(f"  {what} {len(ids):,}, the first is {ids[0]}")
        if any(self.missing.values()):
            counts = ", ".join(f"{len(ids):,} {split}" for split, ids in self.missing.items())
            lines.append(f"  missing {counts}")
        return "\n".join(lines)


def verify(folder: Path, books: Mapping[int, Book]) -> Report:
    """Compare every `SPLIT/ID.txt` in a folder with the list; raise FileNotFoundError if there are no books."""
    require_built(folder)
    built = _built(folder)
    if not built:
        raise FileNotFoundError(
            f"{folder} has no books: expected train/ID.txt, validation/ or test/; make them with "
            f"compressive data pg19 build --source TEXTS --out {folder}"
        )
    matched, different, wrong_split, unknown = [], {}, {}, []
    with bytes_read("comparing", sum(path.stat().st_size for _, _, path in built)) as advance:
        for book_id, split, path in built:
            book, size = books.get(book_id), path.stat().st_size
            advance(size)
            if book is None:
                unknown.append(book_id)
                continue
            if split != book.split:
                wrong_split[book_id] = split
            if size != book.bytes or sha256_of(path) != book.sha256:
                different[book_id] = size - book.bytes
            else:
                matched.append(book_id)
    built_ids = {book_id for book_id, _, _ in built}
    missing = {
        split: sorted(book.id for book in books.values() if book.split == split and book.id not in built_ids)
        for split in SPLITS
    }
    return Report(len(built), matched, different, wrong_split, unknown, missing)


def _built(folder: Path) -> list[tuple[int, str, Path]]:
    """Return id, split and path of every book in the folder, sorted by id."""
    paths = [(split, path) for split in SPLITS for path in (folder / split).glob("*.txt")]
    return sorted((int(path.stem), split, path) for split, path in paths if path.stem.isdecimal())
