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


def test_rare_words_are_unknown_with_a_minimum_count(tmp_path, capsys):
    for split, content in {"train": "a b a c a b a\n", "valid": "a b\n", "test": "a d c\n"}.items():
        (tmp_path / "in" / split).mkdir(parents=True)
        (tmp_path / "in" / split / "1.txt").write_text(content)
    words = ["data", "prepare", "text", str(tmp_path / "in"), "--data-dir", str(tmp_path / "d"), "--tokenizer", "words"]
    assert main([*words, "--name", "some", "--min-count", "2"]) == 0
    note = "words that occur fewer than 2 times in train are <unk>"
    assert f"  note: {note}" in capsys.readouterr().out
    some = Corpus.open(tmp_path / "d" / "some")
    assert (some.manifest.settings["min_count"], some.manifest.note) == ("2", note)
    assert [some.tokenizer.decode(some.split(split)) for split in ("train", "test")] == [
        b"a b a <unk> a b a\n", b"a <unk> <unk>\n",
    ]  # fmt: skip
    assert main([*words, "--name", "some", "--min-count", "2"]) == 0
    assert "already prepared" in capsys.readouterr().out
    assert main([*words, "--name", "some"]) == 2
    assert "prepared with min_count 2, not these" in capsys.readouterr().err
    for more in ([], ["--min-count", "1"]):  # the same
        assert main([*words, "--name", "all", *more]) == 0
    every = Corpus.open(tmp_path / "d" / "all")
    assert (every.vocab_size, every.manifest.note) == (5, "")
    assert every.manifest.settings.keys() == {"corpus", "tokenizer", "split"}


def test_another_corpus_of_the_same_name_is_replaced_only_by_force(story, tmp_path, capsys):
    words = ["data", "prepare", "text", str(story), "--data-dir", str(tmp_path / "d"), "--name", "tale"]
    assert main(words) == 0
    assert main(words) == 0
    assert capsys.readouterr().out.count("already prepared") == 1
    assert main([*words, "--tokenizer", "words"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"compressive data prepare: {tmp_path / 'd' / 'tale'} holds another corpus (bytes, vocabulary 256, "
        f"{len(LINES):,} tokens of story.txt), prepared with tokenizer bytes, not tokenizer words: choose another "
        "--name, or replace it with --force\n"
    )
    assert Corpus.open(tmp_path / "d" / "tale").tokenizer.kind == "bytes"
    assert main([*words, "--tokenizer", "words", "--force"]) == 0
    assert Corpus.open(tmp_path / "d" / "tale").tokenizer.kind == "words"
    (tmp_path / "d" / "tale" / "valid.bin").unlink()
    capsys.readouterr()
    assert main([*words, "--tokenizer", "words"]) == 2
    said = capsys.readouterr()
    assert "valid.bin is missing" in said.err
    assert "prepare it again with --force" in said.err
    assert said.err.count("\n") == 1


def test_a_path_and_source_are_the_same_for_every_corpus(story, tmp_path, capsys):
    for i, words in enumerate((["text", story], ["text", "--source", story])):
        assert main(["data", "prepare", *map(str, words), "--data-dir", str(tmp_path / str(i))]) == 0
    manifests = [Corpus.open(tmp_path / str(i) / "story").manifest for i in range(2)]
    assert manifests[0] == manifests[1]
    for corpus in ("enwik8", "wikitext2", "pg19", "speech", "ljspeech"):
        capsys.readouterr()
        errors = []
        for words in ([corpus, "nowhere"], [corpus, "--source", "nowhere"]):
            assert main(["data", "prepare", *words, "--data-dir", str(tmp_path / "d")]) == 2
            errors.append(capsys.readouterr().err)
        assert errors[0] == errors[1]
        assert "nowhere" in errors[0]
    assert main(["data", "prepare", "text", str(story), "--source", str(story), "--data-dir", str(tmp_path)]) == 2
    assert "expected one of the two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--split", "0.9", "0.2", "0.1"], "split=(0.9, 0.2, 0.1): expected three shares above 0 that sum to 1"),
        (["--split", "1", "0", "0"], "split=(1.0, 0.0, 0.0): expected three shares above 0"),
        (["--vocab-size", "0"], "vocab_size=0: only bpe learns a vocabulary"),
        (["--tokenizer", "bpe", "--vocab-size", "0"], "vocab_size=0: expected at least 256"),
        (["--tokenizer", "bpe", "--vocab-size", "10000000000"], "and at most 10,000,000"),
        (
            ["--min-count", "2"],
            "min_count=2: only words are counted, and the tokenizer is bytes: leave out --min-count",
        ),
        (["--tokenizer", "words", "--min-count", "0"], "min_count=0: expected at least 1"),
        (
            ["--min-count", "2", "--vocabulary", "enwik8-small"],
            "min_count=2: --vocabulary has its own words; leave out",
        ),
        (["--workers", "-1"], "workers=-1: expected at least 1"),
        (["--workers", "99999"], "workers=99999: expected at least 1, at most"),
        (["--name", "a/b"], "name='a/b': expected letters"),
        (["--vocabulary", "{story}"], "story.txt cannot be used"),
        (["--data-dir", "{story}"], "story.txt: is a file, expected a folder"),
    ],
)
def test_values_that_cannot_work_are_one_line_and_code_2(story, tmp_path, capsys, words, message):
    words = [word.format(story=story) for word in words]
    assert main(["data", "prepare", "text", str(story), "--data-dir", str(tmp_path / "d"), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "d").exists()


def test_words_refuse_binary(tmp_path, capsys):
    (tmp_path / "image.txt").write_bytes(bytes(range(256)) * 100)
    words = ["data", "prepare", "text", str(tmp_path / "image.txt"), "--data-dir", str(tmp_path / "d")]
    assert main([*words, "--tokenizer", "words"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'image.txt'}: byte 0x80 at offset 128 is not UTF-8" in said
    assert said.count("\n") == 1
    assert main(words) == 0


def test_a_small_vocabulary_says_why(story, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("compressive.console._quiet", False)  # so that it is reset after this test
    words = ["data", "prepare", "text", str(story), "--data-dir", str(tmp_path), "--tokenizer", "bpe"]
    assert main([*words, "--quiet"]) == 0
    size = Corpus.open(tmp_path / "story").vocab_size
    assert capsys.readouterr().err == (
        f"warning: vocabulary of {size:,}, 32,000 asked for: no pairs are left to merge, every word of the train split "
        "is one token\n"
    )


@pytest.mark.parametrize(
    ("corpus", "values", "message"),
    [
        ("text", {}, "no PATH"),
        ("text", {"paths": (Path("nowhere.txt"),)}, "nowhere.txt does not exist"),
        ("enwik8", {"source": Path("nowhere.xz")}, "nowhere.xz does not exist"),
        ("wikitext103", {"source": Path("nowhere")}, "nowhere does not exist"),
        ("pg19", {}, "pg19 build --source TEXTS --out BUILT"),
        ("pg19", {"source": Path("nowhere")}, "nowhere does not exist: expected one with train"),
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
    for word in (
        "enwik8",
        "wikitext103",
        "pg19",
        "--source",
        "--vocab-size",
        "--vocabulary",
        "--data-dir",
        "--split",
        "--force",
    ):
        assert word in done.stdout
