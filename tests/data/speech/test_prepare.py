"""`compressive data prepare speech`: from audio files to a corpus; bad files are skipped and named."""

import json
import sys
import tarfile
import tracemalloc

import numpy as np
import pytest
from helpers import ROOT
from speech_helpers import starts_of, tone, write_audio

from compressive.cli import main
from compressive.data.corpus import Corpus, SplitInfo
from compressive.data.speech.audio import read_wav
from compressive.data.speech.clips import by_shares
from compressive.data.speech.codes import MuLawTokenizer

REAL = ROOT.parent / "shared" / "data" / "speech" / "callie"


def prepare(*words):
    return main(["data", "prepare", *map(str, words)])


@pytest.fixture
def clips(tmp_path):
    for split, names in (("train", "abc"), ("valid", "d"), ("test", "e")):
        for i, name in enumerate(names):
            write_audio(tmp_path / "in" / split / f"{name}.wav", tone(0.3 + 0.1 * i, 16_000), 16_000)
    return tmp_path / "in"


def test_a_corpus_of_clips(clips, tmp_path, capsys):
    assert prepare("speech", "--source", clips, "--data-dir", tmp_path / "data") == 0
    corpus = Corpus.open(tmp_path / "data" / "speech")
    corpus.verify()
    assert corpus.tokenizer.kind == "mulaw"
    assert starts_of(corpus, "train").tolist() == [0, 7200, 16800]
    assert starts_of(corpus, "test").tolist() == [0]
    assert [clip.source for clip in corpus.clips] == [f"train/{x}.wav" for x in "abc"] + ["valid/d.wav", "test/e.wav"]
    info = corpus.manifest.splits["train"]
    assert info == SplitInfo(28_800, 57_600, 0, info.sha256)
    heard = np.frombuffer(corpus.tokenizer.decode(corpus.split("train")[:7200]), "<i2")
    assert np.abs(heard / 32768 - tone(0.3)).max() < 0.03
    assert prepare("speech", "--source", clips, "--data-dir", tmp_path / "data") == 0
    assert "already prepared" in capsys.readouterr().out


def test_sixteen_bits(clips, tmp_path):
    samples = (3000 * np.sin(np.arange(9000) / 9)).astype(np.int16)
    write_audio(clips / "test" / "e.wav", samples)
    assert prepare("speech", "--source", clips, "--data-dir", tmp_path, "--tokenizer", "pcm16", "--name", "x") == 0
    corpus = Corpus.open(tmp_path / "x")
    assert corpus.vocab_size == 65_536
    assert np.array_equal(corpus.split("test").astype(int) - 32_768, samples)


def test_bad_clips_are_named_counted_and_left_out(clips, tmp_path, capsys):
    bad = clips / "train"
    (bad / "empty.wav").touch()
    (bad / "corrupt.flac").write_bytes(b"fLaC" + bytes(range(200)))
    whole = write_audio(bad / "cut.flac", np.random.default_rng(0).normal(0, 0.1, 48_000)).read_bytes()
    (bad / "cut.flac").write_bytes(whole[: len(whole) // 2])
    write_audio(bad / "short.wav", tone(0.010))
    write_audio(bad / "silent.wav", np.zeros(24_000))
    (bad / "unknown.wav").write_bytes(b"what is this?")
    (bad / "song.m4a").write_bytes(b"unread")
    (bad / "text.txt").write_text("unread")
    assert prepare("speech", "--source", clips, "--data-dir", tmp_path / "data") == 0
    said = capsys.readouterr().err
    for line in (
        "skipped, not audio: 1 .m4a, 1 .txt",
        "left out 6 of 11 clips",
        "train/empty.wav: is empty",
        "train/corrupt.flac: cannot be read as audio",
        "train/cut.flac: cannot be read as audio",
        "train/short.wav: is 10 ms long, expected at least 100 ms",
        "train/silent.wav: is silent",
        "train/unknown.wav: cannot be read as audio (Format not recognised)",
    ):
        assert line in said
    corpus = Corpus.open(tmp_path / "data" / "speech")
    assert [clip.source for clip in corpus.clips if clip.split == "train"] == [f"train/{x}.wav" for x in "abc"]
    assert len(corpus.split("train")) == 28_800


@pytest.mark.parametrize("packing", ["folder", "tar"])
def test_clips_are_split_after_the_unusable_ones_are_left_out(tmp_path, capsys, packing):
    names = [f"{i}.wav" for i in range(6)]
    splits = by_shares(names, (0.9, 0.05, 0.05))
    assert sorted(splits.values()) == ["test", "train", "train", "train", "train", "valid"]
    source = tmp_path / "in"
    for i, name in enumerate(names):
        path = write_audio(source / name, tone(0.2 + 0.01 * i))
        if splits[name] == "valid":
            path.write_bytes(b"RIFF" + bytes(100))
        elif splits[name] == "test":  # a good header, and a body that breaks off
            whole = write_audio(path, np.random.default_rng(0).normal(0, 0.1, 48_000), format="FLAC").read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
    prefix = ""
    if packing == "tar":
        prefix, source = "in.tar/in/", tmp_path / "in.tar"
        with tarfile.open(source, "w") as archive:
            archive.add(tmp_path / "in", "in")
    assert prepare("speech", source, "--data-dir", tmp_path / "data") == 0
    corpus = Corpus.open(tmp_path / "data" / "speech")
    corpus.verify()
    usable = [f"{prefix}{name}" for name in names if splits[name] == "train"]
    expected = by_shares(usable, (0.9, 0.05, 0.05))
    assert {clip.source: clip.split for clip in corpus.clips} == expected
    assert sorted(expected.values()) == ["test", "train", "train", "valid"]
    for clip in corpus.clips:  # each clip's samples are where clips.csv says
        i = int(clip.source.removeprefix(prefix).removesuffix(".wav"))
        heard = np.frombuffer(corpus.tokenizer.decode(corpus.split(clip.split)[clip.start : clip.end]), "<i2")
        assert len(heard) == 4800 + 240 * i
        assert np.abs(heard / 32768 - tone(0.2 + 0.01 * i)).max() < 0.02
    assert "warning: left out 2 of 6 clips:" in capsys.readouterr().err


def test_too_few_usable_clips_are_refused_and_the_others_named(tmp_path, capsys):
    for name in "abcd":
        write_audio(tmp_path / "in" / f"{name}.wav", tone(0.2) if name in "ab" else np.zeros(24_000))
    assert prepare("speech", "--source", tmp_path / "in", "--data-dir", tmp_path / "data") == 2
    said = capsys.readouterr().err
    assert "warning: left out 2 of 4 clips:\n  c.wav: is silent\n  d.wav: is silent\n" in said
    assert said.splitlines()[-1].startswith("compressive data prepare: 2 clips to split: expected at least 3")
    assert list((tmp_path / "data").iterdir()) == []


def test_resampled_and_mixed_down_clips_are_said_and_recorded(tmp_path, capsys):
    for i, (rate, channels) in enumerate([(24_000, 1), (22_050, 1), (44_100, 2), (44_100, 1), (24_000, 2), (8_000, 1)]):
        write_audio(tmp_path / "in" / f"{i}.wav", np.stack([tone(0.3, rate)] * channels, axis=1), rate)
    write_audio(tmp_path / "in" / "silent.wav", np.zeros((24_000, 2)), 48_000)  # left out, so not counted
    expected = "4 clips resampled to 24 kHz (from 8, 22.05, 44.1 kHz); 2 clips mixed down to mono"
    for word in ("prepared", "already prepared"):
        assert prepare("speech", tmp_path / "in", "--data-dir", tmp_path / "data") == 0
        said = capsys.readouterr().out
        assert f"speech: {word}" in said
        assert f"note: {expected}\n" in said
    assert Corpus.open(tmp_path / "data" / "speech").manifest.note == expected


def test_another_corpus_of_clips_is_replaced_only_by_force(clips, tmp_path, capsys):
    assert prepare("speech", clips, "--data-dir", tmp_path / "data") == 0
    before = (tmp_path / "data" / "speech" / "manifest.json").read_bytes()
    capsys.readouterr()
    for words, difference in (
        (["--tokenizer", "pcm16"], "prepared with tokenizer mulaw, not tokenizer pcm16"),
        ([], "prepared from other files, train/a.wav is not the same"),
    ):
        assert prepare("speech", clips, *words, "--data-dir", tmp_path / "data") == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert (
            "speech holds another corpus (mulaw, vocabulary 256, 43,200 tokens of test/e.wav and 4 more), " in said.err
        )
        assert f"{difference}: choose another --name, or replace it with --force\n" in said.err
        assert (tmp_path / "data" / "speech" / "manifest.json").read_bytes() == before
        write_audio(clips / "train" / "a.wav", tone(0.5))
    assert prepare("speech", clips, "--data-dir", tmp_path / "data", "--tokenizer", "pcm16", "--force") == 0
    assert Corpus.open(tmp_path / "data" / "speech").tokenizer.kind == "pcm16"


def test_without_usable_clips_nothing_is_written(clips, tmp_path, capsys):
    write_audio(clips / "test" / "e.wav", np.zeros(24_000))
    assert prepare("speech", "--source", clips, "--data-dir", tmp_path / "data") == 2
    said = capsys.readouterr().err
    assert "left out 1 of 5 clips:\n  test/e.wav: is silent\n" in said
    assert said.splitlines()[-1] == "compressive data prepare: no usable clip for the test split, 1 left out"
    assert list((tmp_path / "data").iterdir()) == []


def test_without_a_source_the_embedded_speech_is_used(tmp_path, capsys):
    assert prepare("speech", "--data-dir", tmp_path) == 0
    assert "no --source" in capsys.readouterr().err
    corpus = Corpus.open(tmp_path / "speech")
    assert 7 < len(corpus.split("train")) / 24_000 < 9
    assert prepare("speech", "--data-dir", tmp_path) == 0
    assert "already prepared" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("folders", [("train", "valid", "test"), ("a", "b", "c")], ids=["split", "by shares"])
def test_long_audio_takes_little_memory(tmp_path, folders):
    """One clip of ten minutes, 29 MB of samples, and as much for valid and test."""
    noise = np.random.default_rng(0).normal(0, 0.1, 24_000)
    for folder in folders:
        write_audio(tmp_path / "in" / folder / "long.wav", np.tile(noise, 600).astype(np.float32), subtype="PCM_16")
    tracemalloc.start()
    assert prepare("speech", "--source", tmp_path / "in", "--data-dir", tmp_path / "data") == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 25e6
    assert len(Corpus.open(tmp_path / "data" / "speech").split("train")) == 600 * 24_000


def test_audio_and_text_have_different_tokenizers(clips, tmp_path, capsys):
    assert prepare("speech", "--source", clips, "--tokenizer", "bpe", "--data-dir", tmp_path) == 2
    assert "tokenizer='bpe'" in capsys.readouterr().err
    assert prepare("text", clips, "--tokenizer", "mulaw", "--data-dir", tmp_path) == 2
    assert "mulaw, pcm16 are for audio" in capsys.readouterr().err


def test_without_soundfile_the_command_says_what_to_install(clips, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert prepare("speech", "--source", clips, "--data-dir", tmp_path) == 2
    assert "pip install 'compressive[audio]'" in capsys.readouterr().err


def test_published_speech_is_fetched_and_checked(tmp_path, monkeypatch, capsys):
    asked = []

    def fetch(url, path, sha256):
        asked.append((url, sha256))
        raise OSError("no network here")

    monkeypatch.setattr("compressive.data.speech.prepare.download", fetch)
    assert prepare("ljspeech", "--data-dir", tmp_path) == 2
    assert asked == [
        (
            "https://data.keithito.com/data/speech/LJSpeech-1.1.tar.bz2",
            "be1a30453f28eb8dd26af4101ae40cbf2c50413b1bb21936cbcdc6fae3de8aa5",
        )
    ]


def test_a_changed_clip_list_is_detected(clips, tmp_path):
    prepare("speech", "--source", clips, "--data-dir", tmp_path / "data")
    corpus = Corpus.open(tmp_path / "data" / "speech")
    path = corpus.folder / "clips.csv"
    path.write_text(path.read_text().replace("16800", "16801"))
    with pytest.raises(ValueError, match=r"clips\.csv has SHA-256"):
        corpus.verify()


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} does not exist")
def test_callie(tmp_path):
    assert prepare("speech", "--source", REAL, "--data-dir", tmp_path) == 0
    corpus = Corpus.open(tmp_path / "speech")
    found = {name: info.tokens for name, info in corpus.manifest.splits.items()}
    assert found == {"train": 29_469_232, "valid": 1_872_874, "test": 3_543_693}
    assert {name: len(starts_of(corpus, name)) for name in found} == {"train": 1016, "valid": 67, "test": 132}
    assert json.loads((corpus.folder / "manifest.json").read_text())["sources"].keys() == {
        "train.flac", "valid.flac", "test.flac", "manifest.csv",
    }  # fmt: skip


def test_a_written_wav_can_be_prepared(tmp_path):
    tokenizer = MuLawTokenizer()
    from compressive.data.speech.audio import write_wav

    codes = np.random.default_rng(0).integers(0, 256, 5000)
    for i, split in enumerate(("train", "valid", "test")):
        write_wav(tmp_path / "in" / split / "a.wav", tokenizer.decode(np.roll(codes, i)))
    assert prepare("speech", "--source", tmp_path / "in", "--data-dir", tmp_path) == 0
    assert np.array_equal(Corpus.open(tmp_path / "speech").split("train"), codes)
    assert len(read_wav(tmp_path / "in" / "train" / "a.wav")) == 5000
