"""Preparing corpora end to end: small fakes always, real corpora if available."""

import dataclasses
import hashlib
import lzma
import re
import shutil
import time
import zipfile

import pytest
from data_helpers import pack, sha
from helpers import ROOT

from compressive.data import prepare as module
from compressive.data import sources
from compressive.data.corpus import SPLITS, Corpus, write_corpus
from compressive.data.download import DownloadError
from compressive.data.prepare import prepare
from compressive.data.sources import PUBLISHED
from compressive.data.tokenizer import ByteTokenizer

REAL = ROOT.parent / "shared" / "data"
CONTENT = b"<page>\n some bytes of it \n</page>\n" * 3
LINES = "".join(f"line {i} of the story, told {i} times\n" for i in range(400)).encode()


def run(corpus, data_dir, *paths, **values):
    defaults = {
        "source": None, "tokenizer": "auto", "name": None, "split": (0.9, 0.05, 0.05),
        "vocab_size": 300 if values.get("tokenizer") == "bpe" else None,
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


def test_another_corpus_of_the_same_name_is_replaced_only_by_force(tmp_path):
    path = tmp_path / "story.txt"
    path.write_bytes(LINES)
    first = run("text", tmp_path / "data", path)
    assert first.name == "story"
    files = {file: file.read_bytes() for file in first.folder.iterdir()}
    held = rf"data/story holds another corpus \(bytes, vocabulary 256, {len(LINES):,} tokens of story\.txt\)"
    remedy = "choose another --name, or replace it with --force"
    with pytest.raises(ValueError, match=f"{held}, prepared with tokenizer bytes, not tokenizer bpe, vocab_size 300: "):
        run("text", tmp_path / "data", path, tokenizer="bpe")
    with pytest.raises(
        ValueError, match=r"prepared with split 0\.9 0\.05 0\.05, not split 0\.5 0\.25 0\.25: " + remedy
    ):
        run("text", tmp_path / "data", path, split=(0.5, 0.25, 0.25))
    path.write_bytes(LINES.upper())
    with pytest.raises(ValueError, match=rf"{held}, prepared from other files, story\.txt is not the same: {remedy}"):
        run("text", tmp_path / "data", path)
    assert {file: file.read_bytes() for file in first.folder.iterdir()} == files

    second = run("text", tmp_path / "data", path, force=True)
    assert second.split("train").tobytes() == first.tokenizer.decode(second.split("train")) != b""
    assert second.split("train").tobytes().isupper()
    third = run("text", tmp_path / "data", path, split=(0.5, 0.25, 0.25), force=True)
    assert third.bytes("train") < second.bytes("train")
    assert run("text", tmp_path / "data", path, tokenizer="bpe", force=True).tokenizer.kind == "bpe"


def test_the_same_files_in_another_order_are_another_corpus(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(LINES + name.encode())
    run("text", tmp_path / "data", tmp_path / "a.txt", tmp_path / "b.txt", name="x")
    with pytest.raises(ValueError, match=r"tokens of a\.txt and 1 more\), prepared from other files, in another order"):
        run("text", tmp_path / "data", tmp_path / "b.txt", tmp_path / "a.txt", name="x")


def test_an_existing_corpus_is_refused_before_any_download(tmp_path, fakes, monkeypatch):
    run("enwik8", tmp_path, source=pack(tmp_path / "e.xz", "", CONTENT))
    monkeypatch.setattr(module, "download", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(ValueError, match="enwik8 holds another corpus"):
        run("enwik8", tmp_path, tokenizer="bpe")
    with pytest.raises(ValueError, match="enwik8 holds another corpus"):
        run("wikitext2", tmp_path, name="enwik8")
    write_corpus(tmp_path / "enwik8", "enwik8", ByteTokenizer(), {split: [b"x"] for split in SPLITS}, {})
    with pytest.raises(
        ValueError, match=r"3 tokens of an unknown source\), prepared with no settings, not corpus enwik8"
    ):
        run("enwik8", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "damage"),
    [
        ("train.bin", b"", "train.bin has 0 bytes, expected 90 bytes"),
        ("test.bin", None, "test.bin is missing"),
        ("manifest.json", b"{}", "manifest.json cannot be used"),
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("tokenizer.json", b"half of it", "tokenizer.json cannot be used"),
        ("tokenizer.json", b'{"kind": "words"}', r"tokenizer.json cannot be used \('words'\)"),
    ],
)
def test_a_damaged_corpus_is_named_and_replaced_only_by_force(tmp_path, fakes, file, content, damage):
    source = pack(tmp_path / "e.xz", "", CONTENT)
    folder = run("enwik8", tmp_path, source=source).folder
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    for given in (source, None):
        with pytest.raises((ValueError, FileNotFoundError), match=f"{damage}.* again with --force"):
            run("enwik8", tmp_path, source=given)
    run("enwik8", tmp_path, source=source, force=True).verify()


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
        ("enwik8", {"workers": 100_000}, "workers=100000: expected at least 1, at most"),
        ("enwik8", {"vocab_size": 0}, "vocab_size=0: only bpe learns a vocabulary of a given size"),
        ("enwik8", {"tokenizer": "bpe", "vocab_size": 0}, "vocab_size=0: expected at least 256"),
        ("enwik8", {"tokenizer": "bpe", "vocab_size": -1}, "vocab_size=-1: expected at least 256"),
        ("enwik8", {"tokenizer": "bpe", "vocab_size": 10**12}, "vocab_size=1000000000000: .* at most 10,000,000"),
        ("speech", {"vocab_size": 300}, "vocab_size=300: .* the tokenizer is mulaw"),
        ("enwik8", {"split": (0.5, 0.25, 0.5)}, "three shares above 0 that sum to 1"),
        ("speech", {"split": (1.0, 0.5, -0.5)}, "three shares above 0 that sum to 1"),
        ("text", {"split": (float("nan"), 0.5, 0.5)}, "three shares above 0 that sum to 1"),
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
    with pytest.raises(ValueError, match="2 paths: enwik8 is read from one file or folder"):
        run("enwik8", tmp_path, tmp_path / "a.txt", tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"a\.txt and --source .*b\.txt: expected one of the two"):
        run("text", tmp_path, tmp_path / "a.txt", source=tmp_path / "b.txt")
    with pytest.raises(ValueError, match="--name"):
        run("text", tmp_path, tmp_path / "a.txt", tmp_path / "b.txt")
    with pytest.raises(FileNotFoundError, match="is not a file: expected enwik8"):
        run("enwik8", tmp_path, source=tmp_path)
    with pytest.raises(ValueError, match=r"a\.txt: is a file, expected a folder for corpora"):
        run("text", tmp_path / "a.txt", tmp_path / "b.txt")
    (tmp_path / "a.txt").write_bytes(b"one line and no more")
    with pytest.raises(ValueError, match="valid split of a is empty"):
        run("text", tmp_path, tmp_path / "a.txt")


def test_a_path_and_a_source_are_the_same(tmp_path, fakes):
    path = tmp_path / "story.txt"
    path.write_bytes(LINES)
    for corpus, file in (("text", path), ("enwik8", pack(tmp_path / "e.zip", "enwik8", CONTENT))):
        made = run(corpus, tmp_path / "a", file), run(corpus, tmp_path / "b", source=file)
        assert made[0].manifest == made[1].manifest
        assert made[0].name == {"text": "story", "enwik8": "enwik8"}[corpus]


@pytest.mark.parametrize("tokenizer", ["words", "bpe"])
def test_a_file_that_is_no_text_is_named_before_anything_is_learnt(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 7)  # blocks cut characters
    good = "façade € 😀\n".encode() * 20
    for split in SPLITS:
        (tmp_path / "in" / split).mkdir(parents=True)
        (tmp_path / "in" / split / "a.txt").write_bytes(good)
    assert run("text", tmp_path / "data", tmp_path / "in", tokenizer=tokenizer, name="good").words("train") == 60
    bad = tmp_path / "in" / "valid" / "b.txt"
    monkeypatch.setattr(module, "write_corpus", lambda *_: pytest.fail("written"))
    for content, wrong in (
        (good + b"\x89PNG" + good, f"byte 0x89 at offset {len(good):,} is not UTF-8"),
        (good + b"\xe2\x82", f"byte 0xe2 at offset {len(good):,} is not UTF-8"),  # cut short
    ):
        bad.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"{bad}: {wrong}, which --tokenizer {tokenizer} needs: .*--tokenizer bytes$"
        ):
            run("text", tmp_path / "data", tmp_path / "in", tokenizer=tokenizer, name="bad")


def test_words_refuse_nul_bytes_which_the_others_take(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("b.txt", LINES + b"\0" + LINES)
    with pytest.raises(
        ValueError, match=rf"a\.zip/b\.txt: NUL byte at offset {len(LINES):,}, .*use --tokenizer bytes or bpe"
    ):
        run("text", tmp_path / "data", tmp_path / "a.zip", tokenizer="words")
    for tokenizer in ("bytes", "bpe"):
        corpus = run("text", tmp_path / "data", tmp_path / "a.zip", tokenizer=tokenizer, name=tokenizer)
        assert b"\0" in b"".join(corpus.tokenizer.decode(corpus.split(split)) for split in SPLITS)


def test_a_vocabulary_smaller_than_asked_for_says_why(tmp_path, capsys):
    path = tmp_path / "story.txt"
    path.write_bytes(LINES)
    whole = run("text", tmp_path, path, tokenizer="bpe", vocab_size=5000)
    assert (
        f"warning: vocabulary of {whole.vocab_size:,}, 5,000 asked for: no pairs are left to merge, every word of the "
        "train split is one token\n"
    ) in capsys.readouterr().err
    words = set(re.findall(rb" ?[a-z]+| ?\d+|,|\n", whole.tokenizer.decode(whole.split("train"))))
    assert all(len(whole.tokenizer.encode(word)) == 1 for word in words)
    run("text", tmp_path, path, tokenizer="bpe", name="less")
    assert "warning" not in capsys.readouterr().err


def test_the_text_itself_is_never_replaced_by_its_corpus(tmp_path):
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "1.txt").write_bytes(LINES)
    with pytest.raises(ValueError, match="not a prepared corpus"):
        run("text", tmp_path, tmp_path / "novel")
    assert (tmp_path / "novel" / "1.txt").read_bytes() == LINES
    for force in (False, True):  # another program's manifest.json does not make it a corpus
        (tmp_path / "novel" / "manifest.json").write_text('{"name": "novel"}')
        with pytest.raises(
            ValueError, match=r"manifest\.json cannot be used|holds 1\.txt, which is no file of a corpus"
        ):
            run("text", tmp_path, tmp_path / "novel", force=force)
        assert (tmp_path / "novel" / "1.txt").read_bytes() == LINES


def test_a_user_s_file_in_a_corpus_is_not_deleted_with_it(tmp_path):
    (tmp_path / "novel.txt").write_bytes(LINES)
    folder = run("text", tmp_path, tmp_path / "novel.txt").folder
    (folder / ".DS_Store").touch()
    (folder / "notes.md").write_text("mine")
    run("text", tmp_path, tmp_path / "novel.txt")  # the same corpus stays as it is
    with pytest.raises(ValueError, match=r"novel holds notes\.md, which is no file of a corpus: move it"):
        run("text", tmp_path, tmp_path / "novel.txt", tokenizer="bpe", force=True)
    (folder / "notes.md").unlink()
    assert run("text", tmp_path, tmp_path / "novel.txt", tokenizer="bpe", force=True).tokenizer.kind == "bpe"


def test_a_terminal_shows_a_bar_per_split_and_removes_a_failed_one(tmp_path, fakes, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
    latin = b"caf\xe9".ljust(len(CONTENT))
    small = dataclasses.replace(PUBLISHED["enwik8"], contents={"enwik8": sha(latin)}, cuts=(90, 95))
    for place in (sources, module):
        monkeypatch.setattr(place, "PUBLISHED", {"enwik8": small})
    path = pack(tmp_path / "e.xz", "", latin)
    failures = []
    for _ in range(2):
        with pytest.raises(ValueError, match="not UTF-8") as failure:
            run("enwik8", tmp_path / "data", source=path, tokenizer="bpe")
        failures.append(failure)  # keeps every frame alive, and with it an open progress bar
    assert run("enwik8", tmp_path / "data", source=path).vocab_size == 256
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
