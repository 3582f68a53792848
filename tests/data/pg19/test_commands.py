"""The commands below `compressive data pg19`: wrong inputs are one line and exit code 2, JSON keys have no spaces."""

import json
import re

import pytest

from compressive.cli import main
from compressive.data.pg19 import topics as module


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder: a file, an empty folder, a folder without books, and raw texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("a file")
    for name in ("empty", "other/train", "raw"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "other" / "train" / "notes.txt").write_text("no book")
    (tmp_path / "raw" / "1.txt").write_text("a raw text")
    return tmp_path


def error_of(capsys, *words):
    """Run a command that must fail; return its one line on stderr, without the command."""
    assert main(["data", "pg19", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err.removeprefix(f"compressive data pg19 {words[0]}: ").strip()


@pytest.mark.parametrize("command", ["verify", "stats", "topics"])
def test_a_folder_without_books_is_named(folder, capsys, command):
    build = "run: compressive data pg19 build --source TEXTS --out BUILT"
    assert error_of(capsys, command, "nowhere").startswith("nowhere does not exist: expected one with train")
    assert error_of(capsys, command, "file.txt").startswith("file.txt is not a folder: expected one with train")
    assert error_of(capsys, command, "file.txt").endswith(build)
    for name in ("empty", "other"):
        assert re.match(rf"{name}(/train)? (holds|has) no books: ", error_of(capsys, command, name))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source", "nowhere"], "nowhere does not exist: expected a folder with raw texts, a .zip or a .tar"),
        (["--source", "empty"], "no raw text in empty: expected files named by a book's id"),
        (["--source", "file.txt"], "no raw text in file.txt: expected files named by a book's id"),
        (["--source", "raw", "--out", "file.txt"], "out=file.txt: is a file, expected a folder"),
        (["--source", "raw", "--metadata", "empty"], "empty is not a file: expected PG-19's metadata.csv"),
        (["--source", "raw", "--metadata", "file.txt"], "file.txt, line 1: cannot read 'a file' (too few columns)"),
        (["--source", "raw", "--workers", "-1"], "workers=-1: expected at least 1"),
        (["--source", "raw", "--workers", "99999"], "workers=99999: expected at least 1, at most"),
    ],
)
def test_a_build_that_cannot_begin_writes_nothing(folder, capsys, words, message):
    assert error_of(capsys, "build", "--out", "out", *words).startswith(message)
    assert not (folder / "out").exists()


def test_topics_that_cannot_be_written_or_seeded_are_refused_before_any_reading(folder, capsys, monkeypatch):
    monkeypatch.setattr(module, "choose_words", lambda *_: pytest.fail("read"))
    (folder / "other" / "train" / "1.txt").write_text("a book")
    assert error_of(capsys, "topics", "other", "--out", "file.txt") == "out=file.txt: is a file, expected a folder"
    assert error_of(capsys, "topics", "other", "--seed", "-1") == "seed=-1: expected 0 to 4294967295"


def keys_of(value):
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


@pytest.mark.parametrize("command", ["verify", "stats", pytest.param("topics", marks=pytest.mark.slow)])
def test_json_keys_have_no_spaces(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr(module, "BATCHES", 1)
    monkeypatch.setattr(module, "MAX_DOCUMENTS", 1.0)
    for split in ("train", "validation", "test"):
        (tmp_path / split).mkdir()
        words = " ".join(f"word{'abcdefghijklmnopqrst'[i]}" for i in range(20))
        (tmp_path / split / "1.txt").write_text(words)
    main(["data", "pg19", command, str(tmp_path), "--json"])
    keys = list(keys_of(json.loads(capsys.readouterr().out)))
    assert len(keys) > 5
    assert all(re.fullmatch(r"[a-z0-9_]+", key) for key in keys)
