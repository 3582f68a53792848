"""Preparing corpora end to end: small fakes always, real corpora if available."""

import dataclasses
import hashlib
import lzma
import shutil
import time
from pathlib import Path

import pytest
from data_helpers import pack, sha
from helpers import ROOT

from compressive.data import prepare as module
from compressive.data import sources
from compressive.data.corpus import SPLITS, Corpus, write_corpus
from compressive.data.download import DownloadError
from compressive.data.prepare import prepare
from compressive.data.sources import PUBLISHED

REAL = ROOT.parent / "shared" / "data"
CONTENT = b"<page>\n some bytes of it \n</page>\n" * 3
LINES = "".join(f"line {i} of the story, told {i} times\n" for i in range(400)).encode()


def run(corpus, data_dir, *paths, **values):
    defaults = {
        "source": None, "tokenizer": "auto", "vocab_size": 300, "name": None, "split": (0.9, 0.05, 0.05),
    }  # fmt: skip
    return prepare(corpus=corpus, paths=paths, data_dir=data_dir, **(defaults | values))


@pytest.fixture
def fakes(monkeypatch):
    pages = {split: f" \n = {split} = \n \n some words <unk> \n".encode() for split in SPLITS}
    small = {
        "enwik8": dataclasses.replace(PUBLISHED["enwik8"], contents={"enwik8": sha(CONTENT)}, cuts=(90, 95)),
        "wikitext2": dataclasses.replace(
            PUBLISHED["wikitext2"], contents={split: sha(pages[split]) for split in ("valid", "test")}
        ),
    }
    for place in (sources, module):
        monkeypatch.setattr(place, "PUBLISHED", PUBLISHED | small)
    return pages


def needs(path):
    return pytest.mark.skipif(not path.exists(), reason=f"the real data is not here: {path.relative_to(REAL)}")


def test_a_fake_enwik8_becomes_bytes(tmp_path, fakes, capsys):
    corpus = run("enwik8", tmp_path, source=pack(tmp_path / "e.zip", "enwik8", CONTENT))
    assert corpus.folder == tmp_path / "enwik8"
    assert [corpus.split(split).tobytes() for split in SPLITS] == [CONTENT[:90], CONTENT[90:95], CONTENT[95:]]
    assert (corpus.tokenizer.kind, corpus.vocab_size) == ("bytes", 256)
    said = capsys.readouterr()
    assert "vocabulary 256" in said.out
    for split in SPLITS:
        assert f"writing {split}" in said.err
        assert f"  {split}" in said.out


def test_a_second_preparation_does_nothing(tmp_path, fakes, capsys):
    source = pack(tmp_path / "e.xz", "", CONTENT)
    corpus = run("enwik8", tmp_path, source=source)
    made = (corpus.folder / "manifest.json").stat().st_mtime_ns
    assert run("enwik8", tmp_path, source=source) == corpus
    assert run("enwik8", tmp_path) == corpus  # and nothing is downloaded
    assert (corpus.folder / "manifest.json").stat().st_mtime_ns == made
    assert capsys.readouterr().out.count("already prepared") == 2
    assert run("enwik8", tmp_path, source=source, tokenizer="bpe").tokenizer.kind == "bpe"
    (corpus.folder / "train.bin").write_bytes(b"")
    assert run("enwik8", tmp_path, source=source).tokenizer.kind == "bytes"  # a damaged corpus is prepared again


def test_changed_texts_of_the_same_name_are_prepared_again(tmp_path):
    path = tmp_path / "story.txt"
    path.write_bytes(LINES)
    first = run("text", tmp_path / "data", path)
    assert first.name == "story"
    path.write_bytes(LINES.upper())
    second = run("text", tmp_path / "data", path)
    assert second.split("train").tobytes() == first.tokenizer.decode(second.split("train")) != b""
    assert second.split("train").tobytes().isupper()
    third = run("text", tmp_path / "data", path, split=(0.5, 0.25, 0.25))
    assert third.bytes("train") < second.bytes("train")


def test_wrong_content_leaves_no_corpus(tmp_path, fakes):
    with pytest.raises(ValueError, match="not enwik8 as published"):
        run("enwik8", tmp_path / "data", source=pack(tmp_path / "e.gz", "", CONTENT[:-1] + b"?"))
    assert list((tmp_path / "data").iterdir()) == []


def test_a_fake_wikitext_becomes_words(tmp_path, fakes, capsys):
    for split in ("valid", "test"):
        pack(tmp_path / f"wiki.{split}.tokens", "", fakes[split])
    pack(tmp_path / "wiki.train.shuffled-articles.tokens", "", fakes["train"] + b" some more \n")
    corpus = run("wikitext2", tmp_path / "data", source=tmp_path)
    assert corpus.tokenizer.decode(corpus.split("train")) == b"\n= train =\n\nsome words <unk>\nsome more\n"
    assert corpus.tokenizer.decode(corpus.split("test")) == b"\n= <unk> =\n\nsome words <unk>\n"
    assert corpus.tokenizer.counts.sum() == len(corpus.split("train"))
    assert "shuffled" in corpus.manifest.note
    said = capsys.readouterr()
    assert "shuffled" in said.out
    run("wikitext2", tmp_path / "data")
    assert "shuffled" in capsys.readouterr().out  # the note is printed each time
    assert "train has 8 words, WikiText-2 as published 2,051,910" in said.err


@pytest.mark.parametrize("tokenizer", ["bytes", "words", "bpe"])
def test_text_of_ones_own_in_every_tokenizer(tmp_path, tokenizer):
    (tmp_path / "story.txt").write_bytes(LINES)
    corpus = run("text", tmp_path / "data", tmp_path / "story.txt", tokenizer=tokenizer, name="my.story-2")
    corpus.verify()
    assert corpus.folder.name == corpus.name == "my.story-2"
    parts = [corpus.tokenizer.decode(corpus.split(split)) for split in SPLITS]
    assert sum(corpus.bytes(split) for split in SPLITS) == len(LINES)
    assert sum(corpus.words(split) for split in SPLITS) == len(LINES.split())
    if tokenizer != "words":
        assert b"".join(parts) == LINES
    if tokenizer == "bpe":
        assert corpus.vocab_size == 300
        assert len(corpus.split("train")) < corpus.bytes("train")


def test_only_long_texts_use_several_processes(tmp_path, monkeypatch):
    (tmp_path / "story.txt").write_bytes(LINES)
    asked = []

    def write(*values):
        asked.append(values[-1])
        alone = (*values[:-1], 1)
        return write_corpus(*alone)

    monkeypatch.setattr(module, "write_corpus", write)
    monkeypatch.setattr(module, "cores", lambda: 5)
    run("text", tmp_path / "a", tmp_path / "story.txt", tokenizer="bpe")
    run("text", tmp_path / "b", tmp_path / "story.txt", tokenizer="bpe", workers=3)
    monkeypatch.setattr(module, "SHARED", 1000)
    run("text", tmp_path / "c", tmp_path / "story.txt", tokenizer="bpe")
    run("text", tmp_path / "d", tmp_path / "story.txt", tokenizer="bytes")
    assert asked == [1, 3, 5, 1]


def test_offline_the_error_says_which_file_to_put_where(tmp_path, monkeypatch):
    def offline(url, path, sha256):
        assert sha256 == PUBLISHED["enwik8"].sha256
        raise DownloadError(f"put {url} at {path}")

    monkeypatch.setattr(module, "download", offline)
    with pytest.raises(DownloadError, match=r"mattmahoney.net/dc/enwik8.zip at .*downloads.enwik8.zip"):
        run("enwik8", tmp_path)


def test_a_downloaded_archive_is_prepared(tmp_path, fakes, monkeypatch):
    monkeypatch.setattr(module, "download", lambda url, path, sha256: pack(tmp_path / path.name, "enwik8", CONTENT))
    assert run("enwik8", tmp_path / "data").manifest.sources.keys() == {"enwik8.zip"}


@pytest.mark.parametrize(
    ("corpus", "values", "match"),
    [
        ("enwik9", {}, "expected one of enwik8, wikitext103, wikitext2, pg19, text"),
        ("enwik8", {"tokenizer": "runes"}, "expected one of auto, bytes, words, bpe"),
        ("enwik8", {"workers": -1}, "workers=-1: expected at least 1"),
        ("text", {"source": Path("a.txt")}, "leave out --source"),
        ("text", {}, "no PATH"),
        ("enwik8", {"name": "../up"}, "name='../up'"),
        ("enwik8", {"name": "downloads"}, "not 'downloads'"),
        ("enwik8", {"name": ".hidden"}, "name='.hidden'"),
    ],
)
def test_impossible_options_are_refused_before_any_work(tmp_path, corpus, values, match):
    with pytest.raises(ValueError, match=match):
        run(corpus, tmp_path, **values)
    assert list(tmp_path.iterdir()) == []


def test_paths_have_to_fit_the_corpus(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(LINES)
    with pytest.raises(ValueError, match=r"--source .*a\.txt"):
        run("enwik8", tmp_path, tmp_path / "a.txt")
    with pytest.raises(ValueError, match="--name"):
        run("text", tmp_path, tmp_path / "a.txt", tmp_path / "b.txt")
    (tmp_path / "a.txt").write_bytes(b"one line and no more")
    with pytest.raises(ValueError, match="valid split of a is empty"):
        run("text", tmp_path, tmp_path / "a.txt")


def test_the_text_itself_is_never_replaced_by_its_corpus(tmp_path):
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "1.txt").write_bytes(LINES)
    with pytest.raises(ValueError, match="not a prepared corpus"):
        run("text", tmp_path, tmp_path / "novel")
    assert (tmp_path / "novel" / "1.txt").read_bytes() == LINES


def test_a_terminal_shows_a_bar_per_split_and_removes_a_failed_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
    path = tmp_path / "story.txt"
    path.write_bytes(LINES + b"caf\xe9 \n" + LINES)
    failures = []
    for _ in range(2):
        with pytest.raises(ValueError, match="not UTF-8") as failure:
            run("text", tmp_path / "data", path, tokenizer="bpe")
        failures.append(failure)  # keeps every frame alive, and with it an open progress bar
    assert run("text", tmp_path / "data", path).vocab_size == 256
    said = capsys.readouterr().err
    assert all(f"writing {split}" in said for split in SPLITS)


@pytest.mark.slow
@needs(REAL / "enwik8" / "enwik8.xz")
def test_the_real_enwik8_takes_seconds(tmp_path):
    begin = time.process_time()
    corpus = run("enwik8", tmp_path, source=REAL / "enwik8" / "enwik8.xz")
    assert time.process_time() - begin < 15
    assert [len(corpus.split(split)) for split in SPLITS] == [90_000_000, 5_000_000, 5_000_000]
    assert [corpus.bytes(split) for split in SPLITS] == [90_000_000, 5_000_000, 5_000_000]
    whole = hashlib.md5(usedforsecurity=False)
    for split in SPLITS:
        whole.update(corpus.split(split))
    assert whole.hexdigest() == "a1fa5ffddb56f4953e226637dabbb36a"
    shutil.rmtree(tmp_path / "enwik8")  # pytest keeps temporary folders for a while


@needs(REAL / "wikitext" / "wikitext-2")
def test_the_real_wikitext2_has_the_published_counts(tmp_path, capsys):
    corpus = run("wikitext2", tmp_path, source=REAL / "wikitext" / "wikitext-2")
    assert [len(corpus.split(split)) for split in SPLITS] == [2_088_628, 217_646, 245_569]
    assert corpus.vocab_size == 33_278
    assert corpus.split("train").dtype.itemsize == 2
    assert "shuffled" in corpus.manifest.note
    assert "warning" not in capsys.readouterr().err
    assert corpus.tokenizer.words[:3] == [b"the", b",", b"."]
    with lzma.open(REAL / "wikitext" / "wikitext-2" / "wiki.test.tokens.xz") as file:
        expected = b"\n".join(b" ".join(line.split()) for line in file.read().split(b"\n"))
    unknown = corpus.tokenizer.words.index(b"<unk>")
    assert corpus.tokenizer.decode(corpus.split("test")) == expected
    assert (corpus.split("test") == unknown).sum() == expected.split().count(b"<unk>")


@needs(REAL / "wikitext" / "wikitext-103")
def test_wikitext103_without_its_train_split_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no wiki\.train\.tokens"):
        run("wikitext103", tmp_path, source=REAL / "wikitext" / "wikitext-103")


def test_the_books_are_prepared_from_their_folders(tmp_path):
    corpus = run("text", tmp_path, ROOT / "books", name="books")
    for split in SPLITS:
        files = sorted((ROOT / "books" / split).glob("*.txt"))
        assert corpus.split(split).tobytes() == b"".join(path.read_bytes() for path in files)
    assert Corpus.open(tmp_path / "books").manifest.splits["train"].tokens > 1_200_000
