"""PG-19 after the build: tokens, training, word-level perplexity, generation."""

import json
import math
import random
import tarfile

import numpy as np
import pytest
from helpers import ROOT
from training_helpers import command

from compressive.cli import main
from compressive.data.corpus import SPLITS, Corpus, write_corpus
from compressive.data.pg19.catalogue import official
from compressive.data.pg19.words import OFFICIAL
from compressive.data.prepare import prepare
from compressive.data.sources import PG19_FOLDERS, read_pg19
from compressive.data.tokenizer import BPETokenizer, ByteTokenizer
from compressive.evaluation.metrics import summarise

REAL = ROOT.parent / "shared" / "data" / "pg19"
WORDS = "the old ship sailed at dawn over a grey sea while our captain slept café naïve Æneas £5".split()  # noqa: SIM905


def book(number, lines=60):
    """Return a book as the build writes it: CRLF line ends, no final line end, non-ASCII letters."""
    generator = random.Random(number)
    told = [" ".join(generator.choices(WORDS, k=8)) + "." for _ in range(lines)]
    return b"\r\n\r\n\r\n\r\nProduced by nobody\r\n\r\n" + "\r\n".join(told).encode() + b"\r\n\r\n\r\n*** "


@pytest.fixture
def built(tmp_path):
    """Write a few books per split; numeric and alphabetical order differ."""
    folder = tmp_path / "built"
    for name, numbers in {"train": (9, 10, 101, 20), "validation": (3, 200), "test": (860, 77)}.items():
        (folder / name).mkdir(parents=True)
        for number in numbers:
            (folder / name / f"{number}.txt").write_bytes(book(number))
    (folder / "build.jsonl").write_text("")
    return folder


def run(built, data_dir, **values):
    defaults = {"source": built, "tokenizer": "auto", "vocab_size": None, "name": None, "split": (0.9, 0.05, 0.05)}
    if values.get("tokenizer") != "bytes" and "vocabulary" not in values:
        defaults["vocab_size"] = 320
    return prepare(corpus="pg19", paths=(), data_dir=data_dir, **(defaults | values))


def text_of(corpus):
    return {split: corpus.tokenizer.decode(corpus.split(split)) for split in SPLITS}


def test_books_are_in_order_of_id_and_end_with_a_line_feed(built, tmp_path):
    expected = {
        "train": b"".join(book(number) + b"\n" for number in (9, 10, 20, 101)),
        "valid": b"".join(book(number) + b"\n" for number in (3, 200)),
        "test": b"".join(book(number) + b"\n" for number in (77, 860)),
    }
    corpus = run(built, tmp_path / "data")
    corpus.verify()
    assert (corpus.folder, corpus.tokenizer.kind, corpus.vocab_size) == (tmp_path / "data" / "pg19", "bpe", 320)
    assert text_of(corpus) == expected
    assert text_of(run(built, tmp_path / "data", tokenizer="bytes", name="pg19-bytes")) == expected
    for split, name in PG19_FOLDERS.items():
        numbers = [int(path.stem) for path in (built / name).iterdir()]
        assert corpus.words(split) == sum(len(book(number).split()) for number in numbers)
        assert [source for source in corpus.manifest.sources if source.startswith(name)] == [
            f"{name}/{number}.txt" for number in sorted(numbers)
        ]


def test_files_that_are_not_books_are_ignored(built):
    before = read_pg19(built)
    (built / "test" / "notes.txt").write_text("x")
    (built / "test" / "860.txt.part").write_text("x")
    after = read_pg19(built)
    assert (after.sources, after.sizes) == (before.sources, before.sizes)


def test_line_ends_are_one_token(built, tmp_path):
    tokenizer = run(built, tmp_path / "data").tokenizer
    assert len(tokenizer.encode(b"\r\n")) == 1
    assert [tokenizer.decode([i]) for i in tokenizer.encode(b"dawn.\r\nthe")][-3:] == [b".", b"\r\n", b"the"]


def test_the_note_says_what_is_missing(built, tmp_path, capsys):
    corpus = run(built, tmp_path / "data")
    assert corpus.manifest.note == (
        "4 of 28,602 train books, 0 of them as published; 2 of 50 validation books, 0 of them as published; "
        "2 of 100 test books, 0 of them as published"
    )
    assert corpus.manifest.note in capsys.readouterr().out


def test_a_second_preparation_does_nothing_unless_a_book_has_changed(built, tmp_path, capsys):
    run(built, tmp_path / "data")
    run(built, tmp_path / "data")
    assert capsys.readouterr().out.count("already prepared") == 1
    run(None, tmp_path / "data")
    assert capsys.readouterr().out.count("already prepared") == 1
    (built / "test" / "860.txt").write_bytes(book(861))
    with pytest.raises(
        ValueError, match=r"of train/9\.txt and 7 more\), prepared from other files, test/860\.txt is not"
    ):
        run(built, tmp_path / "data")
    assert book(861) in text_of(run(built, tmp_path / "data", force=True))["test"]


def test_without_books_it_says_how_to_build_them(built, tmp_path, capsys):
    assert main(["data", "prepare", "pg19", "--data-dir", str(tmp_path / "data")]) == 2
    said = capsys.readouterr().err
    assert "compressive data pg19 build" in said
    assert "--source" in said
    (built / "validation" / "3.txt").unlink()
    (built / "validation" / "200.txt").unlink()
    assert main(["data", "prepare", "pg19", "--source", str(built), "--data-dir", str(tmp_path / "data")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{built / 'validation'} has no books" in said
    assert not (tmp_path / "data").exists()


def test_no_word_of_an_open_vocabulary_is_lost(built, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer='words'.*bpe or bytes"):
        run(built, tmp_path / "data", tokenizer="words")


@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_vocabulary_is_used_again(built, tmp_path, given, capsys):
    first = run(built, tmp_path / "data")
    vocabulary = first.folder if given == "folder" else first.folder / "tokenizer.json"
    (built / "train" / "9.txt").write_bytes(b"quite other words, from which other subwords would be learnt\r\n" * 50)
    second = run(built, tmp_path / "data", vocabulary=vocabulary, name="again")
    assert second.manifest.tokenizer_sha256 == first.manifest.tokenizer_sha256
    assert second.vocab_size == 320
    assert second.split("test").tolist() == first.split("test").tolist()
    assert second.split("train").tolist() != first.split("train").tolist()
    assert second.manifest.settings["vocabulary"] == first.manifest.tokenizer_sha256
    capsys.readouterr()
    run(built, tmp_path / "data", vocabulary=vocabulary, name="again")
    assert "already prepared" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--vocabulary is one of bpe"):
        run(built, tmp_path / "data", vocabulary=vocabulary, tokenizer="bytes")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        run(built, tmp_path / "data", vocabulary=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="vocab_size=300: --vocabulary has its own size"):
        run(built, tmp_path / "data", vocabulary=vocabulary, vocab_size=300)


def test_a_long_text_is_learnt_from_in_part(built, tmp_path, monkeypatch):
    (built / "train" / "9.txt").write_bytes(b"zebra " * 2000)  # the first part, which is always used
    (built / "train" / "20.txt").write_bytes(b"xylophone " * 2000)
    monkeypatch.setattr("compressive.data.prepare.LEARNT", 8_000)  # a fifth of the text
    monkeypatch.setattr("compressive.data.tokenizer.CHUNK", 8192)
    tokenizer = run(built, tmp_path / "data").tokenizer
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    assert any(b"zebr" in token for token in tokens)
    assert not any(b"xyl" in token for token in tokens)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="the real books are not here: shared/data/pg19")
def test_real_books_round_trip():
    books = []
    with tarfile.open(REAL / "books-validation.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            content = b"" if file is None else file.read()
            try:
                books.append(content.decode("utf-8").encode())
            except UnicodeDecodeError:
                books.append(content.decode("latin-1").encode())
    books = [content for content in books if content]
    assert len(books) == 19
    tokenizer = BPETokenizer.train(books[:4], 2000)
    for content in books:
        assert tokenizer.decode(tokenizer.encode(content)) == content
    assert sum(any(byte > 127 for byte in content) for content in books) >= 5


def scored(built, data_dir, nats_of):
    """Return the same books as bytes and as subwords, with the nats of each."""
    for tokenizer in ("bytes", "bpe"):
        corpus = run(built, data_dir, tokenizer=tokenizer, name=tokenizer)
        yield corpus, summarise(nats_of(corpus), corpus, "test")


def test_uniform_models_have_the_word_perplexity_they_must(built, tmp_path):
    uniform = scored(built, tmp_path, lambda corpus: np.full(len(corpus.split("test")), math.log(corpus.vocab_size)))
    (by_bytes, bytes_metrics), (_, bpe_metrics) = uniform
    words = sum(len(book(number).split()) for number in (77, 860))
    assert bytes_metrics.words == bpe_metrics.words == words
    assert bytes_metrics.words_are == bpe_metrics.words_are == "counted"
    assert bytes_metrics.word_perplexity == pytest.approx(256 ** (by_bytes.bytes("test") / words))
    assert bpe_metrics.word_perplexity == pytest.approx(320 ** (bpe_metrics.tokens / words))


def test_the_same_probabilities_give_the_same_word_perplexity_through_bytes_and_subwords(built, tmp_path):
    """A byte-level model can match any subword model: split each subword's nats over its bytes."""
    generator = np.random.default_rng(0)
    subwords = run(built, tmp_path, name="bpe")
    tokens = subwords.split("test")
    nats = generator.random(len(tokens))
    lengths = [len(subwords.tokenizer.decode([token])) for token in tokens.tolist()]
    by_byte = np.concatenate([n * generator.dirichlet(np.ones(k)) for n, k in zip(nats, lengths, strict=True)])
    (_, from_bytes), (_, from_bpe) = scored(
        built, tmp_path, lambda corpus: by_byte if corpus.tokenizer.kind == "bytes" else nats
    )
    assert from_bytes.tokens > 2 * from_bpe.tokens
    assert from_bytes.word_perplexity == pytest.approx(from_bpe.word_perplexity)
    assert from_bytes.perplexity < 0.9 * from_bpe.perplexity  # per-token perplexities are not comparable
    assert from_bytes.headline == from_bpe.headline == "word_perplexity"


def with_books(folder, names, tokenizer=None):
    """Return a prepared PG-19 whose manifest lists these books."""
    splits = {split: [b"to be or not to be\r\n"] for split in SPLITS}
    sources = dict.fromkeys(names, "00")
    return write_corpus(folder, "mine", tokenizer or ByteTokenizer(), splits, sources, "", {"corpus": "pg19"})


@pytest.mark.parametrize("split", SPLITS)
def test_a_complete_split_is_divided_by_the_official_words(tmp_path, split):
    name = PG19_FOLDERS[split]
    names = [f"{book.split}/{book.id}.txt" for book in official().values() if book.split == name]
    assert len(names) == OFFICIAL[name].books
    expected = {"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499}[split]
    for tokenizer in (ByteTokenizer(), BPETokenizer.train([b"to be or not to be"] * 3, 260)):
        corpus = with_books(tmp_path / tokenizer.kind, names, tokenizer)
        nats = np.full(len(corpus.split(split)), expected * math.log(30) / len(corpus.split(split)))
        found = summarise(nats, corpus, split)
        assert (found.words, found.words_are, found.counted_words) == (expected, "official", 6)
        assert (found.comparable, found.not_comparable) == (True, None)
        assert found.word_perplexity == pytest.approx(30)
    part = summarise(nats[:-1], corpus, split)
    assert (part.comparable, part.words, part.word_perplexity) == (False, None, None)
    assert part.not_comparable == "the beginning of the split only"


def test_an_incomplete_split_is_divided_by_its_own_words_and_marked(tmp_path):
    test = [book.id for book in official().values() if book.split == "test"]
    for numbers, why in (
        (test[:38], "38 of 100 books, counted words"),
        ([*test[:99], 1], "99 of 100 books, 1 besides, counted words"),
        ([*test, 1], "100 of 100 books, 1 besides, counted words"),
    ):
        corpus = with_books(tmp_path / "mine", [f"test/{number}.txt" for number in numbers])
        found = summarise(np.ones(20), corpus, "test")
        assert (found.words, found.words_are, found.comparable) == (6, "counted", False)
        assert found.not_comparable == why
        assert found.word_perplexity == pytest.approx(math.exp(20 / 6))


@pytest.mark.slow
def test_from_books_to_a_continued_book_with_real_commands(built, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    data, out = tmp_path / "data", tmp_path / "run"
    small = "--model.vocab-size 320 --model.n-layers 2 --model.d-model 16 --model.d-ff 32 --model.window 16 "
    small += "--model.memory-size 16 --model.compressed-size 8 --train.batch 2 --train.steps 12 --train.eval-every 6 "
    small += "--train.sample-every 0 --train.device cpu"

    made = command("data", "prepare", "pg19", "--source", built, "--data-dir", data, "--name", "pg19-small",
                   "--vocab-size", "320", "--workers", "2")  # fmt: skip
    assert made.returncode == 0, made.stderr
    corpus = Corpus.open(data / "pg19-small")
    assert text_of(corpus)["test"] == book(77) + b"\n" + book(860) + b"\n"

    trained = command("train", "pg19-small", "--data.data-dir", data, "--out", out, *small.split())
    assert trained.returncode == 0, trained.stderr

    evaluated = command("evaluate", out, "--split", "test", "--device", "cpu", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads(evaluated.stdout)
    words = corpus.words("test")
    assert (found["tokens"], found["words"], found["words_are"]) == (len(corpus.split("test")), words, "counted")
    assert found["comparable"] is False
    assert found["not_comparable"] == "1 of 100 books, 1 besides, counted words"  # 860 is in the test split, 77 is not
    assert found["word_perplexity"] == pytest.approx(math.exp(found["nats"] / words))
    shown = command("evaluate", out, "--split", "test", "--device", "cpu").stdout
    assert "word perplexity" in shown.splitlines()[1]
    assert f"over {words:,} counted words" in shown
    assert "not comparable" in shown
    assert main(["evaluate", str(out), "--memory-size", "8,16", "--limit", "100", "--device", "cpu"]) == 0
    assert "not comparable: the beginning of the split only" in capsys.readouterr().out

    opening = built / "test" / "860.txt"
    sampled = command("generate", out, "--prompt-file", opening, "--prompt-length", "40", "--length", "30")
    assert sampled.returncode == 0, sampled.stderr
    assert "prompt of 40 tokens" in sampled.stderr
    assert sampled.stdout.strip()
