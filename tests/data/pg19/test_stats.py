"""Tables of built books: numbers match the files, and partial splits are marked."""

import json
import subprocess
import sys
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from compressive.cli import main
from compressive.data.pg19 import stats
from compressive.data.pg19.stats import CORPORA, Split, books, measure, tables
from compressive.data.pg19.words import OFFICIAL, Size

TEXTS = {
    "train": {10: b"one two three\r\nfour\r\n", 100: b"five\r\n"},
    "validation": {1925: b" six seven \r\n"},
    "test": {10146: b"eight\r\n", 10321: b"", 10356: b"nine <DW52> ten\r\n*** "},
}


@pytest.fixture
def built(tmp_path):
    for split, texts in TEXTS.items():
        (tmp_path / split).mkdir()
        for number, text in texts.items():
            (tmp_path / split / f"{number}.txt").write_bytes(text)
    (tmp_path / "test" / "notes.txt").write_bytes(b"not a book")
    (tmp_path / "build.jsonl").write_bytes(b"{}\n")
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    """Pretend that PG-19 consists of the books of `built`."""
    listed = {number: SimpleNamespace(id=number, split=split) for split in TEXTS for number in TEXTS[split]}
    monkeypatch.setattr(stats, "official", lambda: listed)
    monkeypatch.setattr(
        stats, "OFFICIAL", {"train": Size(2, 5, 27), "validation": Size(1, 2, 13), "test": Size(3, 4, 31)}
    )


def shown(splits):
    screen = StringIO()
    Console(file=screen, width=80).print(*tables(splits))
    return screen.getvalue()


def test_every_split_is_counted(built):
    found = measure(built)
    assert {split: found[split].built for split in found} == {
        "train": Size(2, 5, 27), "validation": Size(1, 2, 13), "test": Size(3, 5, 28),
    }  # fmt: skip
    assert {split: found[split].published for split in found} == OFFICIAL


def test_books_are_in_order_of_id(built):
    (built / "train" / "9.txt").write_bytes(b"")
    assert [path.name for path in books(built, "train")] == ["9.txt", "10.txt", "100.txt"]


def test_a_partial_split_is_marked(built):
    found = measure(built)
    assert not any(split.complete for split in found.values())
    text = shown(found)
    assert "train: 2 of 28,602 books: not comparable" in text
    assert "test: 3 of 100 books: not comparable" in text
    assert "Books, partial" in text
    assert "complete" not in text


def test_a_complete_split_is_marked(built, small):
    found = measure(built)
    assert all(split.complete for split in found.values())
    text = shown(found)
    for split in TEXTS:
        assert f"{split}: complete" in text
    assert "partial" not in text
    assert "comparable" not in text


def test_other_books_do_not_complete_a_split(built, small):
    (built / "validation" / "1925.txt").rename(built / "validation" / "3.txt")
    (built / "train" / "3.txt").write_bytes(b"another")
    found = measure(built)
    assert (found["validation"].built.books, found["validation"].present) == (1, 0)
    assert not found["validation"].complete
    assert not found["train"].complete
    assert "0 of 1 books and 1 not of this split: not comparable" in found["validation"].mark
    assert "2 of 2 books and 1 not of this split: not comparable" in found["train"].mark
    assert found["test"].complete


def test_the_tables_hold_the_papers_figures_and_ours(built):
    text = shown(measure(built))
    for size in OFFICIAL.values():
        assert f"{size.books:,}" in text
        assert f"{size.words:,}" in text
        assert f"{size.bytes:,}" in text
    assert "68,986" in text  # average words of a train book
    for row in CORPORA:
        for cell in row:
            assert cell in text
    (ours,) = (line for line in text.splitlines() if "this folder" in line)
    assert [cell.strip() for cell in ours.split("│")[2:-1]] == ["2", "2.57e-05 MB", "(open)", "Books, partial"]


def test_the_whole_of_pg19_reads_as_in_the_paper():
    whole = {name: Split(size, size, size.books) for name, size in OFFICIAL.items()}
    (ours,) = (line for line in shown(whole).splitlines() if "this folder" in line)
    assert [cell.strip() for cell in ours.split("│")[2:-1]] == list(CORPORA[-1][1:])


def test_an_absent_split_has_no_books(built):
    for path in (built / "validation").iterdir():
        path.unlink()
    (built / "validation").rmdir()
    found = measure(built)["validation"]
    assert (found.built, found.present, found.complete) == (Size(0, 0, 0), 0, False)
    assert found.as_dict()["built"]["words_per_book"] == 0


def test_the_command_prints_tables(built, capsys):
    assert main(["data", "pg19", "stats", str(built)]) == 0
    said = capsys.readouterr()
    assert "not comparable" in said.out
    assert "WikiText-103" in said.out
    assert "counting words" in said.err


def test_the_command_prints_json(built):
    command = [sys.executable, "-m", "compressive", "data", "pg19", "stats", str(built), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    test = json.loads(done.stdout)["test"]
    assert test["built"] == {"books": 3, "words": 5, "bytes": 28, "words_per_book": 5 / 3}
    assert test["published"] == OFFICIAL["test"]._asdict() | {"words_per_book": 69664.99}
    assert (test["present"], test["complete"]) == (3, False)


@pytest.mark.parametrize(("folder", "message"), [("nowhere", "does not exist"), (".", "holds no books")])
def test_a_mistake_is_one_line_and_code_2(tmp_path, capsys, folder, message):
    assert main(["data", "pg19", "stats", str(tmp_path / folder)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert "compressive data pg19 build" in said.err
    assert said.err.count("\n") == 1


def test_help_needs_neither_torch_nor_numpy():
    script = """
import sys
from compressive.cli import main
for command in ("stats", "topics"):
    try:
        main(["data", "pg19", command, "--help"])
    except SystemExit:
        pass
assert not {"torch", "numpy", "sklearn", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "--json" in done.stdout
    assert "--topics" in done.stdout
