"""Actors apart from the learner: processes on this machine or others, with Ray as the engine.

    compressive rl train rooms --train.actors 8                          # on this machine
    RAY_ADDRESS=10.0.0.1:6379 compressive rl train rooms --train.actors 64    # on a cluster that `ray start` has made

Each actor plays its share of the lanes with the weights that it was last given, so a policy may be some updates older
than the one that learns: V-trace corrects for it. Episodes under way are not saved; a resumed run begins new ones.
"""

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from compressive.config.agent import AgentRun
from compressive.rl.acting import Actor, Unroll
from compressive.rl.agent.agent import Agent
from compressive.rl.env.task import build_task
from compressive.training.recorder import warn

try:
    import ray
    from ray.exceptions import RayActorError
except ImportError as found:
    raise ValueError(f"train.actors above 0: needs Ray; pip install 'compressive[ray]' ({found})") from None

CPU = torch.device("cpu")


def task_shapes(config: AgentRun) -> tuple[tuple[int, ...], int]:
    """What a task shows, and how many actions it has."""
    task = build_task(dataclasses.replace(config.task, lanes=1), 0, CPU)
    return task.observation_shape, task.n_actions


class Worker:
    """One actor in a process of its own."""

    def __init__(self, config: AgentRun, number: int) -> None:
        torch.set_num_threads(1)
        options = dataclasses.replace(config.train, precision="fp32", compile=False)
        seed = config.train.seed + 2 * number
        task = build_task(dataclasses.replace(config.task, lanes=config.lanes_per_source), seed, CPU)
        self.agent = Agent(config, task.observation_shape, task.n_actions)
        self.actor = Actor(task, self.agent, options, CPU, seed + 1)

    def unroll(self, weights: dict[str, Tensor]) -> Unroll:
        """Play a window with these weights."""
        self.agent.load_state_dict(weights)
        return self.actor.unroll()


class RemoteActors:
    """Gives unrolls as they come, and gives whoever sent one the newest weights."""

    def __init__(self, config: AgentRun, agent: Agent, device: torch.device) -> None:
        self.config, self.agent, self.device = config, agent, device
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)  # or RAY_ADDRESS
        cores, wanted = ray.cluster_resources().get("CPU", 0), config.train.actors  # type: ignore[no-untyped-call]
        if wanted > cores:  # a cluster may still grow
            warn(f"train.actors={wanted}: Ray has {cores:g} cores, and the actors beyond that wait for more")
        self.made = 0
        self.pending: dict[Any, Any] = {}
        self.idle = [self._hire() for _ in range(config.train.actors)]

    def unroll(self) -> Unroll:
        """Wait for the next unroll; an actor that died is replaced."""
        while True:
            if self.idle:
                weights = ray.put({name: tensor.detach().cpu() for name, tensor in self.agent.state_dict().items()})
                self.pending |= {worker.unroll.remote(weights): worker for worker in self.idle}
                self.idle = []
            (ready,), _ = ray.wait(list(self.pending), num_returns=1)
            worker = self.pending.pop(ready)
            try:
                unroll: Unroll = ray.get(ready)
            except RayActorError as error:
                warn(f"an actor died ({type(error).__name__}); another takes its lanes")
                self.idle.append(self._hire())
                continue
            self.idle.append(worker)
            return unroll.to(self.device)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Nothing is kept of episodes under way."""
        return {}

    def load_state_dict(self, parts: dict[str, dict[str, Tensor]]) -> None:
        """Nothing to be read."""

    def close(self) -> None:
        """Let all actors go."""
        for worker in (*self.pending.values(), *self.idle):
            ray.kill(worker)
        if self.owns_ray:
            ray.shutdown()

    def _hire(self) -> Any:
        self.made += 1
        return ray.remote(num_cpus=1)(Worker).remote(self.config, self.made)
