"""`compressive rl evaluate` and `compressive rl watch`: wrong inputs in one line, what is printed where, hints."""

import importlib
import json
import sys

import pytest
import torch
from PIL import Image
from rl_helpers import CPU, tiny_agent_run
from training_helpers import command

from compressive.cli import main
from compressive.cli.rl.evaluate import MOST_ENVS
from compressive.config.agent import TaskConfig
from compressive.rl.env.build import build_task
from compressive.rl.run import AgentFolder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a run of text, an agent's run without checkpoints, files and a folder that are in the way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text('{"model": {}, "data": {}, "train": {}}')
    AgentFolder.create(tmp_path / "untrained", tiny_agent_run())
    for name in ("notes.txt", "notes.gif"):
        (tmp_path / name).write_text("notes")
    (tmp_path / "folder.gif").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "0000.png").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("evaluate text", "text is no agent's run"),
        ("watch text", "text is no agent's run"),
        ("evaluate nowhere", "nowhere is not a run: it holds no config.json"),
        ("watch nowhere", "nowhere is not a run: it holds no config.json"),
        ("evaluate oracle --of nowhere", "nowhere is not a run: it holds no config.json"),
        ("evaluate untrained", "untrained holds no checkpoint yet: compressive rl train --resume"),
        ("evaluate random --episodes 0", "episodes=0: expected at least 2"),
        ("evaluate random --episodes -3", "episodes=-3: expected at least 2"),
        ("evaluate random --envs 0", f"envs=0: expected 1 to {MOST_ENVS}"),
        ("evaluate random --envs 10000000", f"envs=10000000: expected 1 to {MOST_ENVS}"),
        ("evaluate random --lanes 10000000", f"envs=10000000: expected 1 to {MOST_ENVS}"),
        ("evaluate random --delays -1", "delays=(-1,): expected one or more integers of at least 0"),
        ("watch random --delays 4 -1", "delays=(4, -1): expected one or more integers of at least 0"),
        ("evaluate random --device abacus", "device='abacus': expected"),
        ("watch random --device abacus", "device='abacus': expected"),
        ("watch random --out notes.txt", "out='notes.txt': expected a name that ends in .gif, or a folder"),
        ("watch random --out notes.gif", "out='notes.gif': expected a new file or a GIF; this file is no GIF"),
        ("watch random --out folder.gif", "out='folder.gif': expected a file; this is a folder"),
        ("watch random --out notes.txt/a.gif", "out='notes.txt/a.gif': expected a path below folders; notes.txt is"),
        ("watch random --out full", "out='full': expected a new or empty folder"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(words, complaint, home, capsys):
    assert main(["rl", *words.split()]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(f"compressive rl {words.split()[0]}: {complaint}")
    assert shown.out == ""
    assert (home / "notes.gif").read_text() == (home / "notes.txt").read_text() == "notes"
    assert (home / "full" / "0000.png").read_text() == "mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_one_line(tmp_path):
    done = command("rl", "evaluate", "random", "--device", "cuda", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("compressive rl evaluate: device='cuda': expected")


def test_no_more_environments_run_than_episodes_are_asked_for(home, capsys):
    words = ["evaluate", "oracle", "--of", "untrained", "--episodes", "3", "--envs", "1000", "--delays", "2", "--json"]
    assert main(["rl", *words]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["policy"], found["episodes"]) == ("oracle", 3)
    assert found["return_margin_95"] == 0
    assert not [key for key in found if " " in key]
    assert shown.err == ""  # progress is for terminals


def test_an_episode_is_written_into_folders_that_are_created(home, capsys):
    for out in ("a/b/episode.gif", "a/frames"):
        assert main(["rl", "watch", "oracle", "--of", "untrained", "--delays", "1", "--out", out]) == 0
        assert capsys.readouterr().out.endswith(f"written to {out}\n")
    frames = len(list((home / "a" / "frames").iterdir()))
    with Image.open(home / "a" / "b" / "episode.gif") as image:
        assert getattr(image, "n_frames", None) == frames
    assert main(["rl", "watch", "oracle", "--of", "untrained", "--out", "a/b/episode.gif"]) == 0  # a GIF is replaced


def test_hints_name_an_install_that_works_for_a_wheel_and_for_a_checkout(home, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["rl", "watch", "oracle", "--of", "untrained"]) == 2
    assert "video needs Pillow: pip install 'compressive[rl]' (" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "compressive.rl.env.adapter", None)
    with pytest.raises(ValueError, match=r"task 'CartPole-v1': needs Gymnasium; pip install 'compressive\[rl\]' \("):
        build_task(TaskConfig("CartPole-v1"), 0, CPU)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "compressive.rl.ray_actors", raising=False)
    with pytest.raises(ValueError, match=r"train\.actors above 0: needs Ray; pip install 'compressive\[ray\]' \("):
        importlib.import_module("compressive.rl.ray_actors")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "compressive.rl.env.gym", raising=False)
    with pytest.raises(ImportError, match=r"needs Gymnasium \(.*\): pip install 'compressive\[rl\]'"):
        importlib.import_module("compressive.rl.env.gym")


@pytest.mark.parametrize("flag", ["--task.observation vector", "--train.stagger", "--agent.outcome-steps 4"])
def test_what_is_for_the_rooms_is_refused_elsewhere(home, capsys, flag):
    assert main(["rl", "train", "rooms-tiny", "--task.name", "CartPole-v1", *flag.split()]) == 2
    assert "with task.name='CartPole-v1': expected the rooms; leave it out" in capsys.readouterr().err
