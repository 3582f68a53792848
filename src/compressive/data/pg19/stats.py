"""The paper's two PG-19 tables for built books: its splits, and a comparison with other corpora."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressive.console import bytes_read
from compressive.data.pg19.catalogue import SPLITS, official, require_built
from compressive.data.pg19.words import OFFICIAL, Size, count_words

if TYPE_CHECKING:
    from rich.table import Table

CORPORA = (
    ("1B Word", "27", "4.15 GB", "793K", "News (sentences)"),
    ("Penn Treebank", "355", "5.1 MB", "10K", "News (articles)"),
    ("WikiText-103", "3.6K", "515 MB", "267K", "Wikipedia (articles)"),
    ("PG-19", "69K", "10.9 GB", "(open)", "Books"),
)
"""The paper's comparison: average length in words, size of the train split, vocabulary, type."""


@dataclass(frozen=True)
class Split:
    """One split, as built and as published."""

    built: Size
    published: Size
    present: int
    """Number of published books among those built."""

    @property
    def complete(self) -> bool:
        """Whether the built books are exactly the published ones."""
        return self.built.books == self.present == self.published.books

    @property
    def mark(self) -> str:
        """Whether results on this split are comparable with published ones, in words."""
        if self.complete:
            return "complete"
        others = self.built.books - self.present
        added = f" and {others:,} not of this split" if others else ""
        return f"{self.present:,} of {self.published.books:,} books{added}: not comparable with published results"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        sizes = {"built": self.built, "published": self.published}
        with_averages = {name: size._asdict() | {"words_per_book": _average(size)} for name, size in sizes.items()}
        return with_averages | {"present": self.present, "complete": self.complete}


def books(built: Path, split: str) -> list[Path]:
    """Return the texts of a split, sorted by id; raise FileNotFoundError if the folder is missing."""
    require_built(built)
    return sorted((path for path in (built / split).glob("*.txt") if path.stem.isdecimal()), key=lambda p: int(p.stem))


def measure(built: Path) -> dict[str, Split]:
    """Count books, words and bytes of every split; raise ValueError if there are no books."""
    paths = {split: books(built, split) for split in SPLITS}
    if not any(paths.values()):
        raise ValueError(
            f"{built} holds no books: expected {', '.join(f'{split}/ID.txt' for split in SPLITS)}; "
            "run: compressive data pg19 build --source TEXTS --out BUILT"
        )
    ids = {split: {book.id for book in official().values() if book.split == split} for split in SPLITS}
    found = {}
    with bytes_read("counting words", sum(path.stat().st_size for split in SPLITS for path in paths[split])) as advance:
        for split in SPLITS:
            words = size = 0
            for path in paths[split]:
                text = path.read_bytes()
                words, size = words + count_words(text), size + len(text)
                advance(len(text))
            present = len(ids[split].intersection(int(path.stem) for path in paths[split]))
            found[split] = Split(Size(len(paths[split]), words, size), OFFICIAL[split], present)
    return found


def tables(splits: dict[str, Split]) -> Iterator["Table"]:
    """Yield both tables, for a terminal."""
    from rich.table import Table

    table = Table("", "", title="PG-19: what is built, and what was published", title_justify="left")
    for heading in ("books", "words", "average", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, split in splits.items():
        for label, size in (("built", split.built), ("published", split.published)):
            numbers = (size.books, size.words, _average(size), size.bytes)
            table.add_row(name if label == "built" else "", label, *(f"{number:,.0f}" for number in numbers))
        shares = [f"{part / whole:.1%}" for part, whole in zip(split.built, split.published, strict=True)]
        table.add_row("", "share", *shares[:2], "", shares[2], end_section=True)
    rule = "words: what white space separates, by estimate 0 to 2 % above the paper's"
    table.caption = "\n".join([*(f"{name}: {split.mark}" for name, split in splits.items()), rule])
    table.caption_justify = "left"
    yield table

    table = Table("", title="Comparison with other corpora", title_justify="left")
    for heading in ("avg. words", "train size", "vocab", "type"):
        table.add_column(heading, justify="right" if heading != "type" else "left")
    for row in CORPORA:
        table.add_row(*row, end_section=row == CORPORA[-2])
    train = splits["train"]
    note = "" if train.complete else ", partial"
    table.add_row("this folder", _thousands(_average(train.built)), _bytes(train.built.bytes), "(open)", f"Books{note}")
    yield table


def _average(size: Size) -> float:
    return size.words / size.books if size.books else 0.0


def _thousands(value: float) -> str:
    """Format as in the paper: 27, 3.6K, 69K."""
    return f"{value:.0f}" if value < 1000 else f"{value / 1000:.{1 if value < 10_000 else 0}f}K"


def _bytes(size: int) -> str:
    """Format as in the paper: its 10.9 GB of PG-19 are 11,677,531,154 bytes, so a GB is 2^30 bytes."""
    return f"{size / 2**30:.3g} GB" if size >= 2**30 else f"{size / 2**20:.3g} MB"
