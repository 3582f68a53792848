r"""How PG-19 was made of a raw text: decode, cut off the licence, replace words.

The rule was found by comparing SHA-256 sums of built texts with the official ones, `verify.py` does it again:

- UTF-8 if it decodes, else Latin-1, and the output is UTF-8. Bytes 0x80 to 0x9f of a Latin-1 text stay control
  characters: they are not read as Windows-1252. Line ends stay as they are, and so does a byte order mark, which
  only a text without a START line keeps.
- The text begins after the first line with `*** START OF` and ends in the asterisks, and the space if there is one,
  of the first `*** END OF` after it. Where one of them is missing, nothing is cut off at that end.
- Words, which are runs of `\w`, are looked up by the SHA-256 of their lower-case form in `replaced-words.csv`. They
  stay hashed there and everywhere: most are slurs.
"""

import csv
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Self

# The line's end may be \r\r\n, as in some damaged texts, or \r alone, as on old Macs.
START = re.compile(r"\*\*\* ?START OF[^\r\n]*(?:\r*\n|\r|\Z)")
END = re.compile(r"\*\*\* ?(?=END OF)")

WORD = re.compile(r"\w+")
_ASCII_WORDS = bytes(code if WORD.fullmatch(chr(code)) else ord(" ") for code in range(128)).ljust(256)
_PIECE = 1 << 14
_CLEAN_WORDS = 500_000  # at most so many are remembered, some 50 MB

PERSON = "<DW52>"
"""What the adjective, which has no replacement of its own in the table, becomes before a noun for people."""
SEEN_NOUNS = frozenset(
    (
        "body", "boy", "boys", "breast", "children", "complexion", "cook", "faces", "figures", "gentlemen", "girl",
        "ladies", "lady", "man", "men", "natives", "neighbors", "people", "person", "persons", "population", "race",
        "races", "servant", "servants", "skin", "society", "species", "troops", "wife", "woman",
    )
)  # fmt: skip
"""Nouns before which official texts have `PERSON`; many others, "child" and "bodies" among them, have it not."""
INFERRED_NOUNS = frozenset(("gentleman", "girls", "neighbours", "women"))
"""Nouns that were not met, but are the other number or spelling of one that was."""
_NEXT_WORD = re.compile(r"\s+(\w+)")


def decode(raw: bytes) -> tuple[str, str]:
    """The text, and the name of the encoding it was in."""
    try:
        return raw.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return raw.decode("latin-1"), "latin-1"


@dataclass(frozen=True)
class Parts:
    """A raw text cut at its START and END lines."""

    header: str
    """What comes before the book, the START line included; empty where there is none."""
    body: str
    """The book, with the asterisks of the END line."""
    ended: bool
    """Whether there was an END line."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Cut a decoded text."""
        start = START.search(text)
        begin = start.end() if start else 0
        end = END.search(text, begin)
        return cls(text[:begin], text[begin : end.end() if end else None], end is not None)


class Replacement:
    """The word replacement, with a memory of words that it leaves alone: hashing them again would take most time."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = table
        self._clean: set[bytes] = set()

    @classmethod
    def official(cls) -> Self:
        """The replacement of PG-19."""
        lines = files(__package__).joinpath("replaced-words.csv").read_text("utf-8").splitlines()
        return cls({row["sha256_of_lowercase_word"]: row["replacement"] for row in csv.DictReader(lines)})

    def __call__(self, text: str) -> str:
        """Replace every word of the table, in any case.

        The adjective, whose replacement is empty, becomes `PERSON` before one of the nouns, and else is deleted, but
        only in a text with some other word of the table: alone it stays as it was.
        """
        found = self._find(text)
        if not any(found.values()):
            return text

        def replace(match: re.Match[str]) -> str:
            return found[match[0]] or (PERSON if _before_noun(text, match.end()) else "")

        # Said like this, \bWORD\b is looked for thrice as fast: every alternative begins with a letter.
        return re.sub("|".join(rf"{word}(?<=\b{word})\b" for word in found), replace, text)

    def _find(self, text: str) -> dict[str, str]:
        """The words of the table in a text, in the case they have there, each with its replacement."""
        found = {}
        new = _words(text) - self._clean
        for word in map(bytes.decode, new):
            replacement = self._table.get(hashlib.sha256(word.lower().encode()).hexdigest())
            if replacement is not None:
                found[word] = replacement
        if len(self._clean) > _CLEAN_WORDS:
            self._clean.clear()
        self._clean |= new - {word.encode() for word in found}
        return found


def _words(text: str) -> set[bytes]:
    """All words of a text, in the case they have there."""
    if not text.isascii():
        return {word.encode() for word in set(WORD.findall(text))}
    # The same, only faster: in pieces that stay in the processor's cache, it takes half the time.
    plain = text.encode().translate(_ASCII_WORDS)
    words: set[bytes] = set()
    begin = 0
    while begin < len(plain):
        end = plain.find(b" ", begin + _PIECE)
        words.update(plain[begin : end if end >= 0 else None].split())
        begin = end if end >= 0 else len(plain)
    return words


def _before_noun(text: str, at: int) -> bool:
    """Whether white space and one of the nouns come next, with nothing in between."""
    following = _NEXT_WORD.match(text, at)
    return following is not None and following[1].lower() in SEEN_NOUNS | INFERRED_NOUNS
