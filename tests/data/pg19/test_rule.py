"""PG-19's text rule: start and end of a text, and replaced words, with an invented table."""

import csv
import hashlib
import re
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive.data.pg19 import rule
from compressive.data.pg19.rule import INFERRED_NOUNS, PERSON, SEEN_NOUNS, Parts, Replacement, decode

WORDS = {"zorp": "<DW1>", "zorps": "<DW1>s", "kalu": "<DW2>", "séra": "<DW3>", "σας": "<DW4>", "blim": "", "blym": ""}
TABLE = {hashlib.sha256(word.encode()).hexdigest(): replacement for word, replacement in WORDS.items()}


def slowly(text):
    """A straightforward version of the rule, word by word, with a plain table."""
    words = [WORDS.get(word.lower()) for word in re.findall(r"\w+", text)]
    if not any(words):
        return text

    def replace(match):
        replacement = WORDS.get(match[0].lower())
        if replacement is None:
            return match[0]
        following = re.match(r"\s+(\w+)", text[match.end() :])
        before_noun = following and following[1].lower() in SEEN_NOUNS | INFERRED_NOUNS
        return replacement or ("<DW52>" if before_noun else "")

    return re.sub(r"\w+", replace, text)


# The Kelvin sign and Σ have special lower-case forms; ſ and İ only seem to.
PIECES = [*WORDS, *(word.upper() for word in WORDS), "Zorp", "\u212aalu", "zorpſ", "İ", "ſkin", "men", "Women", "child"]
PIECES += [" ", " ", "\r\n", "\u00a0", "\u2028", ".", "'", "’", "_", "é", "7", "-", "a", "S", "\x1f", "²", "\u0301"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@settings(max_examples=500, deadline=None)
def test_words_are_replaced_as_by_the_plain_rule(text):
    assert Replacement(TABLE)(text) == slowly(text)


@given(st.lists(st.lists(st.sampled_from([p for p in PIECES if p.isascii()]), max_size=20).map("".join), max_size=4))
@settings(deadline=None)
def test_cached_words_give_the_same_text(texts):
    replacement = Replacement(TABLE)
    assert [replacement(text) for text in texts] == [slowly(text) for text in texts]


@pytest.mark.parametrize("piece", [1, 7, 1 << 14])
def test_no_word_is_lost_between_pieces(monkeypatch, piece):
    monkeypatch.setattr(rule, "_PIECE", piece)
    text = "  one zorp,two-kalu three " * 5 + "zorps"
    assert Replacement(TABLE)(text) == slowly(text)
    assert rule._words(text) == {b"one", b"zorp", b"two", b"kalu", b"three", b"zorps"}


def test_the_word_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(rule, "_CLEAN_WORDS", 10)
    replacement = Replacement(TABLE)
    for i in range(50):
        assert replacement(f"word{i} zorp") == f"word{i} <DW1>"
    assert len(replacement._clean) <= 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a zorp, ZORPS; zorp's", "a <DW1>, <DW1>s; <DW1>'s"),
        ("zorp _zorp_ zorp1 7zorp azorp", "<DW1> _zorp_ zorp1 7zorp azorp"),
        ("zorp ézorp zorpé zorp’s “kalu”", "<DW1> ézorp zorpé <DW1>’s “<DW2>”"),
        ("the blim man and the blym child", "the blim man and the blym child"),
        ("zorp: the blim man, the blym child", "<DW1>: the <DW52> man, the  child"),
        ("zorp: Blim\r\n  WOMEN, blim--men, blim _men_", "<DW1>: <DW52>\r\n  WOMEN, --men,  _men_"),
        ("zorp: blim manly", "<DW1>:  manly"),
    ],
)
def test_words_by_example(text, expected):
    assert Replacement(TABLE)(text) == expected == slowly(text)


def test_the_adjective_s_nouns_are_kept_apart_by_evidence():
    assert not SEEN_NOUNS & INFERRED_NOUNS
    assert not {"child", "bodies", "wives", "troop", "fellow", "peoples"} & (SEEN_NOUNS | INFERRED_NOUNS)


def test_the_official_table_is_hashed_and_whole():
    lines = files("compressive.data.pg19").joinpath("replaced-words.csv").read_text("utf-8").splitlines()
    rows = list(csv.reader(lines))[1:]
    assert len(rows) == 104
    assert all(re.fullmatch(r"[0-9a-f]{64}", row[0]) and re.fullmatch(r"(<DW\d+>s?)?", row[1]) for row in rows)
    assert sum(not row[1] for row in rows) == 2
    text = "An ordinary sentence, with nothing to replace in it."
    assert Replacement.official()(text) == text
    assert PERSON == "<DW52>"


START = "*** START OF THIS PROJECT GUTENBERG EBOOK X ***"


@pytest.mark.parametrize(
    ("text", "body"),
    [
        (f"header\r\n{START}\r\ntext\r\n*** END OF THIS\r\nlicence", "text\r\n*** "),
        ("h\n***START OF THE X***\ntext\n***END OF THE X", "text\n***"),
        (f"h\n{START}\ntext", "text"),
        ("text\n*** END OF X", "text\n*** "),
        ("all of it", "all of it"),
        ("", ""),
        (f"h\n{START}\none\n{START}\ntwo\n*** END OF", f"one\n{START}\ntwo\n*** "),
        (f"*** END OF nothing\n{START}\ntext\n*** END OF one *** END OF two", "text\n*** "),
        ("*** START OF A TITLE THAT\r\nWRAPS ***\r\ntext *** END OF", "WRAPS ***\r\ntext *** "),
        ("h\n*** START OF X ***", ""),
        ("h\r*** START OF X ***\r\rtext\r*** END OF X\rlicence", "\rtext\r*** "),
        ("h\r\n*** START OF X ***\r\r\ntext", "text"),
        ("*** start of x\n****  START OF\n*** END  OF", "*** start of x\n****  START OF\n*** END  OF"),
        ("\ufefftext without a header", "\ufefftext without a header"),
        (f"\ufeffheader\n{START}\ntext", "text"),
    ],
)
def test_a_text_is_cut_at_its_start_and_end(text, body):
    parts = Parts.of(text)
    assert parts.body == body
    assert text.startswith(parts.header + parts.body)
    assert parts.ended == body.endswith(("*** ", "***"))


@pytest.mark.parametrize(
    ("raw", "text", "encoding"),
    [
        (b"plain\r\n", "plain\r\n", "utf-8"),
        ("naïve’s".encode(), "naïve’s", "utf-8"),
        ("naïve".encode("latin-1"), "naïve", "latin-1"),
        (b"it\x92s caf\xe9", "it\x92s café", "latin-1"),
        (b"\xef\xbb\xbftext", "\ufefftext", "utf-8"),
        (b"caf\xc3\xa9 and caf\xe9", "cafÃ© and café", "latin-1"),
    ],
)
def test_a_text_is_utf_8_or_else_latin_1(raw, text, encoding):
    assert decode(raw) == (text, encoding)
