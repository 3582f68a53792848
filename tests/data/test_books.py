"""The books of the repository: clean, documented, and as described in their README."""

import csv
import hashlib
import re

import pytest
from helpers import ROOT

REAL = ROOT.parent / "shared" / "data" / "pg19"
BOOKS = sorted((ROOT / "books").rglob("*.txt"))
TEXTS = {path: path.read_bytes().decode("utf-8") for path in BOOKS}


def test_there_are_enough_and_not_too_many():
    sizes = {
        folder: sum(len(TEXTS[path].encode()) for path in BOOKS if path.parent.name == folder)
        for folder in ("train", "valid", "test", "prompts")
    }
    assert 1_200_000 <= sizes["train"] <= 1_800_000
    assert 100_000 <= sizes["valid"] <= 250_000
    assert 100_000 <= sizes["test"] <= 250_000
    assert {path.name.split("-")[0] for path in BOOKS if path.parent.name == "prompts"} == {"860", "3247"}
    assert sizes["prompts"] < 5000
    assert sum(sizes.values()) == sum(path.stat().st_size for path in BOOKS)


def test_the_readme_lists_every_file_with_its_size():
    readme = (ROOT / "books" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (\d+) \| \d{4} \| ([\d,]+) \|$", readme, re.MULTILINE)
    listed = {(folder, number, int(size.replace(",", ""))) for folder, number, size in rows}
    assert listed == {(path.parent.name, path.name.split("-")[0], path.stat().st_size) for path in BOOKS}


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_book_is_text_and_nothing_of_its_packaging(path):
    text = TEXTS[path]
    assert "\r" not in text
    assert "\ufeff" not in text
    assert text.endswith("\n")
    assert text.strip("\n") + "\n" == text
    assert not re.search(
        r"gutenberg|\*\*\* ?(START|END) OF|e-?text prepared|distributed proofread", text, re.IGNORECASE
    )


@pytest.mark.skipif(not REAL.exists(), reason="the PG-19 tables are not here")
def test_no_word_is_one_that_pg19_replaces():
    with (REAL / "replaced-words.csv").open(encoding="utf-8") as file:
        replaced = {row["sha256_of_lowercase_word"] for row in csv.DictReader(file)}
    words = {
        word
        for text in TEXTS.values()
        for pattern in (r"\w+", r"[^\W_]+", r"[^\W\d_]+(?:[-'][^\W\d_]+)*")
        for word in re.findall(pattern, text.lower())
    }
    assert not {hashlib.sha256(word.encode()).hexdigest() for word in words} & replaced


@pytest.mark.skipif(not REAL.exists(), reason="the PG-19 tables are not here")
def test_books_are_of_pg19_s_train_split_and_prompts_of_its_test_split():
    with (REAL / "books.csv").open(encoding="utf-8") as file:
        split = {row["book_id"]: row["split"] for row in csv.DictReader(file)}
    for path in BOOKS:
        expected = "test" if path.parent.name == "prompts" else "train"
        assert split[path.name.split("-")[0]] == expected
