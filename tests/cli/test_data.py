"""`compressive data prepare`: options, and errors in one line."""

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

import pytest

from compressive.cli import main
from compressive.cli.data import Prepare, prepare
from compressive.data.corpus import Corpus

LINES = b"".join(b"a line of text, the %dth\n" % i for i in range(200))


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_bytes(LINES)
    return path


def test_a_text_is_prepared(story, tmp_path, capsys):
    options = Prepare("text", (story,), data_dir=tmp_path / "data", name="tale", split=(0.8, 0.1, 0.1))
    assert prepare(options) == 0
    corpus = Corpus.open(tmp_path / "data" / "tale")
    assert 0.8 <= corpus.bytes("train") / len(LINES) < 0.82
    assert "prepared" in capsys.readouterr().out


def test_every_option_is_a_word_on_the_command_line(story, tmp_path):
    words = ["data", "prepare", "text", str(story), "--data-dir", str(tmp_path / "d"), "--tokenizer", "bpe"]
    assert main([*words, "--vocab-size", "280", "--name", "tale", "--split", "0.5", "0.25", "0.25"]) == 0
    corpus = Corpus.open(tmp_path / "d" / "tale")
    assert (corpus.vocab_size, corpus.manifest.settings["split"]) == (280, "0.5 0.25 0.25")


@pytest.mark.parametrize(
    ("corpus", "values", "message"),
    [
        ("text", {}, "no PATH"),
        ("text", {"paths": (Path("nowhere.txt"),)}, "nowhere.txt does not exist"),
        ("enwik8", {"source": Path("nowhere.xz")}, "nowhere.xz does not exist"),
        ("wikitext103", {"source": Path("nowhere")}, "nowhere does not exist"),
        ("pg19", {}, "pg19 build --source TEXTS --out BUILT"),
        ("pg19", {"source": Path("nowhere")}, "nowhere/train has no books"),
        ("text", {"vocabulary": Path("nowhere")}, "nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(tmp_path, capsys, corpus, values, message):
    assert prepare(Prepare(corpus, data_dir=tmp_path, **values)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1


def test_no_network_is_one_line_and_code_2(tmp_path, capsys, monkeypatch):
    def no_network(*_, **__):
        raise urllib.error.URLError("no such host")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    files: dict[Literal["enwik8", "wikitext103"], str]
    files = {"enwik8": "enwik8.zip", "wikitext103": "wikitext-103-v1.zip"}
    for corpus, file in files.items():
        assert prepare(Prepare(corpus, data_dir=tmp_path)) == 2
        said = capsys.readouterr().err
        assert str(tmp_path / "downloads" / file) in said
        assert said.count("\n") == 1


def test_help_needs_neither_torch_nor_numpy():
    script = """
import sys
from compressive.cli import main
try:
    main(["data", "prepare", "--help"])
except SystemExit:
    pass
assert not {"torch", "numpy", "tokenizers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for word in ("enwik8", "wikitext103", "pg19", "--source", "--vocab-size", "--vocabulary", "--data-dir", "--split"):
        assert word in done.stdout
