"""Training an agent: progress, checkpoints, resuming to the bit, signals, and actors apart."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from rl_helpers import tiny_agent_run
from training_helpers import command, flags

from compressive.cli import main
from compressive.config import preset_names
from compressive.config.agent import AgentConfig, AgentRun, LearnConfig, TaskConfig
from compressive.rl import loop as room
from compressive.rl.loop import curve, scores, train
from compressive.rl.run import AgentFolder
from compressive.runs import checkpoint
from compressive.training.loop import DivergedError


def start(folder, run):
    return AgentFolder.create(folder, run)


def weights(run):
    return checkpoint.latest(run.checkpoints).tensors("model")


def strip(rows):
    """Lines without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "steps_per_second", "peak_gib")} for row in rows]


@pytest.mark.parametrize("core", ["compressive", "txl", "lstm", "none"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path, core, capsys):
    whole = start(tmp_path / "whole", tiny_agent_run(agent={"core": core}, train={"learning_rate": 1e-3}))
    assert train(whole) == 0
    half = start(tmp_path / "half", tiny_agent_run(agent={"core": core}, train={"learning_rate": 1e-3, "steps": 192}))
    assert train(half) == 0
    half = start(tmp_path / "half", whole.config)
    assert train(half) == 0
    a, b = weights(whole), weights(half)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert strip(curve(whole.folder)) == strip(curve(half.folder))
    assert "from step 192" in capsys.readouterr().out


def test_a_line_tells_what_matters(tmp_path, capsys):
    run = start(tmp_path / "run", tiny_agent_run(task={"lanes": 12}, train={"steps": 12 * 16 * 6, "batch": 4}))
    assert train(run) == 0
    rows = curve(run.folder)
    assert [row["step"] for row in rows] == [384, 768, 1152]
    assert all(row["episodes"] > 0 and row["steps_per_second"] > 0 and row["finite"] == 1 for row in rows)
    assert rows[-1]["return"] is not None
    shown = capsys.readouterr().out
    for part in ("return", "human", "right", "steps/s", "evaluate with: compressive rl evaluate"):
        assert part in shown


def test_a_budget_of_minutes_ends_a_run_that_can_go_on(tmp_path, capsys):
    run = start(tmp_path / "run", tiny_agent_run(train={"steps": 10**9, "minutes": 0.02}))
    assert train(run) == 0
    assert "as train.minutes=0.02 are over" in capsys.readouterr().out
    assert checkpoint.latest(run.checkpoints).step == curve(run.folder)[-1]["step"]


def test_what_is_never_finite_stops_the_run(tmp_path, monkeypatch):
    run = start(tmp_path / "run", tiny_agent_run())
    monkeypatch.setattr("compressive.rl.learning.shaped", lambda reward, *_: reward * torch.nan)
    with pytest.raises(DivergedError, match="no finite loss or gradient for 3 updates in a row"):
        train(run)


def test_scores_are_what_people_read():
    found = scores({"return": 659.0, "episodes": 10, "right": 30, "wrong": 10}, True)
    assert found["return"] == pytest.approx(65.9)
    assert found["human_normalised"] == pytest.approx(1)
    assert found["choice_accuracy"] == 0.75
    nothing = scores({"return": 0, "episodes": 0, "right": 0, "wrong": 0}, True)
    assert nothing["return"] is nothing["choice_accuracy"] is None
    assert scores({"return": 9.0, "episodes": 3, "right": 0, "wrong": 0}, False)["human_normalised"] is None


def test_only_the_original_task_is_comparable_with_people():
    assert TaskConfig().comparable
    assert TaskConfig(lanes=7, width=48, height=36).comparable
    assert TaskConfig("lab:contributed/dmlab30/rooms_select_nonmatching_object").comparable
    for other in (
        TaskConfig("CartPole-v1"),
        TaskConfig(delays=(0, 8)),
        TaskConfig(objects=3),
        TaskConfig(object_size=90),
        TaskConfig("lab:x"),
    ):
        assert not other.comparable


def test_a_task_that_cannot_be_kept_begins_new_episodes(tmp_path):
    run = tiny_agent_run(task={"name": "CartPole-v1", "lanes": 2}, train={"batch": 2, "steps": 64})
    assert train(start(tmp_path / "run", run)) == 0
    longer = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=128))
    assert train(start(tmp_path / "run", longer)) == 0
    assert curve(tmp_path / "run")[-1]["step"] == 128


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

    code, shown, _ = say("rl", "evaluate", out, "--episodes", "8", "--lanes", "4", "--json")
    figures = json.loads(shown)
    assert (code, figures["episodes"], figures["player"]) == (0, 8, f"{out}, step 384")
    code, shown, _ = say("rl", "evaluate", "oracle", "--episodes", "4", "--lanes", "4")
    assert "return            67.000 ± 0.000   (published: human 65.9, random 0.312)" in shown
    assert "right choices     100.0% of 24" in shown
    code, shown, _ = say("rl", "evaluate", "oracle", "--of", out, "--episodes", "4", "--lanes", "4")
    assert "published" not in shown
    picture = tmp_path / "episode.gif"
    code, shown, _ = say("rl", "watch", out, "--greedy", "--delays", "4", "--out", str(picture))
    assert code == 0
    assert picture.stat().st_size > 1000
    code, _, error = say("rl", "evaluate", str(tmp_path / "nothing"))
    assert code == 2
    assert "train one: compressive rl train PRESET" in error
    code, _, error = say("train", "rooms")
    assert code == 2
    assert "expected the name of one first" in error
    code, _, error = say("rl", "train", "enwik8")
    assert code == 2
    assert "of rooms, rooms-fast, rooms-tiny, rooms-txl" in error


def test_a_signal_saves_and_the_run_goes_on(tmp_path):
    run = tiny_agent_run(train={"steps": 10**7, "checkpoint_every": 10**6})
    words = [sys.executable, "-m", "compressive", "rl", "train", "rooms", *flags(run), "--out", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if line.startswith("step"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait() == 75
    assert "after SIGTERM; continue with --resume" in rest
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").step > 0


def test_two_actors_apart(tmp_path, monkeypatch):
    """Two Ray processes act, this one learns; then it goes on with none."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else, on a busy machine, they take minutes to start
    run = tiny_agent_run(train={"actors": 2, "steps": 18 * 16 * 4, "batch": 3, "learning_rate": 1e-3})
    out = str(tmp_path / "run")
    done = command("rl", "train", "rooms", *flags(run), "--out", out)
    assert done.returncode == 0, done.stderr
    assert "2 actors apart" in done.stdout
    rows = curve(tmp_path / "run")
    assert rows[-1]["step"] == 1152
    assert all(row["finite"] == 1 for row in rows)
    alone = dataclasses.replace(run, train=dataclasses.replace(run.train, actors=0, steps=1248))
    assert train(start(tmp_path / "run", alone)) == 0
    assert curve(tmp_path / "run")[-1]["step"] == 1248
    assert_some_act_with_older_weights(run)  # not a test of its own: one Ray at a time on a machine


def assert_some_act_with_older_weights(run):
    """With an update after each unroll, the process that is second to send one has played it with the first weights."""
    from compressive.rl.agent.agent import Agent
    from compressive.rl.learning import FIGURES, Learner
    from compressive.rl.ray_actors import CPU, RemoteActors, task_shapes

    agent = Agent(run, *task_shapes(run))
    source, learner = RemoteActors(run, agent, CPU), Learner(agent, run.train, CPU)
    deadline, ratio = time.monotonic() + 240, 1.0
    try:
        while abs(ratio - 1) <= 1e-4:  # on policy, until the second process has started, however long that takes
            assert time.monotonic() < deadline
            ratio = float(learner.update(source.unroll())[FIGURES.index("ratio")])
    finally:
        source.close()


class Died(Exception):
    """What the stand-in for Ray raises in the place of RayActorError."""


@dataclasses.dataclass(eq=False)  # told apart by identity, as Ray's are
class Task:
    worker: object
    weights: dict[str, torch.Tensor]


class Ray:
    """A stand-in for Ray: a task is done when its result is wanted, first come, first served."""

    def __init__(self, cores=2.0, deaths=0):
        self.cores, self.deaths, self.killed, self.played_with = cores, deaths, [], []

    def remote(self, **_):
        return lambda kind: SimpleNamespace(remote=lambda *arguments: self.hire(kind(*arguments)))

    def hire(self, worker):
        return SimpleNamespace(unroll=SimpleNamespace(remote=lambda weights: Task(worker, weights)))

    def put(self, weights):
        return {name: tensor.clone() for name, tensor in weights.items()}

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": self.cores}

    def wait(self, pending, num_returns):
        return pending[:num_returns], pending[num_returns:]

    def get(self, task):
        if self.deaths:
            self.deaths -= 1
            raise Died
        self.played_with.append(float(task.weights["policy.bias"].mean()))
        return task.worker.unroll(task.weights)

    def kill(self, handle):
        self.killed.append(handle)


def remote_actors(monkeypatch, ray):
    """Two actors apart, by the stand-in, and what was warned of."""
    from compressive.rl import ray_actors as remote
    from compressive.rl.agent.agent import Agent

    run, warned = tiny_agent_run(train={"actors": 2, "batch": 3}), []
    monkeypatch.setattr(remote, "ray", ray)
    monkeypatch.setattr(remote, "RayActorError", Died)
    monkeypatch.setattr(remote, "warn", warned.append)
    return remote.RemoteActors(run, Agent(run, *remote.task_shapes(run)), torch.device("cpu")), warned


def test_an_actor_that_dies_is_replaced(monkeypatch):
    ray = Ray(deaths=1)
    source, warned = remote_actors(monkeypatch, ray)
    assert source.unroll().start.shape == (3, 17)
    assert len(warned) == 1
    assert "an actor died (Died)" in warned[0]
    assert source.made == 3
    source.close()
    assert len(ray.killed) == 2


def test_whoever_sent_an_unroll_plays_on_with_the_newest_weights(monkeypatch):
    """The other one is an update behind by then: V-trace's case."""
    ray = Ray()
    source, warned = remote_actors(monkeypatch, ray)
    for update in range(1, 5):
        source.unroll()
        torch.nn.init.constant_(source.agent.policy.bias, update)
    assert ray.played_with == [0, 0, 1, 2]
    assert warned == []


def test_more_actors_than_cores_are_warned_of(monkeypatch):
    _, warned = remote_actors(monkeypatch, Ray(cores=1.0))
    assert warned == ["train.actors=2: Ray has 1 cores, and the actors beyond that wait for more"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"task": {"objects": 40}}, "objects=40: expected 2 to 36"),
        ({"task": {"delays": ()}}, r"delays=\(\): expected one or more"),
        ({"task": {"speed": 2000.0}}, "speed=2000.0: expected at most 960"),
        ({"agent": {"core": "gru"}}, "core='gru': expected one of compressive, txl, lstm, none"),
        ({"agent": {"channels": ()}}, r"channels=\(\): expected one or more"),
        ({"train": {"discount": 1.0}}, "discount=1.0: expected a number below 1"),
        ({"train": {"minutes": -1.0}}, "minutes=-1.0: expected a number of at least 0"),
        ({"train": {"batch": 4}}, "batch=4: expected a divisor of 6"),
        ({"train": {"actors": 4}}, "lanes=6: 4 actors cannot share them evenly"),
        ({"model": {"compressed_size": 0}}, "core='compressive' with compressed_size=0"),
        ({"model": {"compression_loss": "none"}}, "nothing would train the compressor"),
    ],
)
def test_impossible_runs_are_refused(tables, message):
    with pytest.raises(ValueError, match=message):
        tiny_agent_run(**tables)


def test_presets_are_the_paper_s_values_with_unrolls_of_64():
    for name in preset_names("task"):
        assert AgentRun.from_preset(name).memory.window == 64
    run = AgentRun.from_preset("rooms")
    assert (run.train.learning_rate, run.train.entropy_cost) == (1.5e-5, 2e-3)
    assert (run.model.memory_size, run.model.compressed_size) == (64, 64)
    assert (run.train.discount, run.train.baseline_cost, run.train.optimiser) == (0.99, 0.5, "rmsprop")
    assert run.agent == AgentConfig()
    assert run.task == TaskConfig()
    assert AgentRun.from_preset("rooms-txl").memory.compressed_sizes == (0,) * 4
    with pytest.raises(ValueError, match="expected an agent's"):
        AgentRun.from_preset("enwik8")
    assert LearnConfig().reward == "scaled"
    assert room.FINISHED == 0


def test_runs_on_text_are_told_apart(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {}, "data": {}, "train": {}}')
    with pytest.raises(ValueError, match="is no agent's run"):
        AgentFolder.open(tmp_path)
