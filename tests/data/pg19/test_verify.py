"""Comparison of built books with the official ones; nearly all real books match."""

import dataclasses
import hashlib
import json

import pytest
from helpers import ROOT

from compressive.cli import main
from compressive.data.pg19.catalogue import Book
from compressive.data.pg19.verify import verify

SHARED = ROOT.parent / "shared" / "data" / "pg19"


def book(book_id, split, content):
    return Book(book_id, f"Book {book_id}", 1900, split, len(content), hashlib.sha256(content).hexdigest())


BOOKS = {
    i: book(i, split, b"text %d" % i)
    for i, split in ((1, "train"), (2, "train"), (3, "test"), (4, "validation"), (5, "train"))
}


@pytest.fixture
def out(tmp_path):
    for name, content in {
        "train/1.txt": b"text 1",
        "train/2.txt": b"text 2, longer",
        "train/3.txt": b"text 3",
        "test/9.txt": b"not listed",
        "train/notes.txt": b"no book",
        "train/5.txt.part": b"no book either",
        "validation/4.txt": b"TEXT 4",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_every_book_is_accounted_for(out):
    report = verify(out, BOOKS)
    assert dataclasses.asdict(report) == {
        "built": 5,
        "matched": [1, 3],
        "different": {2: 8, 4: 0},
        "wrong_split": {3: "train"},
        "unknown": [9],
        "missing": {"train": [5], "validation": [], "test": []},
    }
    assert not report.good
    assert str(report).splitlines() == [
        "2 of 5 built books match (40.0%)",
        "  different 2, size minus the official: 2 by +8, 4 by +0",
        "  in the wrong split 1, the first is 3",
        "  not in the list 1, the first is 9",
        "  missing 1 train, 0 validation, 0 test",
    ]


def test_only_the_first_that_differ_are_shown(tmp_path):
    (tmp_path / "train").mkdir()
    for i in range(1, 21):
        (tmp_path / f"train/{i}.txt").write_bytes(b"")
    report = verify(tmp_path, {i: book(i, "train", b"x") for i in range(1, 21)})
    assert "10 by -1, ..." in str(report)
    assert "11 by" not in str(report)
    assert len(report.different) == 20


def test_the_exit_code_says_whether_all_match(out, tmp_path, capsys):
    rows = [f"{b.split},{b.id},{b.title},{b.year},{b.bytes},{b.sha256}\n" for b in BOOKS.values()]
    books = tmp_path / "list.csv"
    books.write_text("split,book_id,short_title,publication_date,pg19_bytes,pg19_sha256\n" + "".join(rows), "utf-8")
    words = ["data", "pg19", "verify", str(out), "--official", str(books)]
    assert main(words) == 1
    assert "2 of 5 built books match" in capsys.readouterr().out
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["different"] == {"2": 8, "4": 0}
    for name in ("train/2.txt", "test/9.txt", "validation/4.txt"):
        (out / name).unlink()
    assert main(words) == 1  # book 3 is in the wrong split
    (out / "train/3.txt").unlink()
    assert main(words) == 0
    (out / "train/1.txt").unlink()
    assert main(words) == 2
    assert "has no books" in capsys.readouterr().err


def built_and_verified(archives, out, capsys):
    sources = [word for name in archives for word in ("--source", str(SHARED / name))]
    assert main(["data", "pg19", "build", *sources, "--out", str(out), "--metadata", "official", "--workers", "2"]) == 0
    summary = capsys.readouterr().out
    assert main(["data", "pg19", "verify", str(out), "--json"]) == 1
    return summary, json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the raw books are not at hand")
def test_real_books_are_built_exactly(tmp_path, capsys):
    archives = ("books-test.tar.xz", "books-validation.tar.xz")
    summary, report = built_and_verified(archives, tmp_path / "out", capsys)
    assert "57 books" in summary
    assert "missing 28,695" in summary
    assert len(report["matched"]) >= 0.97 * report["built"] == 0.97 * 57
    assert report["different"] == {"4047": -36}
    assert [len(report["missing"][split]) for split in ("train", "validation", "test")] == [28_602, 31, 62]
    assert not report["wrong_split"]
    assert not report["unknown"]


@pytest.mark.soak
@pytest.mark.skipif(not SHARED.exists(), reason="the raw books are not at hand")
def test_all_real_books_are_built_exactly(tmp_path, capsys):
    archives = ("books-test.tar.xz", "books-validation.tar.xz", "books-train.tar.xz")
    _, report = built_and_verified(archives, tmp_path / "out", capsys)
    assert (len(report["matched"]), report["built"]) == (280, 286)
    off = {"4047": -36, "10379": -9, "10421": 0, "10509": 7, "10770": 1, "10967": 1}
    assert report["different"] == off
