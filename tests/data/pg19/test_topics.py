"""Topics: two themes are separated, stop words are left out, and the command writes its results."""

import itertools
import json
import random
import string
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from rich.console import Console

from compressive.cli import main
from compressive.data.pg19 import topics as module
from compressive.data.pg19.topics import STOP_WORDS, batches, choose_words, learn_topics, read_documents

ROOTS = {"sea": "ship mast sail deck reef", "field": "plough barn wheat hay cow"}
THEMES = {
    name: [root + "".join(end) for root in roots.split() for end in itertools.product("aeiou", "nrs")]
    for name, roots in ROOTS.items()
}
"""75 invented words each."""


RESULTS = ROOT / "experiments" / "results" / "pg19-topics" / "2026-11-15-cpu.json"


def ignore(size):
    pass


@pytest.fixture
def small(monkeypatch):
    """Use limits for forty books instead of thousands."""
    for name, value in {"BATCHES": 20, "BATCH": 40, "MIN_BOOKS": 0.05, "MAX_DOCUMENTS": 0.6}.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def built(tmp_path, small):
    """Write forty short books, each of one theme, with common stop words."""
    chance = random.Random(0)
    (tmp_path / "train").mkdir()
    for number in range(40):
        theme = THEMES["sea" if number % 4 else "field"]
        words = [*chance.choices(theme, k=30), *["Thou", "said", "everywhere", "<DW52>", "<DW64>s", "of"] * 3]
        chance.shuffle(words)
        (tmp_path / "train" / f"{number + 1}.txt").write_bytes("\r\n".join(words).encode())
    return tmp_path


def test_two_themes_are_separated(built):
    found = learn_topics(built, topics=2)
    assert (found.books, found.documents, found.split) == (40, 40, "train")
    assert 130 <= found.vocabulary <= 150
    assert [topic.share for topic in found.topics] == [pytest.approx(0.75, abs=0.05), pytest.approx(0.25, abs=0.05)]
    for topic, theme in zip(found.topics, THEMES.values(), strict=True):
        assert len(topic.words) == len(topic.weights) == 15
        assert set(topic.words) <= set(theme)
        assert topic.weights == sorted(topic.weights, reverse=True)
        assert topic.label == ", ".join(topic.words[:3])


def test_a_seed_gives_the_same_topics_and_another_gives_others(built):
    first, again, other = (learn_topics(built, topics=3, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.topics != other.topics


def test_few_books_are_read_until_there_are_enough_batches(built):
    assert learn_topics(built, topics=2).passes == 20  # one batch per pass
    for path in sorted(built.glob("train/*"))[::2]:
        path.unlink()
    assert learn_topics(built, topics=2).passes == 20  # still one batch per pass


def test_only_words_of_themes_are_chosen(built):
    words, documents = choose_words(sorted(built.glob("train/*")), STOP_WORDS, ignore)
    assert documents == 40
    assert len(words) > 130
    assert set(words) <= {word for theme in THEMES.values() for word in theme}  # no DW, said, thou, everywhere


def write(folder: Path, *texts: str) -> list[Path]:
    paths = [folder / f"{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    return paths


def test_a_word_is_kept_if_neither_rare_nor_common(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MIN_BOOKS", 0.5)
    monkeypatch.setattr(module, "MAX_DOCUMENTS", 0.75)
    paths = write(tmp_path, "all two three once", "all two three", "all three", "all")
    assert choose_words(paths, (), ignore) == (["three", "two"], 4)
    assert choose_words(paths, ("three",), ignore) == (["two"], 4)
    monkeypatch.setattr(module, "VOCABULARY", 1)
    assert choose_words(paths, (), ignore)[0] == ["three"]


def test_words_of_one_book_are_dropped_when_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENTS", 1.0)
    paths = write(tmp_path, "common alone", "common single", "common")
    assert choose_words(paths, (), ignore)[0] == ["common", "alone", "single"]
    monkeypatch.setattr(module, "COUNTED", 2)
    assert choose_words(paths, (), ignore)[0] == ["common"]


def test_a_book_is_cut_into_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DOCUMENT", 10)
    text = "The \u00e9p\u00e9e, _is_ on <DW52>; Don't 1st: " + " ".join(
        "abc" + letter for letter in string.ascii_lowercase
    )
    (path,) = write(tmp_path, text)
    advanced: list[int] = []
    found = list(read_documents(path, advanced.append))
    assert [len(document) for document in found] == [9, 10, 10]
    assert found[0][:4] == ["the", "\u00e9p\u00e9e", "don", "abca"]
    assert found[2][-1] == "abcz"
    assert advanced == [len(text.encode())]


def test_a_book_without_words_has_no_documents(tmp_path):
    assert list(read_documents(write(tmp_path, "1 2 3 <DW52>")[0], ignore)) == []


def test_batches_hold_every_document_once_per_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP", 3)
    monkeypatch.setattr(module, "BATCH", 2)
    words = ["aaa", "bbb", "ccc", "ddd", "eee"]
    paths = write(tmp_path, *(f"{word} {'often ' * 9}{word}" for word in words))
    found = list(batches(paths, [*words, "often"], 2, 0, ignore))
    rows = [row.tolist() for batch in found for row in batch]
    assert {len(batch) for batch in found} <= {1, 2, 3}
    assert all(row[-1] == module.REPEATS for row in rows)
    once = sorted([2 * (i == j) for j in range(5)] + [module.REPEATS] for i in range(5))
    assert sorted(rows[:5]) == sorted(rows[5:]) == once
    assert rows[:5] != rows[5:]


def test_the_table_has_a_column_per_topic(built):
    found = learn_topics(built, topics=5)
    narrow, wide = list(found.tables(70)), list(found.tables(200))
    assert [len(table.columns) for table in narrow] == [4, 1]
    assert [len(table.columns) for table in wide] == [5]
    assert all(table.row_count == 15 for table in narrow + wide)
    console = Console(width=70)
    with console.capture() as capture:
        console.print(*narrow)
    assert all(word in capture.get() for topic in found.topics for word in topic.words)


def test_the_command_prints_a_table_and_writes_files(built, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    assert main(["data", "pg19", "topics", str(built), "--topics", "2", "--out", str(out)]) == 0
    said = capsys.readouterr()
    written = json.loads((out / "topics.json").read_text("utf-8"))
    assert [len(topic["words"]) for topic in written["topics"]] == [15, 15]
    assert all(topic["words"][0] in said.out for topic in written["topics"])
    assert (out / "topics.png").read_bytes().startswith(b"\x89PNG")
    assert "learning topics" in said.err


def test_the_command_prints_json_and_needs_no_matplotlib(built, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["data", "pg19", "topics", str(built), "--topics", "2", "--split", "train", "--seed", "3", "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads((built / "topics" / "topics.json").read_text("utf-8"))
    assert json.loads(said.out)["seed"] == 3
    assert "pip install 'compressive[plots]'" in said.err
    assert not (built / "topics" / "topics.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([".", "--split", "test"], "test holds no books: choose another --split"),
        ([".", "--topics", "1"], "topics=1: expected at least 2"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(built, capsys, monkeypatch, words, message):
    monkeypatch.chdir(built)
    assert main(["data", "pg19", "topics", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1


def test_too_few_words_are_an_error(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    write(tmp_path / "train", "one word", "and another")
    assert main(["data", "pg19", "topics", str(tmp_path)]) == 2
    assert "expected 15 or more: build more books" in capsys.readouterr().err


def test_without_scikit_learn_the_extra_is_named(built, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    assert main(["data", "pg19", "topics", str(built)]) == 2
    assert "pip install 'compressive[topics]'" in capsys.readouterr().err


def test_the_topics_kept_are_of_these_settings():
    kept = json.loads(RESULTS.read_text("utf-8"))
    assert kept["settings"] == {name: getattr(module, name.upper()) for name in kept["settings"]}
    words = {word for topic in kept["topics"] for word in topic["words"]}
    assert {"army", "sea", "king", "church", "knowledge", "sugar"} <= words
    assert not words.intersection(STOP_WORDS)
