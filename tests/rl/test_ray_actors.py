"""Actors in Ray processes, and the scheduling of rollouts on a stand-in for Ray."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from rl_helpers import tiny_agent_run
from training_helpers import command, flags

from compressive.rl.loop import read_metrics, train
from compressive.rl.run import AgentFolder


@pytest.mark.slow
def test_two_ray_actors(tmp_path, monkeypatch):
    """Two Ray processes act, this one learns; then the run continues without them."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else, on a busy machine, they take minutes to start
    run = tiny_agent_run(train={"actors": 2, "steps": 18 * 16 * 4, "batch": 3, "learning_rate": 1e-3})
    out = str(tmp_path / "run")
    done = command("rl", "train", "rooms", *flags(run), "--out", out)
    assert done.returncode == 0, done.stderr
    assert "2 Ray actors" in done.stdout
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["step"] == 1152
    assert all(row["finite"] == 1 for row in rows)
    alone = dataclasses.replace(run, train=dataclasses.replace(run.train, actors=0, steps=1248))
    assert train(AgentFolder.create(tmp_path / "run", alone)) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1248
    assert_some_act_with_older_weights(run)  # not a test of its own: one Ray at a time on a machine


def test_a_cluster_that_refuses_is_explained(monkeypatch):
    """Since Ray 2.59 a cluster may ask for a token, and says to its user only that it cannot be reached."""
    from compressive.rl import ray_actors
    from compressive.rl.agent.agent import Agent

    def refuse(**options):
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379")

    monkeypatch.setattr(ray_actors, "ray", SimpleNamespace(is_initialized=lambda: False, init=refuse))
    run = tiny_agent_run(train={"actors": 2})
    with pytest.raises(ConnectionError, match=r"RAY_ADDRESS: Failed to connect .*:6379; .* RAY_AUTH_MODE=token"):
        ray_actors.RemoteActors(run, Agent(run, *ray_actors.task_shapes(run)), torch.device("cpu"))


def assert_some_act_with_older_weights(run):
    """With an update after each rollout, the second process to finish has used the first weights."""
    from compressive.rl.agent.agent import Agent
    from compressive.rl.learning import Learner
    from compressive.rl.ray_actors import CPU, RemoteActors, task_shapes

    agent = Agent(run, *task_shapes(run))
    source, learner = RemoteActors(run, agent, CPU), Learner(agent, run.train, CPU)
    deadline, ratio = time.monotonic() + 240, 1.0
    try:
        while abs(ratio - 1) <= 1e-4:  # on policy, until the second process has started, however long that takes
            assert time.monotonic() < deadline
            ratio = float(learner.update(source.rollout()).ratio)
    finally:
        source.close()


class Died(Exception):
    """What the stand-in for Ray raises instead of RayActorError."""


@dataclasses.dataclass(eq=False)  # compared by identity, as Ray's are
class Task:
    worker: object
    weights: dict[str, torch.Tensor]


class Ray:
    """A stand-in for Ray: a task is done when its result is wanted, first come, first served."""

    def __init__(self, cores=2.0, deaths=0):
        self.cores, self.deaths, self.killed, self.used = cores, deaths, [], []

    def remote(self, **_):
        return lambda kind: SimpleNamespace(remote=lambda *arguments: self.hire(kind(*arguments)))

    def hire(self, worker):
        return SimpleNamespace(rollout=SimpleNamespace(remote=lambda weights: Task(worker, weights)))

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
        self.used.append(float(task.weights["policy.bias"].mean()))
        return task.worker.rollout(task.weights)

    def kill(self, handle):
        self.killed.append(handle)


def remote_actors(monkeypatch, ray):
    """Two actors run by the stand-in, and the warnings."""
    from compressive.rl import ray_actors as remote
    from compressive.rl.agent.agent import Agent

    run = tiny_agent_run(train={"actors": 2, "batch": 3})
    warned: list[str] = []
    monkeypatch.setattr(remote, "ray", ray)
    monkeypatch.setattr(remote, "RayActorError", Died)
    monkeypatch.setattr(remote, "warn", warned.append)
    return remote.RemoteActors(run, Agent(run, *remote.task_shapes(run)), torch.device("cpu")), warned


def test_an_actor_that_dies_is_replaced(monkeypatch):
    ray = Ray(deaths=1)
    source, warned = remote_actors(monkeypatch, ray)
    assert source.rollout().start.shape == (3, 17)
    assert len(warned) == 1
    assert "an actor died (Died)" in warned[0]
    assert source.started == 3
    source.close()
    assert len(ray.killed) == 2


def test_an_actor_that_finished_gets_the_newest_weights(monkeypatch):
    """The other one is an update behind by then, which V-trace corrects for."""
    ray = Ray()
    source, warned = remote_actors(monkeypatch, ray)
    for update in range(1, 5):
        source.rollout()
        torch.nn.init.constant_(source.agent.policy.bias, update)
    assert ray.used == [0, 0, 1, 2]
    assert warned == []


def test_more_actors_than_cores_are_warned_of(monkeypatch):
    _, warned = remote_actors(monkeypatch, Ray(cores=1.0))
    assert warned == ["train.actors=2: Ray has 1 cores; the other actors wait for more"]
