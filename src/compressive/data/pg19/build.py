"""From raw texts to PG-19: one file per book, and a log of what became of each.

    OUT/train/1234.txt, validation/..., test/...   the texts
    OUT/build.jsonl                                one line per book, by id: kept, dropped or failed, and why

A text is written aside and renamed, and the log is whole or not there: until the last book it grows as
`build.jsonl.part`. A build that was killed, run again, goes on from there: a book is left alone if its raw text, its
entry in the list and this code are those it was built with, and its file is as the log has it, by size and SHA-256.
"""

import contextlib
import dataclasses
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

from compressive.data.download import sha256_of
from compressive.data.pg19.catalogue import SPLITS, Book, read_catalogue
from compressive.data.pg19.infer import infer, split_of
from compressive.data.pg19.raw import DAMAGED, Found, Raw, find_books, read, stream, why
from compressive.data.pg19.rule import Parts, Replacement, decode
from compressive.data.progress import progress
from compressive.data.workers import cores, in_order

LOG = "build.jsonl"
ASIDE = "part"
"""Folder of texts that are being written."""
LATEST = 1918
"""The last year that PG-19 takes books from."""
SHORTEST = 10_000
"""Bytes of text that a book must have if no list asks for it; of the official texts 99.1 % have them."""


@dataclass(frozen=True)
class Entry:
    """A line of the log."""

    id: int
    split: str | None
    title: str
    year: int | None
    status: Literal["kept", "dropped", "failed"]
    reason: str
    """Why it was not kept."""
    source: str
    """The raw text: name of the source, then path inside it."""
    bytes: int | None = None
    sha256: str | None = None
    year_from: str = ""
    """The list, or what in the text the year was inferred from."""
    notes: tuple[str, ...] = ()
    """What is unusual about the raw text."""
    passed_over: tuple[str, ...] = ()
    """Other raw texts of the book, which were not taken."""
    raw_bytes: int | None = None
    raw_sha256: str | None = None
    settings: str = ""
    """Checksum of all but the raw text that the decision depends on."""

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read a line of the log."""
        values = json.loads(line)
        return cls(**values | {"notes": tuple(values["notes"]), "passed_over": tuple(values["passed_over"])})

    def format(self) -> str:
        """Write a line of the log."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Job:
    """One book to be built: all that a worker needs."""

    raw: Raw
    content: bytes | None
    """The raw text, if it is in a .tar."""
    book: Book | None
    """What the list says; without a list the text itself is asked."""
    earlier: Entry | None
    """What an earlier build made of the book."""
    aside: Path
    """Where the text is written."""
    out: Path
    """Where an earlier build would have it."""


@dataclass(frozen=True)
class Summary:
    """What a build came to."""

    out: Path
    entries: Sequence[Entry]
    reused: int
    """Books that were left alone, as an earlier build had them already."""
    removed: int
    """Books that an earlier build had made and this one does not have."""
    missing: int
    """Books of the list that have no raw text."""
    unnamed: Sequence[str]
    """Texts that have no id in their name."""
    seconds: float

    def __str__(self) -> str:
        """For people to read."""
        kept = [entry for entry in self.entries if entry.status == "kept"]
        splits = Counter(entry.split for entry in kept)
        size = sum(entry.bytes or 0 for entry in kept)
        raw_size = sum(entry.raw_bytes or 0 for entry in kept)
        lines = [
            f"{self.out}: {len(kept):,} book{'s' * (len(kept) != 1)}, {size / 1e6:,.1f} MB: "
            + ", ".join(f"{splits[split]:,} {split}" for split in SPLITS),
            *_reasons(self.entries),
        ]
        if self.missing:
            lines.append(f"  missing {self.missing:,}: in the list, but without a raw text")
        if several := sum(bool(entry.passed_over) for entry in self.entries):
            lines.append(f"  {several:,} have several raw texts: passed_over in the log names those not taken")
        if self.removed:
            lines.append(f"  removed {self.removed:,} that an earlier build had made and that are not among these")
        if self.unnamed:
            lines.append(f"  {len(self.unnamed):,} texts have no id in their name, the first is {self.unnamed[0]}")
        lines.append(
            f"  {raw_size / 1e6:,.1f} MB of raw text in {self.seconds:.1f} s; {self.reused:,} were built before"
        )
        return "\n".join([*lines, f"  what became of each: {self.out / LOG}"])


def build(sources: Sequence[Path], out: Path, metadata: str | None, workers: int) -> Summary:
    """Build every book that the sources have, and that the list names or, without a list, that the rules keep."""
    begin = time.monotonic()
    if not sources:
        raise ValueError("no source: expected a folder with raw texts, a .zip or a .tar, as --source FOLDER")
    if workers < 0:
        raise ValueError(f"workers={workers}: expected 1 or more, or 0 for one per core")
    _refuse_foreign(sources, out)
    catalogue = None if metadata is None else read_catalogue(metadata)
    found = find_books(sources)
    if not (found.books or found.tars or found.damaged):
        names = ", ".join(map(str, sources))
        raise FileNotFoundError(f"no raw text in {names}: expected files named by a book's id, as 1234.txt or 1234.zip")
    for folder in (ASIDE, *SPLITS):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for leftover in (out / ASIDE).iterdir():
        leftover.unlink()

    earlier = _earlier(out)
    entries: dict[int, Entry] = {}
    reused = 0
    on_disk = sum(found.ranked(book_id)[0].size for book_id in found.books)
    on_disk += sum(tar.path.stat().st_size for tar in found.tars)
    with (out / f"{LOG}.part").open("a", encoding="utf-8") as log, progress("building", on_disk) as advance:
        jobs = _jobs(found, catalogue, earlier, out, advance)
        count = workers or cores()
        for entry, aside in map(build_book, jobs) if count == 1 else in_order(build_book, jobs, count):
            if aside is not None:
                aside.replace(out / str(entry.split) / f"{entry.id}.txt")
            entries[entry.id] = entry
            reused += entry.status == "kept" and aside is None
            log.write(entry.format())
            log.flush()

    for name, (_, reason) in found.damaged.items():
        print(f"warning: cannot read {name}: {reason}", file=sys.stderr)
    entries |= {entry.id: entry for entry in _not_read(found, catalogue)}
    ordered = _with_rivals([entries[book_id] for book_id in sorted(entries)], found)
    missing = 0 if catalogue is None else len(catalogue.keys() - entries.keys())
    if not any(entry.status == "kept" for entry in ordered):
        reasons = "\n".join(_reasons(ordered)) or "  no file is named by a book's id, as 1234.txt or 1234.zip"
        raise ValueError(f"no book could be built of {', '.join(map(str, sources))}:\n{reasons}")
    removed = _finish(out, ordered)
    return Summary(out, ordered, reused, removed, missing, found.unnamed, time.monotonic() - begin)


def build_book(job: Job) -> tuple[Entry, Path | None]:
    """Build one book; gives the file too that waits to be renamed, or none if the book is there or is not kept."""
    raw, book = job.raw, job.book
    entry = _begin(raw.id, book, raw.name)
    try:
        content = read(raw) if job.content is None else job.content
    except DAMAGED as error:
        return dataclasses.replace(entry, reason=f"cannot be read: {why(error)}"), None
    entry = dataclasses.replace(
        entry,
        raw_bytes=len(content),
        raw_sha256=hashlib.sha256(content).hexdigest(),
        settings=hashlib.sha256(f"{_code()} {book}".encode()).hexdigest()[:16],
    )
    if not content and (book is None or book.bytes):  # the official text of book 90 is empty
        return dataclasses.replace(entry, reason="the raw text is empty"), None
    if job.earlier is not None and _is_as_built(job.earlier, entry, job.out):
        return dataclasses.replace(job.earlier, source=raw.name), None

    text, encoding = decode(content)
    parts = Parts.of(text)
    entry = dataclasses.replace(entry, notes=tuple(_notes(parts, encoding)))
    if book is None:
        told = infer(parts.header, parts.body)
        entry = dataclasses.replace(
            entry, split=split_of(raw.id), title=told.title, year=told.year, year_from=told.year_from
        )
        if reason := _not_for_pg19(told.language, told.year, parts.body):
            return dataclasses.replace(entry, status="dropped", reason=reason), None
    built = _replacement()(parts.body).encode()
    job.aside.write_bytes(built)
    sha256 = hashlib.sha256(built).hexdigest()
    return dataclasses.replace(entry, status="kept", bytes=len(built), sha256=sha256), job.aside


def read_log(path: Path) -> Iterator[Entry]:
    """The entries of a log; a line that a kill cut short is left out, and the one that went on from there."""
    with path.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                yield Entry.parse(line)


def _refuse_foreign(sources: Sequence[Path], out: Path) -> None:
    """Refuse to write where texts may be that no build has made."""
    whole = out.resolve()
    for source in sources:
        if whole.is_relative_to(source.resolve()) or any(source.resolve().is_relative_to(whole / s) for s in SPLITS):
            raise ValueError(f"out={out} and source={source} lie within each other: choose another folder for --out")
    if any((out / name).exists() for name in (LOG, f"{LOG}.part")):
        return
    for folder in (ASIDE, *SPLITS):
        if (out / folder).is_dir() and any((out / folder).iterdir()):
            raise ValueError(f"{out / folder} holds files, but {out} has no {LOG}: choose a new folder for --out")


def _earlier(out: Path) -> dict[int, Entry]:
    """What builds before this one have made, whether they came to their end or not."""
    logs = [path for path in (out / LOG, out / f"{LOG}.part") if path.exists()]
    return {entry.id: entry for path in logs for entry in read_log(path)}


def _begin(book_id: int, book: Book | None, source: str) -> Entry:
    """The entry of a book that nothing good is known of yet."""
    if book is None:
        return Entry(book_id, None, "", None, "failed", "", source)
    return Entry(book_id, book.split, book.title, book.year, "failed", "", source, year_from="list")


def _jobs(
    found: Found,
    catalogue: Mapping[int, Book] | None,
    earlier: dict[int, Entry],
    out: Path,
    advance: Callable[[int], None],
) -> Iterator[Job]:
    """What is to be built; first what is in a .tar, as only then the best text of each book is known."""

    def texts() -> Iterator[tuple[Raw, bytes | None]]:
        yield from stream(found, advance)
        tars = {tar.path for tar in found.tars}
        for book_id in sorted(found.books):
            best = found.ranked(book_id)[0]
            if best.path not in tars:
                yield best, None
                advance(best.size)

    for number, (raw, content) in enumerate(texts()):
        if catalogue is None or raw.id in catalogue:
            book = catalogue[raw.id] if catalogue else None
            # What was there before is only there for the first text of a book: that may replace it.
            yield Job(raw, content, book, earlier.pop(raw.id, None), out / ASIDE / str(number), out)


def _not_read(found: Found, catalogue: Mapping[int, Book] | None) -> Iterator[Entry]:
    """Books that were not even read: those not in the list, and those whose only file is damaged."""
    for name, (book_id, reason) in found.damaged.items():
        if book_id is not None and book_id not in found.books and (catalogue is None or book_id in catalogue):
            entry = _begin(book_id, catalogue[book_id] if catalogue else None, name)
            yield dataclasses.replace(entry, reason=f"cannot be read: {reason}")
    if catalogue is not None:
        for book_id in found.books.keys() - catalogue.keys():
            entry = _begin(book_id, None, found.ranked(book_id)[0].name)
            yield dataclasses.replace(entry, status="dropped", reason="not in the list")


def _with_rivals(entries: Iterable[Entry], found: Found) -> list[Entry]:
    """Say of every book which raw texts of it were not taken."""
    rivals = {book_id: [raw.name for raw in found.ranked(book_id)] for book_id in found.books}
    for name, (book_id, reason) in found.damaged.items():
        if book_id in rivals:
            rivals[book_id].append(f"{name} ({reason})")
    return [dataclasses.replace(entry, passed_over=tuple(rivals.get(entry.id, ())[1:])) for entry in entries]


@cache
def _replacement() -> Replacement:
    return Replacement.official()


@cache
def _code() -> str:
    """Checksum of all that makes a text what it is, so that another version of it builds anew."""
    names = ("rule.py", "infer.py", "build.py", "replaced-words.csv")
    return hashlib.sha256(b"".join(files(__package__).joinpath(name).read_bytes() for name in names)).hexdigest()


def _is_as_built(earlier: Entry, now: Entry, out: Path) -> bool:
    """Whether an earlier build made of the same raw text, under the same settings, what is there now."""
    if (earlier.raw_sha256, earlier.settings) != (now.raw_sha256, now.settings):
        return False
    if earlier.status == "dropped":
        return True
    path = out / str(earlier.split) / f"{earlier.id}.txt"
    return path.is_file() and path.stat().st_size == earlier.bytes and sha256_of(path) == earlier.sha256


def _notes(parts: Parts, encoding: str) -> Iterator[str]:
    if not parts.header:
        yield "no START line"
    if not parts.ended:
        yield "no END line"
    if encoding == "latin-1":
        yield "not UTF-8, read as Latin-1"
        if any("\x80" <= letter <= "\x9f" for letter in set(parts.body)):
            yield "bytes 0x80 to 0x9f, which Latin-1 has no letters for"


def _not_for_pg19(language: str, year: int | None, body: str) -> str:
    """Why a book that no list knows is left out, or nothing."""
    if language and not language.lower().startswith("english"):
        return "not in English"
    if year is None:
        return "year unknown"
    if year > LATEST:
        return f"published after {LATEST}"
    return f"shorter than {SHORTEST:,} bytes" if len(body.encode()) < SHORTEST else ""


def _reasons(entries: Sequence[Entry]) -> Iterator[str]:
    """How many books were dropped and failed, and why."""
    for status in ("dropped", "failed"):
        reasons = Counter(entry.reason for entry in entries if entry.status == status)
        if reasons:
            counts = "; ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
            yield f"  {status} {reasons.total():,}: {counts}"


def _finish(out: Path, entries: Sequence[Entry]) -> int:
    """Give the log its name, and remove, and count, what earlier builds made that is not in it."""
    aside = out / f"{LOG}.new"
    aside.write_text("".join(entry.format() for entry in entries), "utf-8")
    aside.replace(out / LOG)
    kept = {out / str(entry.split) / f"{entry.id}.txt" for entry in entries if entry.status == "kept"}
    stale = [path for split in SPLITS for path in (out / split).glob("*.txt") if path not in kept]
    for path in stale:
        path.unlink()
    (out / f"{LOG}.part").unlink()
    (out / ASIDE).rmdir()
    return len(stale)
