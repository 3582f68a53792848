"""Word counts: the same as in every corpus of the package, next to the paper's numbers."""

import json

import pytest
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive.data.corpus import SPLITS, write_corpus
from compressive.data.pg19 import words
from compressive.data.pg19.catalogue import official
from compressive.data.pg19.words import OFFICIAL, count_words
from compressive.data.tokenizer import ByteTokenizer

RESULTS = ROOT / "experiments" / "results" / "pg19-words" / "2026-11-15-cpu.json"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (b"", 0),
        (b" \r\n\t", 0),
        (b"word", 1),
        (b"\r\n\r\nTwo words\r\n", 2),
        (b"It's well-nigh--as they say--over.", 4),
        ("caf\u00e9 \u2014 no\u00a0break".encode(), 3),
        (b"a <DW52> * * *", 5),
    ],
)
def test_words_are_what_white_space_separates(text, count):
    assert count_words(text) == count


@given(st.lists(st.sampled_from([b"a", b"bc", b"\xe9", b" ", b"\n", b"\r", b"\t", b"\v", b"\f", b"\x1c", b"\x00"])))
@settings(deadline=None)
def test_word_counts_match_python_split(parts):
    text = b"".join(parts)
    assert count_words(text) == len(text.split())


def test_a_corpus_counts_the_same(tmp_path):
    text = b"\r\n One\r\ntwo\vthree --\tfour\r\n\r\n* * *\r\n"
    corpus = write_corpus(tmp_path / "c", "c", ByteTokenizer(), {split: [text] for split in SPLITS}, {})
    assert corpus.words("train") == count_words(text) == 8


@pytest.mark.parametrize("split", OFFICIAL)
def test_the_official_sizes_are_those_of_the_list(split):
    sizes = [book.bytes for book in official().values() if book.split == split]
    assert (len(sizes), sum(sizes)) == (OFFICIAL[split].books, OFFICIAL[split].bytes)


def test_the_documented_word_counts_are_the_measured_ones():
    result = json.loads(RESULTS.read_text("utf-8"))
    chosen = result["rules"]["between_ascii_white_space"]
    said = " ".join(words.__doc__.split())
    for split, whole in OFFICIAL.items():
        found = chosen[split]
        assert found["official"] == whole.words
        assert found["ratio"] == round(found["estimate"] / whole.words, 4)
        assert f"{100 * (found['ratio'] - 1):.1f} % more than" in said
        assert f"{100 * found['ratio_standard_error']:.1f} %" in said.split("standard errors of")[1]
