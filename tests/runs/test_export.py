"""Releases: one folder with all weights, used instead of a run, never a pickle."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import command, tiny_corpus, tiny_run_config

from compressive.model.memory import Memory
from compressive.runs.export import export
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.training import loop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny_corpus(folder / "data")
    run = Run.create(folder / "run", tiny_run_config(folder / "data", steps=4, eval_every=4))
    loop.train(run)
    return run


@pytest.fixture
def release(run, tmp_path):
    done = command("export", run.folder, "--out", tmp_path / "release")
    assert done.returncode == 0, done.stderr
    return tmp_path / "release"


def test_a_release_is_the_model_and_what_it_needs(run, release):
    names = ["config.json", "corpus.json", "model.safetensors", "release.json"]
    names += ["tokenizer.json", "tokenizer_config.json", "vocabulary.json"]
    assert sorted(path.name for path in release.iterdir()) == names
    assert json.loads((release / "release.json").read_text()) == {"corpus": "tiny", "step": 4, "checkpoint": "best"}
    want = Trained.load(run).weights
    got = load_file(release / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_commands_take_a_release_instead_of_a_run(run, release, tmp_path):
    words = ("--prompt", "the cat", "--length", "20", "--seed", "3")
    results = [command("generate", folder, *words, cwd=tmp_path) for folder in (run.folder, release)]
    assert results[0].stdout == results[1].stdout != ""
    scores = [command("evaluate", folder, "--split", "test", "--json") for folder in (run.folder, release)]
    first, second = (json.loads(result.stdout) for result in scores)
    assert first["perplexity"] == second["perplexity"] if "perplexity" in first else first == second


def test_a_release_can_be_exported_again(release, tmp_path):
    """Those of version 0.1 become what Hugging Face's libraries load."""
    (release / "vocabulary.json").replace(release / "tokenizer.json")
    export(Run.open(release), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "vocabulary.json").read_text()) == {"kind": "bytes"}
    assert json.loads((tmp_path / "again" / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "compressive"


def test_nothing_is_overwritten(run, release):
    again = command("export", run.folder, "--out", release)
    assert again.returncode == 2
    assert "exists already: choose another folder" in again.stderr


class Evil:
    """A pickle that runs code when loaded."""

    def __reduce__(self):
        return (print, ("the code in the pickle ran",))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_is_refused(release, name):
    (release / "model.safetensors").unlink()
    (release / name).write_bytes(pickle.dumps(Evil()) + bytes(100))
    result = command("generate", release, "--length", "5")
    assert result.returncode == 2
    assert "model.safetensors" in result.stderr
    assert "never loaded" in result.stderr or "no other format is loaded" in result.stderr
    assert "the code in the pickle ran" not in result.stdout + result.stderr


def test_a_pickle_in_a_checkpoint_is_refused(run, tmp_path):
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run.folder, copy)
    for shard in (copy / "checkpoints" / "step-00000004").glob("*.safetensors"):
        shard.write_bytes(pickle.dumps(Evil()))
    result = command("generate", copy, "--length", "5")
    assert result.returncode == 2
    assert "does not match its checksum" in result.stderr
    assert "the code in the pickle ran" not in result.stdout + result.stderr


def test_everybody_may_read_what_the_umask_allows(run, tmp_path):
    before = os.umask(0o022)
    try:
        export(run, tmp_path / "release")
        Memory.empty(run.config.model, 1, torch.device("cpu"), torch.float32).save(tmp_path / "memory")
    finally:
        os.umask(before)
    files = [*(tmp_path / "release").iterdir(), tmp_path / "memory"]
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o644"}
