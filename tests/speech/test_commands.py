"""Speech end to end: the same trainer, checkpoints, evaluation and generation as text, for all three models."""

import json
import resource
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from speech_helpers import starts_of, tiny_speech, tiny_speech_config, tiny_wavenet, tone, write_audio
from training_helpers import command, latest, make_run

from compressive.architectures import build_model
from compressive.cli import main
from compressive.config import AnyModelConfig, ModelConfig, RunConfig
from compressive.data.corpus import Corpus, Streams
from compressive.data.speech.audio import read_wav
from compressive.evaluation.score import score
from compressive.inference.generate import generate
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.speech import floors
from compressive.training import loop

TRANSFORMER: dict[str, Any] = {
    "vocab_size": 256, "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "window": 40, "memory_size": 40,
    "compressed_size": 20, "empty_memory": "masked",
}  # fmt: skip
MODELS: dict[str, AnyModelConfig] = {
    "compressive": ModelConfig(**TRANSFORMER),
    "txl": ModelConfig(**TRANSFORMER | {"memory_size": 60, "compressed_size": 0}),
    "wavenet": tiny_wavenet(window=40),
}
LOGISTICS: dict[str, AnyModelConfig] = {
    "compressive": ModelConfig(**TRANSFORMER | {"vocab_size": 65_536, "head": "logistics", "mixtures": 3}),
    "wavenet": tiny_wavenet(window=40, vocab_size=65_536, head="logistics", mixtures=3),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a corpus and a short run of every model."""
    home = tmp_path_factory.mktemp("speech")
    tiny_speech(home / "data")
    for name, model in MODELS.items():
        run = make_run(home / "runs" / name, tiny_speech_config(home / "data", model, eval_test=True))
        assert loop.train(run) == loop.FINISHED
    return home


@pytest.mark.parametrize("name", MODELS)
def test_training_learns_and_writes_curves_of_both_splits(home, name):
    lines = [json.loads(line) for line in (home / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    train = [line["bits"] for line in lines if line["kind"] == "train"]
    assert train[-1] < train[0]
    found = [(line["step"], line["split"]) for line in lines if line["kind"] == "eval"]
    assert found == [(6, "valid"), (6, "test"), (12, "valid"), (12, "test")]


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_scores_every_sample_once_beside_the_floors(home, name, capsys):
    assert main(["evaluate", str(home / "runs" / name), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    corpus = Corpus.open(home / "data" / "tiny")
    assert found["tokens"] == len(corpus.split("test"))
    assert found["bits_per_sample"] == pytest.approx(found["nats_per_sample"] / np.log(2))
    assert found["floors_bits_per_sample"] == pytest.approx(floors.floors(corpus, "test"))
    assert found["bits_per_character"] is found["word_perplexity"] is found["bits_per_byte"] is None
    assert main(["evaluate", str(home / "runs" / name), "--limit", "700"]) == 0
    shown = capsys.readouterr().out
    assert list(found["floors_bits_per_sample"]) == ["unigram", "bigram", "linear_prediction"]
    for word in ("bits per sample", "nats", "unigram", "bigram", "linear prediction", "the first 700"):
        assert word in shown


def test_models_are_scored_on_the_same_samples_for_any_window(home):
    corpus = Corpus.open(home / "data" / "tiny")
    for name in MODELS:
        trained = Trained.load(Run.open(home / "runs" / name))
        nats = score(trained.model(trained.config), corpus.split("test"), clips=corpus.starts("test"))
        assert len(nats) == len(corpus.split("test"))
        assert (nats > 0).all()
        assert nats[0] == pytest.approx(np.log(256))


@pytest.mark.parametrize("name", MODELS)
def test_a_clip_costs_the_same_whatever_came_before_it(home, name):
    """Score two concatenated clips, and the second alone: all but its first sample agree."""
    corpus = Corpus.open(home / "data" / "tiny")
    trained = Trained.load(Run.open(home / "runs" / name))
    model, (_, second) = trained.model(trained.config).double(), starts_of(corpus, "test")
    together = score(model, corpus.split("test"), clips=corpus.starts("test"))
    alone = score(model, corpus.split("test")[second:], clips=np.array([0]))
    np.testing.assert_allclose(together[second + 1 :], alone[1:], rtol=1e-9)
    forgetful = score(model, corpus.split("test"))
    assert not np.allclose(forgetful[second + 1 :], alone[1:], rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_training_sees_the_starts_that_scoring_sees(home, name, tmp_path, monkeypatch):
    """The model gets the tokens and starts of the corpus, window by window, also after wrapping around."""
    seen = []
    model = build_model(MODELS[name])
    forward = type(model).forward

    def watch(self, tokens, memory, targets=None, starts=None):
        if self.training:
            seen.append((tokens, starts))
        return forward(self, tokens, memory, targets, starts)

    monkeypatch.setattr(type(model), "forward", watch)
    config = tiny_speech_config(home / "data", MODELS[name], steps=40, eval_every=0)
    loop.train(make_run(tmp_path / "run", config))
    corpus = Corpus.open(home / "data" / "tiny")
    size = len(corpus.split("train")) // 4
    marks = np.zeros(4 * size, bool)
    clips = starts_of(corpus, "train")
    marks[clips[clips < 4 * size]] = True
    marks[[stream * size for stream in range(4)]] = True  # the first token of a stream is always a start
    stride = MODELS[name].window
    positions = [i * stride for i in range((size - 1) // stride)]
    for step, (tokens, starts) in enumerate(seen):
        at = positions[step % len(positions)]
        for stream in range(4):
            here = slice(stream * size + at, stream * size + at + stride)
            assert tokens[stream].tolist() == corpus.split("train")[here].tolist()
            assert starts[stream].tolist() == marks[here].tolist()
    assert len(seen) == 40 > len(positions)


def test_text_has_no_starts(tmp_path):
    from training_helpers import tiny_corpus

    corpus = Corpus.open(tiny_corpus(tmp_path))
    assert corpus.starts("train") is None
    assert Streams(corpus.split("train"), 4).starts(0, 10) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressive", "wavenet"])
def test_a_stopped_run_resumes_bit_for_bit(home, name, tmp_path):
    config = tiny_speech_config(home / "data", MODELS[name], update_every=3, update_every_from=0)
    whole = make_run(tmp_path / "whole", config)
    loop.train(whole)
    halves = make_run(tmp_path / "halves", config)
    shutil.copytree(whole.folder, halves.folder, dirs_exist_ok=True)
    shutil.rmtree(halves.checkpoints / "step-00000012")
    loop.train(halves)
    a, b = (latest(run.checkpoints) for run in (whole, halves))
    for part in ("model", "optimiser", "memory"):
        for key, tensor in a.tensors(part).items():
            assert torch.equal(tensor, b.tensors(part)[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_audio_is_sampled_by_the_same_steps_and_plotted(home, name, tmp_path, capsys):
    run, out = home / "runs" / name, tmp_path / "new" / "a.wav"
    assert main(["generate", str(run), "--seconds", "0.01", "--out", str(out), "--seed", "3"]) == 0
    assert "0.01 s of audio" in capsys.readouterr().err
    trained = Trained.load(Run.open(run))
    sampled = generate(trained.model(trained.config), torch.tensor([128]), 240, seed=3)
    codes = [int(token) for token in sampled]
    corpus = Corpus.open(home / "data" / "tiny")
    assert read_wav(out).astype("<i2").tobytes() == corpus.tokenizer.decode(codes)
    assert out.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_audio_prompt_is_continued_several_times(home, tmp_path, capsys):
    prompt = write_audio(tmp_path / "prompt.wav", tone(0.02, 48_000), 48_000)
    run = home / "runs" / "compressive"
    words = ["--prompt-file", str(prompt), "--samples", "2", "--length", "50", "--out", str(tmp_path / "a.wav")]
    assert main(["generate", str(run), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == [str(tmp_path / f"a-{i}.wav") for i in (1, 2)]
    assert (found["prompt_tokens"], found["sampled_tokens"]) == (480, 100)
    assert [len(read_wav(tmp_path / f"a-{i}.wav")) for i in (1, 2)] == [50, 50]
    assert (tmp_path / "a.png").exists()
    assert not np.array_equal(read_wav(tmp_path / "a-1.wav"), read_wav(tmp_path / "a-2.wav"))


def test_a_wav_that_cannot_grow_is_one_line(home, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))  # a write beyond it fails as on a full disk
    try:
        words = ["--length", "300", "--out", str(tmp_path / "a.wav")]
        assert main(["generate", str(home / "runs" / "wavenet"), *words]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    captured = capsys.readouterr()
    message = (
        f"compressive generate: out={tmp_path / 'a.wav'} cannot be written (File too large): choose another file\n"
    )
    assert captured.err == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "1"], "give a wav file, such as --out a.wav"),
        (["--seconds", "1", "--out", "a.mp3"], "out=a.mp3"),
        (["--seconds", "-1", "--out", "a.wav"], "seconds=-1.0: expected a number above 0"),
        (["--seconds", "nan", "--out", "a.wav"], "seconds=nan: expected a number above 0"),
        (["--seconds", "inf", "--out", "a.wav"], "seconds=inf: expected a number above 0"),
        (
            ["--seconds", "1e6", "--out", "a.wav"],
            "length=24000000000, samples=1: expected at most 1,000,000,000 tokens",
        ),
        (["--prompt", "hello", "--out", "a.wav"], "give --prompt-file with a wav or flac"),
        (["--prompt-file", __file__, "--out", "a.wav"], "test_commands.py cannot be read as audio"),
    ],
)
def test_options_that_do_not_fit_audio_are_refused(home, words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", str(home / "runs" / "txl"), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_wavenet_has_no_memory_sizes_to_change(home, capsys):
    run = str(home / "runs" / "wavenet")
    assert main(["evaluate", run, "--memory-size", "10,20"]) == 2
    assert "memory_size=10: a WaveNet remembers its receptive field" in capsys.readouterr().err
    assert main(["evaluate", run, "--empty-memory", "zeros"]) == 2
    assert "empty_memory='zeros'" in capsys.readouterr().err
    assert main(["analyze", run, "memory"]) == 2
    assert "was trained on audio" in capsys.readouterr().err


def test_a_transformer_s_memory_can_be_swept_on_speech(home, capsys):
    assert main(["evaluate", str(home / "runs" / "compressive"), "--compressed-size", "0,20,40"]) == 0
    assert "bits per sample" in capsys.readouterr().out


def test_a_wavenet_can_be_exported(home, tmp_path, capsys):
    assert main(["export", str(home / "runs" / "wavenet"), "--out", str(tmp_path / "release")]) == 0
    out = tmp_path / "a.wav"
    assert main(["generate", str(tmp_path / "release"), "--length", "30", "--out", str(out)]) == 0
    assert len(read_wav(out)) == 30


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGISTICS)
def test_sixteen_bits_train_and_evaluate(tmp_path, name, capsys):
    tiny_speech(tmp_path / "data", "pcm16")
    config = tiny_speech_config(
        tmp_path / "data", LOGISTICS[name], steps=30, decay_steps=27, sample_every=30, sample_tokens=20
    )
    run = make_run(tmp_path / "run", RunConfig(config.model, config.data, config.train))
    loop.train(run)
    bits = [json.loads(line)["bits"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert bits[-1] < bits[0]
    assert len(read_wav(run.folder / "samples" / "step-00000030.wav")) == 256 + 20
    capsys.readouterr()
    assert main(["evaluate", str(run.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["floors_bits_per_sample"]) == {"unigram"}
    assert report["bits_per_sample"] > 0
    assert main(["generate", str(run.folder), "--length", "20", "--out", str(tmp_path / "a.wav")]) == 0
    assert len(read_wav(tmp_path / "a.wav")) == 20


def test_codes_that_a_mixture_would_take_for_other_amplitudes_are_refused(home, tmp_path):
    run = make_run(tmp_path / "run", tiny_speech_config(home / "data", LOGISTICS["compressive"]))
    with pytest.raises(ValueError, match="head='logistics' over 65536 codes: the corpus tiny has 256"):
        loop.train(run)


@pytest.mark.slow
def test_the_commands_end_to_end(tmp_path):
    """Prepare the embedded speech, train, evaluate and sample through the real command line."""
    done = command("data", "prepare", "speech", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    small = ["--train.steps", "4", "--train.eval-every", "4", "--train.eval-tokens", "2000", "--train.device", "cpu"]
    done = command("train", "speech-small-wavenet", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command("evaluate", "runs/speech-small-wavenet", "--limit", "3000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "linear prediction" in done.stdout
    done = command("generate", "runs/speech-small-wavenet", "--seconds", "0.01", "--out", "a.wav", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read_wav(tmp_path / "a.wav")) == 240
