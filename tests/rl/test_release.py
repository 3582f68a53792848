"""An agent's release: what it holds, what takes it, and that nothing is written into it."""

import json

import pytest
import torch
from rl_helpers import tiny_agent_run
from safetensors.torch import load_file
from training_helpers import latest

from compressive.cli import main
from compressive.rl.loop import train
from compressive.rl.run import AgentFolder
from compressive.runs import shipped


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    found = AgentFolder.begin(tmp_path_factory.mktemp("agent") / "run", tiny_agent_run(), False)
    assert train(found) == 0
    return found


@pytest.fixture
def release(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run.folder), "--out", "release"]) == 0
    assert capsys.readouterr().out.endswith("try: compressive rl evaluate release\n")
    return tmp_path / "release"


def test_it_has_the_weights_without_the_state_of_training(run, release):
    names = ["config.json", "metrics.jsonl", "model.safetensors", "release.json"]
    assert sorted(path.name for path in release.iterdir()) == names
    assert json.loads((release / "release.json").read_text()) == {"task": "rooms", "step": 384, "checkpoint": "last"}
    want, got = latest(run.checkpoints).tensors("model"), load_file(release / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert AgentFolder.open(release).config == run.config


def test_it_scores_as_the_run_does_and_is_not_written_into(run, release, capsys, monkeypatch):
    before = sorted(path.name for path in release.iterdir())
    found = []
    for name in (str(run.folder), "release"):
        assert main(["rl", "evaluate", name, "--episodes", "4", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["return"] == found[1]["return"]
    assert found[0]["others"]["oracle"]["choice_accuracy"] == 1
    assert sorted(path.name for path in release.iterdir()) == before
    assert (run.folder / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run.folder / "evaluation.json").read_text())["others"] == found[0]["others"]

    monkeypatch.setattr(shipped, "SHIPPED", release.parent / "package")
    (release.parent / "package").mkdir()
    release.rename(release.parent / "package" / "rooms")
    assert main(["rl", "evaluate", "rooms", "--episodes", "4", "--out", "kept/result.json"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rooms, step 384: 4 episodes\n")
    for line in ("    random policy", "    oracle", "  not the full task: width 16, height 12, objects 4"):
        assert f"\n{line}" in shown
    assert "scores cannot be compared with published ones" in shown
    assert json.loads((release.parent / "kept" / "result.json").read_text())["return"] == found[0]["return"]
    assert (release.parent / "kept" / "result.png").is_file()
    assert main(["rl", "evaluate", "oracle", "--of", "rooms", "--episodes", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["return"] == found[0]["others"]["oracle"]["return"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["export", "release", "--out", "release"], "out=release exists already"),
        (["export", "release", "--out", "other", "--onnx"], "onnx=True: expected a model of text or audio"),
        (["rl", "train", "--resume", "release"], "release is a release, which holds no state of training"),
        (["rl", "evaluate", "oracle", "--plot", "a.png"], "plot='a.png': expected an agent's run"),
        (["rl", "evaluate", "release", "--plot", "a.txt"], "a.txt: expected a figure as .png or .svg"),
    ],
)
def test_what_a_release_cannot_do_is_said_in_one_line(release, words, complaint, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_a_release_can_be_exported_again(release, capsys):
    assert main(["export", "release", "--out", "again"]) == 0
    again = release.parent / "again"
    assert (again / "model.safetensors").read_bytes() == (release / "model.safetensors").read_bytes()
