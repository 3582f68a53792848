"""Memory sizes other than in training: which are possible, how empty memory is treated, sweeps and plots."""

import sys

import numpy as np
import pytest
import torch
from helpers import TRAINABLE, WITH_A_LOSS, build
from training_helpers import model_config, tiny_corpus, tiny_run_config

from compressive.config import ModelConfig
from compressive.evaluation.score import LONG, score
from compressive.evaluation.sweep import Reading, combinations, parse_sizes, plot, sweep
from compressive.plotting import PlotError
from compressive.runs import checkpoint
from compressive.runs.export import export
from compressive.runs.run import Run
from compressive.runs.trained import EvalConfig, Trained


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    tiny_corpus(folder)
    return folder


def a_run(folder, data_dir, steps=(1,), **model):
    """Create a run with random weights, different at every step."""
    run = Run.create(folder / "run", tiny_run_config(data_dir, model))
    for step in steps:
        weights = build(model_config(run.config), seed=step, dtype=torch.float32).state_dict()
        checkpoint.save(run.checkpoints, step, {"model": weights}, {})
    return run


def as_transformer(config: EvalConfig) -> ModelConfig:
    """The model configuration to evaluate with, which must be a Compressive Transformer's."""
    assert isinstance(config.model, ModelConfig)
    return config.model


def test_the_trained_model_comes_back(tmp_path, data_dir):
    run = a_run(tmp_path, data_dir)
    trained = Trained.load(run)
    model = trained.model(trained.eval_config().model)
    assert trained.step == 1
    assert not model.training
    assert model.config == run.config.model
    saved = build(model_config(run.config), seed=1, dtype=torch.float32)
    assert all(torch.equal(w, v) for w, v in zip(model.parameters(), saved.parameters(), strict=True))


def test_best_and_last(tmp_path, data_dir):
    run = a_run(tmp_path, data_dir, steps=(1, 2))
    assert Trained.load(run).step == 2  # no checkpoint is marked as best yet
    checkpoint.mark_best(run.checkpoints, 1, 0.5)
    assert [Trained.load(run, which).step for which in ("best", "last")] == [1, 2]


def test_a_run_without_checkpoint_is_refused(tmp_path, data_dir):
    with pytest.raises(checkpoint.CheckpointError, match="holds no checkpoint yet: compressive train --resume"):
        Trained.load(a_run(tmp_path, data_dir, steps=()))


@pytest.mark.parametrize(("compression", "loss"), WITH_A_LOSS)
def test_compressed_memory_can_be_switched_off(compression, loss, tmp_path, data_dir):
    trained = Trained.load(a_run(tmp_path, data_dir, compression=compression, compression_loss=loss))
    model = trained.model(trained.eval_config(compressed_size=0).model)
    assert not model.compressor_parameters()
    assert np.isfinite(score(model, np.arange(40))).all()


def test_switched_off_is_what_a_transformer_xl_with_these_weights_gives(tmp_path, data_dir):
    run = a_run(tmp_path, data_dir)
    trained, tokens = Trained.load(run), np.arange(100)
    off = score(trained.model(trained.eval_config(compressed_size=0).model), tokens)
    full = score(trained.model(trained.eval_config().model), tokens)
    plain = build(model_config(tiny_run_config(data_dir, {"compressed_size": 0})), dtype=torch.float32)
    plain.load_state_dict({name: w for name, w in trained.weights.items() if "compress" not in name})
    assert (off == score(plain, tokens)).all()
    assert (off != full).any()


@pytest.mark.parametrize("compression", TRAINABLE)
def test_compressed_memory_cannot_be_switched_on_untrained(compression, tmp_path, data_dir):
    trained = Trained.load(a_run(tmp_path, data_dir, compression=compression, compressed_size=(8, 0)))
    assert as_transformer(trained.eval_config(memory_size=4)).compressed_size == (8, 0)
    message = r"compressed_size=8: expected 0 in layers 1, trained without compressed memory .* train with a"
    with pytest.raises(ValueError, match=message):
        trained.eval_config(compressed_size=8)


@pytest.mark.parametrize(
    ("sizes", "trained_with", "asked", "expected"),
    [
        ((None, None), "zeros", "auto", "zeros"),
        ((16, 8), "zeros", "auto", "zeros"),
        ((4, 8), "zeros", "auto", "zeros"),
        ((17, 8), "zeros", "auto", "masked"),
        ((None, 9), "zeros", "auto", "masked"),
        ((4, 9), "zeros", "auto", "masked"),
        ((17, 8), "zeros", "zeros", "zeros"),
        ((None, None), "zeros", "masked", "masked"),
        ((None, None), "masked", "auto", "masked"),
        ((17, None), "masked", "auto", "masked"),
        ((None, None), "masked", "zeros", "zeros"),
    ],
)
def test_empty_memory(sizes, trained_with, asked, expected, tmp_path, data_dir):
    trained = Trained.load(a_run(tmp_path, data_dir, empty_memory=trained_with))
    config = trained.eval_config(sizes[0], sizes[1], asked)
    assert as_transformer(config).empty_memory == expected
    reason = "asked for" if asked != "auto" else "as in training" if trained_with == expected else "memory is larger"
    assert config.reason.startswith(reason)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(("resets", "expected"), [(0.0, "masked"), (0.05, "zeros")])
def test_a_model_that_knows_an_empty_memory_reads_zeros_in_a_larger_one_too(
    resets, expected, release, tmp_path, data_dir
):
    run = Run.create(tmp_path / "run", tiny_run_config(data_dir, reset_probability=resets))
    weights = build(model_config(run.config), dtype=torch.float32).state_dict()
    checkpoint.save(run.checkpoints, 1, {"model": weights}, {})
    read = Run.open(export(run, tmp_path / "release")) if release else run
    assert as_transformer(Trained.load(read).eval_config(17, 8)).empty_memory == expected


@pytest.mark.parametrize(
    ("text", "sizes"), [("4", [4]), ("4,8", [4, 8]), (" 8, 4,8", [8, 4]), ("0", [0]), (None, [None])]
)
def test_lists_of_sizes(text, sizes):
    assert parse_sizes("memory_size", text) == sizes


@pytest.mark.parametrize("text", ["abc", "-4", "4,", "", ",", "4.5", "4 8", "٤", "4,x"])
def test_an_invalid_list_of_sizes_is_refused(text):
    with pytest.raises(ValueError, match=f"memory_size={text!r}: expected whole numbers of at least 0, such as 512"):
        parse_sizes("memory_size", text)


def test_every_combination(tmp_path, data_dir):
    trained = Trained.load(a_run(tmp_path, data_dir))
    configs = combinations(trained, "4,32", "0,8")
    models = [as_transformer(config) for config in configs]
    sizes = [(model.memory_size, model.compressed_size, model.empty_memory) for model in models]
    assert sizes == [(4, 0, "zeros"), (4, 8, "zeros"), (32, 0, "masked"), (32, 8, "masked")]
    with pytest.raises(ValueError, match="memory_size=0: expected at least 1 in layer 0"):
        combinations(trained, "4,0", "8")


def test_a_sweep_is_one_evaluation_after_the_other(tmp_path, data_dir):
    run = a_run(tmp_path, data_dir)
    trained, corpus, heard = Trained.load(run), run.corpus(), []
    configs = combinations(trained, compressed_size="0,8,64")
    reading = Reading("valid", streams=2, limit=300)
    results = list(sweep(trained, corpus, configs, reading, progress=lambda *words: heard.append(words)))
    assert [result.config for result in results] == configs
    assert [words for words in heard if words[1] == words[2]] == [(config, 300, 300) for config in configs]
    for config, result in zip(configs, results, strict=True):
        nll = score(trained.model(config.model), corpus.split("valid"), streams=2, limit=300)
        assert result.metrics.nats == pytest.approx(nll.sum())
        assert result.headline == result.metrics.bits_per_character
        assert result.streams == 2
        assert result.as_dict()["compressed_size"] == as_transformer(config).compressed_size


def test_streams_are_chosen_by_length(tmp_path, data_dir):
    run = a_run(tmp_path, data_dir)
    trained = Trained.load(run)
    (result,) = sweep(trained, run.corpus(), [trained.eval_config()], Reading("test", limit=100))
    assert result.streams == 1
    assert run.corpus().bytes("test") < LONG


def test_each_stream_has_a_window_to_read(tmp_path, data_dir):
    run = a_run(tmp_path, data_dir)
    trained = Trained.load(run)
    for streams, limit in ((6, 100), (1, 10)):
        sweep(trained, run.corpus(), [trained.eval_config()], Reading(streams=streams, limit=limit))
    with pytest.raises(ValueError, match="streams=7: expected at most 6, as 100 tokens have no more windows of 16"):
        sweep(trained, run.corpus(), [trained.eval_config()], Reading(streams=7, limit=100))


def test_a_corpus_that_has_changed_is_refused(tmp_path, data_dir):
    run = a_run(tmp_path, data_dir, vocab_size=200)
    trained = Trained.load(run)
    message = "vocab_size=256 of tiny: expected at most the model's, 200; the corpus has changed"
    with pytest.raises(ValueError, match=message):
        list(sweep(trained, run.corpus(), [trained.eval_config()], Reading()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"split": "dev"}, "split='dev': expected one of train, valid, test"),
        ({"limit": 0}, "limit=0: expected at least 2"),
        ({"limit": 1}, "limit=1: expected at least 2"),
        ({"streams": -1}, "streams=-1: expected at least 1, or 0"),
    ],
)
def test_an_invalid_reading_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Reading(**values)


@pytest.mark.parametrize(
    ("memory", "compressed", "labels", "across"),
    [
        ("8,16", "4,8", ["memory size 8", "memory size 16"], "compressed size (slots per layer)"),
        ("8,16", None, ["compressed size 8"], "memory size (slots per layer)"),
        (None, None, ["memory size 16"], "compressed size (slots per layer)"),
    ],
)
def test_plot(memory, compressed, labels, across, tmp_path, data_dir, monkeypatch):
    figure_type = pytest.importorskip("matplotlib.figure").Figure
    figures = []
    monkeypatch.setattr(figure_type, "savefig", lambda figure, *_, **__: figures.append(figure))
    run = a_run(tmp_path, data_dir)
    trained = Trained.load(run)
    configs = combinations(trained, memory, compressed)
    results = list(sweep(trained, run.corpus(), configs, Reading("test", limit=50)))
    plot(results, tmp_path / "new" / "plot.png")
    (axes,) = figures[0].axes
    lines = [line for line in axes.lines if line.get_gid() is None]  # without points that show values on hover
    assert [line.get_label() for line in lines] == labels
    assert axes.get_xlabel() == across
    assert axes.get_ylabel() == "bits per character"
    assert sorted(y for line in lines for y in line.get_ydata()) == sorted(r.headline for r in results)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"pip install 'compressive\[plots\]'"):
        plot([], tmp_path / "plot.png")
