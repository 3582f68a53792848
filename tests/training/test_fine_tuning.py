"""Training that starts from trained weights: what is taken over, what is fresh, what is refused, and what is kept."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from training_helpers import latest, make_run, text, tiny_corpus, tiny_run_config

from compressive import console
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import BPETokenizer, ByteTokenizer
from compressive.distributed import World
from compressive.runs.export import export
from compressive.runs.origin import Origin
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.training import loop
from compressive.training.preflight import begin

QUIET: dict[str, Any] = {"eval_every": 0, "steps": 4, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Three corpora: tiny, other text in the same tokens, and the same text in other tokens."""
    folder = tmp_path_factory.mktemp("data")
    tiny_corpus(folder)
    splits = {name: [text(n, i)] for i, (name, n) in enumerate({"train": 900, "valid": 200, "test": 200}.items(), 7)}
    write_corpus(folder / "other", "other", ByteTokenizer(), splits, {})
    write_corpus(folder / "subwords", "subwords", BPETokenizer.train(splits["train"], 300), splits, {})
    return folder


@pytest.fixture(scope="module")
def source(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "run"
    loop.train(make_run(folder, tiny_run_config(data_dir, **QUIET)))
    return Run.open(folder)


def started(folder, source, data_dir, corpus="other", model=None, resume=False, **train):
    config = tiny_run_config(data_dir, model, **QUIET | train)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, corpus=corpus))
    return begin(folder, config, (), resume, World(), source.folder if isinstance(source, Run) else source)


def first_weights(run, monkeypatch):
    """The weights of a run at its first step."""
    found = {}

    class Stop(Exception):
        pass

    def stop(model, *_):
        found.update({name: w.clone() for name, w in model.state_dict().items()})
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(loop, "Step", stop)
        with pytest.raises(Stop):
            loop.train(run)
    return found


@pytest.mark.parametrize("model", [{}, {"memory_size": 8, "compressed_size": 16, "window": 8, "dropout": 0.1}])
def test_a_run_starts_from_the_weights_with_other_text_and_memory_sizes(model, source, data_dir, tmp_path, monkeypatch):
    run = started(tmp_path / "run", source, data_dir, model=model)
    want = Trained.load(source).weights
    found = first_weights(run, monkeypatch)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    loop.train(run)
    saved = latest(run.checkpoints)
    assert saved.step == 4
    assert {float(x) for name, x in saved.tensors("optimiser").items() if name.endswith(".step")} == {4.0}
    assert not torch.equal(saved.tensors("model")["embedding.table"], want["embedding.table"])


def test_where_the_weights_came_from_is_kept_also_in_a_release(source, data_dir, tmp_path, capsys):
    run = started(tmp_path / "run", source, data_dir)
    loop.train(run)
    assert f"starting from {source.folder} at step 4" in capsys.readouterr().out
    kept = json.loads((run.folder / "origin.json").read_text())
    assert (kept["source"], kept["step"], kept["corpus"]) == (str(source.folder), 4, "tiny")
    release = export(run, tmp_path / "release")
    assert Origin.read(release) == Origin.read(run.folder) == Origin.of(source)
    again = started(tmp_path / "again", Run.open(release), data_dir)
    kept = json.loads((again.folder / "origin.json").read_text())
    assert kept["source"] == str(release)


def test_a_resumed_run_does_not_start_from_the_weights_again(source, data_dir, tmp_path):
    whole = started(tmp_path / "whole", source, data_dir)
    loop.train(whole)
    first = started(tmp_path / "run", source, data_dir, steps=2)
    loop.train(first)
    for given in (None, source):
        run = started(tmp_path / "run", given, data_dir, resume=True)
        loop.train(run)
        for name, tensor in latest(whole.checkpoints).tensors("model").items():
            assert torch.equal(tensor, latest(run.checkpoints).tensors("model")[name])


def test_a_run_killed_before_its_first_checkpoint_starts_from_the_weights(source, data_dir, tmp_path, monkeypatch):
    started(tmp_path / "run", source, data_dir)
    resumed = started(tmp_path / "run", None, data_dir, resume=True)
    found = first_weights(resumed, monkeypatch)
    assert torch.equal(found["embedding.table"], Trained.load(source).weights["embedding.table"])
    kept = json.loads((tmp_path / "run" / "origin.json").read_text())
    (tmp_path / "run" / "origin.json").write_text(json.dumps(kept | {"sha256": "0"}))
    with pytest.raises(ValueError, match=r"holds other weights .step 4. than this run was to start from"):
        loop.train(resumed)


def test_a_new_start_without_weights_forgets_those_of_a_failed_one(source, data_dir, tmp_path):
    started(tmp_path / "run", source, data_dir)
    assert Origin.read(started(tmp_path / "run", None, data_dir).folder) is None


def test_resuming_from_other_weights_is_refused(source, data_dir, tmp_path):
    loop.train(started(tmp_path / "run", source, data_dir))
    other = started(tmp_path / "other", None, data_dir)
    loop.train(other)
    with pytest.raises(ValueError, match=r"from=.*other: the run to be resumed started from .*, step 4; leave out"):
        started(tmp_path / "run", other, data_dir, resume=True)
    with pytest.raises(ValueError, match="the run to be resumed started from random weights"):
        started(tmp_path / "other", source, data_dir, resume=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"d_model": 16, "d_ff": 32},
            r"model.d_model=16 \(there 32\), model.d_ff=32 \(there 64\): expected the values of .*run",
        ),
        ({"n_layers": 3}, r"model.n_layers=3 \(there 2\)"),
        ({"norm": "pre"}, r"model.norm='pre' \(there 'post'\)"),
        ({"compression": "gru"}, r"model.compression='gru' \(there 'conv'\)"),
        ({"compression_rate": 2}, r"model.compression_rate=2 \(there 4\)"),
    ],
)
def test_other_shapes_are_refused_by_field_and_value(model, message, source, data_dir, tmp_path):
    with pytest.raises(ValueError, match=message):
        started(tmp_path / "run", source, data_dir, model=model)
    assert not (tmp_path / "run").exists()


def test_what_weights_do_not_depend_on_may_differ(source, data_dir, tmp_path):
    model = {"compression_rate": (4, 4), "compression_loss": "autoencoding", "empty_memory": "masked"}
    model |= {"spanning_slots": "partial"}
    loop.train(started(tmp_path / "run", source, data_dir, model=model))


def test_other_tokens_are_refused_with_what_to_do(source, data_dir, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"subwords has other tokens \(bpe, .*\) than .*run was trained with \(bytes, 256\).*--vocabulary",
    ):
        started(tmp_path / "run", source, data_dir, corpus="subwords")


def test_the_vocabulary_is_that_of_the_weights(data_dir, tmp_path):
    more = make_run(tmp_path / "more", tiny_run_config(data_dir, {"vocab_size": 300}, **QUIET))
    loop.train(more)
    assert started(tmp_path / "run", more, data_dir).config.model.vocab_size == 300


def test_a_transformer_xl_may_become_a_compressive_transformer(data_dir, tmp_path, monkeypatch, capsys):
    console.set_quiet(False)
    plain = make_run(tmp_path / "plain", tiny_run_config(data_dir, {"compressed_size": 0}, **QUIET))
    loop.train(plain)
    run = started(tmp_path / "run", plain, data_dir)
    found = first_weights(run, monkeypatch)
    want = Trained.load(plain).weights
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert any("compress" in name for name in found.keys() - want.keys())
    assert "compressors start from random weights" in capsys.readouterr().err
    loop.train(run)
    back = started(tmp_path / "back", run, data_dir, model={"compressed_size": 0})
    assert first_weights(back, monkeypatch).keys() == want.keys()


def test_nothing_to_start_from_is_named(data_dir, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a run"):
        started(tmp_path / "run", tmp_path / "nowhere", data_dir)
