"""The corpus on disk: written atomically, checked, memory-mapped; and streams, which are views into it."""

import json
import os
import subprocess
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive.data import corpus as module
from compressive.data.corpus import SPLITS, Corpus, Streams, write_corpus
from compressive.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, WordTokenizer

TEXT = {
    "train": [b"one two ", b"three\nfo", b"ur ", b"", b"five\n"],
    "valid": [b"\n  two\tthree\r\n"],
    "test": [b"six"],
}
WHOLE = {split: b"".join(chunks) for split, chunks in TEXT.items()}


def write(folder, tokenizer=None, text=TEXT, **values):
    return write_corpus(folder, folder.name, tokenizer or ByteTokenizer(), text, {"a.txt": "00"}, **values)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), WordTokenizer.train(TEXT["train"]), BPETokenizer.train(TEXT["train"], 270)],
    ids=lambda tokenizer: tokenizer.kind,
)
def test_a_written_corpus_is_read_back(tokenizer, tmp_path):
    made = write(tmp_path / "tiny", tokenizer, note="odd")
    made.verify()
    again = Corpus.open(tmp_path / "tiny")
    assert again == made
    assert (again.name, again.vocab_size, again.manifest.note) == ("tiny", tokenizer.vocab_size, "odd")
    assert again.manifest.sources == {"a.txt": "00"}
    assert again.tokenizer.kind == again.manifest.tokenizer == tokenizer.kind
    for split in SPLITS:
        tokens = again.split(split)
        assert isinstance(tokens, np.memmap)
        assert not tokens.flags.writeable
        assert tokens.dtype == tokenizer.dtype
        assert tokens.tolist() == tokenizer.encode(WHOLE[split]).tolist()
        assert again.manifest.splits[split].tokens == len(tokens)
        assert again.words(split) == len(WHOLE[split].split())
        assert again.bytes(split) == len(WHOLE[split])
    assert {path.name for path in tmp_path.iterdir()} == {"tiny"}
    assert set(files(tmp_path / "tiny")) == {
        "train.bin", "valid.bin", "test.bin", "manifest.json", "tokenizer.json",
    }  # fmt: skip


@given(text=st.text("ab \n\t\r\v\f\x1c\xa0é", max_size=30), cuts=st.lists(st.integers(0, 50), max_size=4))
@settings(deadline=None)
def test_words_are_counted_across_chunks(text, cuts):
    data = text.encode()
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    count = module._TextCount()
    chunks = [data[a:b] for a, b in pairwise(places)]
    assert b"".join(count.watch(chunks)) == data
    assert (count.bytes, count.words) == (len(data), len(data.split()))


def broken(error):
    yield b"half of "
    raise error


@pytest.mark.parametrize("error", [ValueError("no more"), KeyboardInterrupt()])
@pytest.mark.parametrize("split", SPLITS)
def test_a_crash_half_way_leaves_the_old_corpus_untouched(tmp_path, split, error):
    for _ in range(2):  # without a corpus, then with a complete one
        before = files(tmp_path / "tiny") if (tmp_path / "tiny").exists() else None
        with pytest.raises(type(error)):
            write(tmp_path / "tiny", text=TEXT | {split: broken(error)})
        if before is None:
            assert list(tmp_path.iterdir()) == []
            with pytest.raises(FileNotFoundError, match="run: compressive data prepare text FOLDER --name tiny"):
                Corpus.open(tmp_path / "tiny")
        else:
            assert files(tmp_path / "tiny") == before
        write(tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("enwik8", "run: compressive data prepare enwik8; "),
        ("libritts", "run: compressive data prepare libritts; "),
        ("pg19-small", "run: compressive data prepare pg19 --source BUILT --name pg19-small; "),
        ("speech", "run: compressive data prepare speech FOLDER; "),
        ("books", "run: compressive data prepare text FOLDER --name books (for audio: speech FOLDER); "),
    ],
)
def test_a_missing_corpus_is_named_with_its_command_and_those_that_are_there(tmp_path, name, command):
    with pytest.raises(FileNotFoundError) as none:
        Corpus.open(tmp_path / name)
    assert f"no corpus in {tmp_path / name}: {command}{tmp_path} has no corpora; " in str(none.value)
    assert "--data-dir, in train --data.data-dir" in str(none.value)
    (tmp_path / "downloads").mkdir()
    for other in ("tiny", "small"):
        write(tmp_path / other)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has small, tiny; "):
        Corpus.open(tmp_path / name)


def test_a_killed_process_leaves_no_corpus(tmp_path):
    script = """
import os, sys
from pathlib import Path
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import ByteTokenizer

def chunks():
    yield b"text"
    os.kill(os.getpid(), 9)

write_corpus(Path(sys.argv[1]), "tiny", ByteTokenizer(), {"train": [b"a"], "valid": [b"b"], "test": chunks()}, {})
"""
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "tiny")], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tiny.")
    write(tmp_path / "tiny")
    assert left.exists()  # another process may still be writing it
    os.utime(left, (0, 0))
    write(tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_failed_swap_puts_the_old_corpus_back(tmp_path, monkeypatch):
    write(tmp_path / "tiny")
    before = files(tmp_path / "tiny")
    rename = type(tmp_path).rename

    def refuse(self, target):
        if self.suffix == ".part":
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", refuse)
    with pytest.raises(OSError, match="disk gone"):
        write(tmp_path / "tiny", text=TEXT | {"test": [b"other"]})
    assert files(tmp_path / "tiny") == before


def test_a_new_corpus_replaces_an_old_one_but_nothing_else(tmp_path):
    write(tmp_path / "tiny")
    write(tmp_path / "tiny", WordTokenizer.train(TEXT["train"]))
    assert Corpus.open(tmp_path / "tiny").tokenizer.kind == "words"
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine")  # an empty folder may be replaced
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "chapter.txt").write_bytes(b"call me")
    with pytest.raises(ValueError, match="not a prepared corpus"):
        write(tmp_path / "novel")
    assert files(tmp_path / "novel") == {"chapter.txt": b"call me"}


@pytest.mark.parametrize("kind", ["bytes", "words", "bpe"])
def test_several_workers_write_the_same_as_one(tmp_path, kind, monkeypatch):
    line = "The naïve captain's 3 ships —\r\n\r\n   sailed\tfor \u3000 home…\n\n".encode()
    monkeypatch.setattr(
        "compressive.data.tokenizer.CHUNK", 97
    )  # many parts; the text is cut anywhere, even within characters
    whole = line * 60
    tokenizer: Tokenizer = ByteTokenizer()
    if kind == "words":
        tokenizer = WordTokenizer.train([whole])
    elif kind == "bpe":
        tokenizer = BPETokenizer.train([whole], 300)
    cuts = [0, 1, 2, *range(3, len(whole), 53), len(whole)]
    text = {
        "train": [whole[a:b] for a, b in pairwise(cuts)],
        "valid": [whole],
        "test": [b"", *(bytes([byte]) for byte in line), b""],
    }
    one, two = (write(tmp_path / str(n), tokenizer, text, workers=n) for n in (1, 2))
    for split in SPLITS:
        assert two.split(split).tobytes() == one.split(split).tobytes()
    assert two.manifest.splits == one.manifest.splits


def test_an_error_in_a_worker_has_the_same_message(tmp_path):
    tokenizer = BPETokenizer.train(TEXT["train"], 270)
    with pytest.raises(ValueError, match=r"0xe9 at offset 22 .*--tokenizer bytes"):
        write(tmp_path / "tiny", tokenizer, TEXT | {"train": [b"fine words ", b"and one caf\xe9 "]}, workers=2)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="valid split of tiny is empty"):
        write(tmp_path / "tiny", text=TEXT | {"valid": [b""]})
    with pytest.raises(ValueError, match="expected train, valid, test"):
        write(tmp_path / "tiny", text={"train": [b"a"]})


def test_tampering_is_detected(tmp_path):
    folder = tmp_path / "tiny"
    for name in ("train.bin", "valid.bin", "test.bin", "tokenizer.json"):
        corpus = write(folder)
        data = bytearray((folder / name).read_bytes())
        data[0] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name} has SHA-256 .* prepare it again with --force"):
            corpus.verify()


def test_a_truncated_or_missing_file_is_detected_at_once(tmp_path):
    folder = tmp_path / "tiny"
    write(folder)
    (folder / "train.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"train\.bin has 5 bytes, expected 24"):
        Corpus.open(folder)
    (folder / "train.bin").unlink()
    with pytest.raises(ValueError, match="is missing"):
        Corpus.open(folder)


@pytest.mark.parametrize("change", [{"format": 99}, {"splits": {}}, {"surplus": 1}])
def test_a_damaged_manifest_is_named(tmp_path, change):
    folder = tmp_path / "tiny"
    write(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(ValueError, match=r"manifest\.json cannot be used .* prepare it again with --force"):
        Corpus.open(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be used"):
        Corpus.open(folder)


def test_an_unknown_split_is_named(tmp_path):
    corpus = write(tmp_path / "tiny")
    for ask in (corpus.split, corpus.words, corpus.bytes):
        with pytest.raises(ValueError, match=r"'dev'.*train, valid, test"):
            ask("dev")


@pytest.mark.slow
def test_writing_takes_little_memory(tmp_path):
    line = b"the same few words again and again\n" * 30_000  # about 1 MB
    tokenizer = WordTokenizer.train([line])
    tracemalloc.start()
    try:
        write(tmp_path / "big", tokenizer, TEXT | {"train": (line for _ in range(8))})
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


@given(size=st.integers(2, 60), batch=st.integers(1, 12), window=st.integers(1, 9))
@settings(deadline=None)
def test_streams_cover_every_token_once(size, batch, window):
    tokens = np.arange(size, dtype=np.uint16)
    if size // batch < 2:
        with pytest.raises(ValueError, match=f"batch={batch}: {size} tokens"):
            Streams(tokens, batch)
        return
    streams = Streams(tokens, batch)
    windows = [streams.window(start, window) for start in range(0, streams.length, window)]
    inputs, targets = (np.concatenate(parts, axis=1) for parts in zip(*windows, strict=True))
    assert inputs.shape == targets.shape == (batch, streams.length)
    length = size // batch
    assert (targets == inputs + 1).all()
    seen = np.concatenate([inputs, targets[:, -1:]], axis=1)
    assert seen.ravel().tolist() == list(range(batch * length))
    assert all(x.shape[1] == window for x, _ in windows[:-1])


def test_a_window_is_a_view_into_the_file(tmp_path):
    for tokenizer in (ByteTokenizer(), BPETokenizer.train([b"some merges, some more merges"], 260)):
        text = TEXT | {"train": [bytes(range(128))]}
        tokens = write(tmp_path / tokenizer.kind, tokenizer, text).split("train")
        inputs, targets = Streams(tokens, 4).window(3, 7)
        for array in (inputs, targets):
            assert np.shares_memory(array, tokens)
            assert not array.flags.owndata
            assert not array.flags.writeable
    assert np.shares_memory(inputs, targets)


@given(batch=st.integers(1, 8), ranks=st.integers(1, 8))
@settings(deadline=None)
def test_ranges_of_streams_together_are_the_batch(batch, ranks):
    tokens = np.arange(100, dtype=np.uint8)
    bounds = [batch * rank // ranks for rank in range(ranks + 1)]
    whole = Streams(tokens, batch)
    shares = [Streams(tokens, batch, a, b - a) for a, b in pairwise(bounds) if b > a]
    assert all(share.length == whole.length for share in shares)
    for i in range(2):
        parts = [share.window(5, 4)[i] for share in shares]
        assert np.concatenate(parts).tolist() == whole.window(5, 4)[i].tolist()
    assert Streams(tokens, batch, batch - 1).count == 1


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": 2, "first": 2}, "count=0"),
        ({"batch": 2, "first": -1}, "first=-1"),
        ({"batch": 2, "first": 1, "count": 2}, "count=2"),
        ({"batch": 6}, "streams of 1, expected at least 2 in each; use a batch of at most 5"),
    ],
)
def test_impossible_streams_are_refused(values, match):
    with pytest.raises(ValueError, match=match):
        Streams(np.arange(10, dtype=np.uint8), **values)


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (4, 1), (0, 0)])
def test_a_window_outside_the_streams_is_refused(start, size):
    with pytest.raises(ValueError, match="from 0 to 3"):
        Streams(np.arange(10, dtype=np.uint8), 2).window(start, size)
    with pytest.raises(ValueError, match="one row"):
        Streams(np.zeros((2, 5), np.uint8), 2)


def test_streams_mark_where_clips_and_streams_begin():
    clips = np.array([0, 5, 6, 11, 19])
    streams = Streams(np.arange(22, dtype=np.uint8), 2, clips=clips)  # 0 to 10 and 11 to 21
    found = np.concatenate([streams.starts(at, 4) for at in (0, 4, 8)], axis=1)
    assert found.shape == (2, 10)
    assert found[0].nonzero()[0].tolist() == [0, 5, 6]
    assert found[1].nonzero()[0].tolist() == [0, 8]
    third = Streams(np.arange(21, dtype=np.uint8), 3, first=2, count=1, clips=clips)  # 14 to 20, starts within a clip
    later = third.starts(0, 6)
    assert later is not None
    assert later[0].nonzero()[0].tolist() == [0, 5]


def test_a_corpus_without_clips_has_no_starts(tmp_path):
    corpus = write_corpus(tmp_path / "a", "a", ByteTokenizer(), {name: [b"text"] for name in SPLITS}, {})
    assert corpus.starts("test") is None
    assert corpus.clips == ()
    with pytest.raises(ValueError, match="split='dev'"):
        corpus.starts("dev")
