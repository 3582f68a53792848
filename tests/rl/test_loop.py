"""Training an agent: progress, checkpoints, bit-exact resumption, signals, and the commands."""

import dataclasses
import json
import os
import signal
import subprocess

import pytest
import torch
from rl_helpers import tiny_agent_run
from training_helpers import flags, latest
from warm_python import interpreter

from compressive.cli import main
from compressive.rl.acting import Outcomes
from compressive.rl.learning import Learner
from compressive.rl.loop import read_metrics, scores, train
from compressive.rl.run import AgentFolder
from compressive.training.loop import DivergedError


def start(folder, run):
    return AgentFolder.create(folder, run)


def weights(run):
    return latest(run.checkpoints).tensors("model")


def strip(rows):
    """Lines without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "steps_per_second", "peak_gib")} for row in rows]


@pytest.mark.parametrize("core", ["compressive", "txl", "lstm", "none"])
def test_a_resumed_run_is_bit_exact(tmp_path, core, capsys):
    whole = start(tmp_path / "whole", tiny_agent_run(agent={"core": core}, train={"learning_rate": 1e-3}))
    assert train(whole) == 0
    half = start(tmp_path / "half", tiny_agent_run(agent={"core": core}, train={"learning_rate": 1e-3, "steps": 192}))
    assert train(half) == 0
    half = start(tmp_path / "half", whole.config)
    assert train(half) == 0
    a, b = weights(whole), weights(half)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert strip(read_metrics(whole.folder)) == strip(read_metrics(half.folder))
    assert "from step 192" in capsys.readouterr().out


def test_a_log_line_has_the_figures(tmp_path, capsys):
    run = start(tmp_path / "run", tiny_agent_run(task={"envs": 12}, train={"steps": 12 * 16 * 6, "batch": 4}))
    assert train(run) == 0
    rows = read_metrics(run.folder)
    assert [row["step"] for row in rows] == [384, 768, 1152]
    assert all(row["episodes"] > 0 and row["steps_per_second"] > 0 and row["finite"] == 1 for row in rows)
    assert rows[-1]["return"] is not None
    shown = capsys.readouterr().out
    for part in ("return", "human", "right", "steps/s", "evaluate with: compressive rl evaluate"):
        assert part in shown


def test_threads_are_those_of_the_configuration_while_it_trains(tmp_path, monkeypatch):
    before, seen = torch.get_num_threads(), []
    real = Learner.update

    def update(*args):
        seen.append(torch.get_num_threads())
        return real(*args)

    monkeypatch.setattr(Learner, "update", update)
    for threads in (2, 0):
        run = start(tmp_path / f"run{threads}", tiny_agent_run(train={"threads": threads, "steps": 64}))
        assert train(run) == 0
        assert set(seen) == {threads or before}
        assert torch.get_num_threads() == before
        seen.clear()


@pytest.mark.slow
def test_a_limit_of_minutes_ends_a_run_that_can_be_resumed(tmp_path, capsys):
    run = start(tmp_path / "run", tiny_agent_run(train={"steps": 10**9, "minutes": 0.02}))
    assert train(run) == 0
    assert "(train.minutes=0.02 is over)" in capsys.readouterr().out
    assert latest(run.checkpoints).step == read_metrics(run.folder)[-1]["step"]


def test_losses_that_stay_non_finite_stop_the_run(tmp_path, monkeypatch):
    run = start(tmp_path / "run", tiny_agent_run())
    monkeypatch.setattr("compressive.rl.learning.shaped", lambda reward, *_: reward * torch.nan)
    with pytest.raises(DivergedError, match="no finite loss or gradient for 3 updates in a row"):
        train(run)


def test_scores_follow_from_the_outcomes():
    found = scores(Outcomes(returns=659.0, episodes=10, right=30, wrong=10), True)
    assert found["return"] == pytest.approx(65.9)
    assert found["human_normalised"] == pytest.approx(1)
    assert found["choice_accuracy"] == 0.75
    nothing = scores(Outcomes(0.0, 0, 0, 0), True)
    assert nothing["return"] is nothing["choice_accuracy"] is None
    assert scores(Outcomes(returns=9.0, episodes=3, right=0, wrong=0), False)["human_normalised"] is None


def test_a_task_that_cannot_be_saved_starts_new_episodes(tmp_path):
    run = tiny_agent_run(task={"name": "CartPole-v1", "envs": 2}, train={"batch": 2, "steps": 64})
    assert train(start(tmp_path / "run", run)) == 0
    longer = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=128))
    assert train(start(tmp_path / "run", longer)) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 128


@pytest.mark.slow
def test_the_commands_train_resume_evaluate_and_watch(tmp_path, capfd):
    run = tiny_agent_run(train={"steps": 192})
    out = str(tmp_path / "run")
    words = ["rl", "train", "rooms", *flags(run), "--out", out]

    def say(*more):
        code = main(list(more))
        return code, *capfd.readouterr()

    code, shown, _ = say(*words)
    assert code == 0
    assert "step 192/192" in shown
    assert AgentFolder.open(tmp_path / "run").config == run
    assert json.loads((tmp_path / "run" / "environment.jsonl").read_text())["torch"] == torch.__version__
    code, _, error = say(*words)
    assert code == 2
    assert "holds a run already: continue it with --resume" in error
    code, shown, _ = say(*words, "--resume", "--train.steps", "384")
    assert code == 0
    assert "step 384/384" in shown
    code, _, error = say(*words, "--resume", "--task.objects", "3")
    assert code == 2
    assert "task.objects=3: the run to be resumed has 4" in error

    code, shown, _ = say("rl", "evaluate", out, "--episodes", "8", "--envs", "4", "--json")
    figures = json.loads(shown)
    assert (code, figures["episodes"], figures["policy"]) == (0, 8, f"{out}, step 384")
    code, shown, _ = say("rl", "evaluate", "oracle", "--episodes", "4", "--envs", "4")
    assert "return            67.000 ± 0.000   (published: human 65.9, random 0.312)" in shown
    assert "right choices     100.0% of 24" in shown
    code, old, _ = say("rl", "evaluate", "oracle", "--episodes", "4", "--lanes", "4")  # the flag's name in version 0.1
    assert (code, old) == (0, shown)
    code, shown, _ = say("rl", "evaluate", "oracle", "--of", out, "--episodes", "4", "--envs", "4")
    assert "published" not in shown
    video = tmp_path / "episode.gif"
    code, shown, _ = say("rl", "watch", out, "--greedy", "--delays", "4", "--out", str(video))
    assert code == 0
    assert video.stat().st_size > 1000
    code, _, error = say("rl", "evaluate", str(tmp_path / "nothing"))
    assert code == 2
    assert "train one: compressive rl train PRESET" in error
    code, _, error = say("train", "rooms")
    assert code == 2
    assert "preset='rooms' is an agent's: compressive rl train rooms" in error
    code, _, error = say("rl", "train", "enwik8")
    assert code == 2
    assert "preset='enwik8' is a model's: compressive train enwik8" in error


@pytest.mark.slow
def test_a_signal_saves_the_run(tmp_path):
    run = tiny_agent_run(train={"steps": 10**7, "checkpoint_every": 10**6})
    words = [*interpreter(), "-m", "compressive", "rl", "train", "rooms", *flags(run), "--out", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait() == 75
    assert "after SIGTERM; continue with: compressive rl train --resume " in rest
    assert latest(tmp_path / "run" / "checkpoints").step > 0


def test_text_runs_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {}, "data": {}, "train": {}}')
    with pytest.raises(ValueError, match="is no agent's run"):
        AgentFolder.open(tmp_path)


@pytest.mark.parametrize("words", [("train", "rooms"), ("evaluate",), ("watch",)])
def test_help_is_without_the_flags_of_version_0_1(words, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["rl", *words, "--help"])
    shown = capsys.readouterr().out
    assert "lanes" not in shown
    assert "--device" in shown or "--train.device" in shown
