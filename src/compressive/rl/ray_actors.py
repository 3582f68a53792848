"""Actors in other processes, on this machine or on others, run by Ray.

    compressive rl train rooms --train.actors 8                          # on this machine
    RAY_ADDRESS=10.0.0.1:6379 compressive rl train rooms --train.actors 64    # on a cluster started by `ray start`

Each actor runs its share of the environments with the weights it was sent last. These may be some updates older than
the learner's; V-trace corrects for that. Running episodes are not saved: a resumed run starts new ones.
"""

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from compressive.config.agent import AgentRun
from compressive.console import warn
from compressive.rl.acting import Actor, Rollout
from compressive.rl.agent.agent import Agent
from compressive.rl.env.build import build_task

try:
    import ray
    from ray.exceptions import RayActorError
except ImportError as found:
    raise ValueError(f"train.actors above 0: needs Ray; pip install 'compressive[ray]' ({found})") from None

CPU = torch.device("cpu")


def task_shapes(config: AgentRun) -> tuple[tuple[int, ...], int]:
    """Return the observation shape of the run's task and its number of actions."""
    task = build_task(dataclasses.replace(config.task, envs=1), 0, CPU)
    return task.observation_shape, task.n_actions


class Worker:
    """One actor in its own process, on one CPU core in fp32."""

    def __init__(self, config: AgentRun, number: int) -> None:
        torch.set_num_threads(1)
        options = dataclasses.replace(config.train, precision="fp32", compile=False)
        seed = config.train.seed + 2 * number
        task = build_task(dataclasses.replace(config.task, envs=config.envs_per_rollout), seed, CPU)
        self.agent = Agent(config, task.observation_shape, task.n_actions)
        self.actor = Actor(task, self.agent, options, CPU, seed + 1)

    def rollout(self, weights: dict[str, Tensor]) -> Rollout:
        """Collect one rollout with these weights."""
        self.agent.load_state_dict(weights)
        return self.actor.rollout()


class RemoteActors:
    """Returns rollouts in the order in which actors finish them; an actor that finished gets the newest weights."""

    def __init__(self, config: AgentRun, agent: Agent, device: torch.device) -> None:
        self.config, self.agent, self.device = config, agent, device
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            try:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)  # reads RAY_ADDRESS
            except ConnectionError as error:
                raise ConnectionError(
                    f"RAY_ADDRESS: {error}; if Ray runs there, it may ask for a token: RAY_AUTH_MODE=token, here and "
                    "for every `ray start`, and the token of the first machine (`ray get-auth-token`)"
                ) from None
        cores, wanted = ray.cluster_resources().get("CPU", 0), config.train.actors  # type: ignore[no-untyped-call]
        if wanted > cores:  # no error: a cluster may still grow
            warn(f"train.actors={wanted}: Ray has {cores:g} cores; the other actors wait for more")
        self.started = 0
        self.pending: dict[Any, Any] = {}
        self.idle = [self._start_worker() for _ in range(config.train.actors)]

    def rollout(self) -> Rollout:
        """Wait for the next rollout and return it on the learner's device; replace actors that died."""
        while True:
            if self.idle:
                weights = ray.put({name: tensor.detach().cpu() for name, tensor in self.agent.state_dict().items()})
                self.pending |= {worker.rollout.remote(weights): worker for worker in self.idle}
                self.idle = []
            (ready,), _ = ray.wait(list(self.pending), num_returns=1)
            worker = self.pending.pop(ready)
            try:
                rollout: Rollout = ray.get(ready)
            except RayActorError as error:
                warn(f"an actor died ({type(error).__name__}); another one takes over its environments")
                self.idle.append(self._start_worker())
                continue
            self.idle.append(worker)
            return rollout.to(self.device)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return nothing: running episodes are not saved."""
        return {}

    def load_state_dict(self, parts: dict[str, dict[str, Tensor]]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End all actors, and Ray if this object started it."""
        for worker in (*self.pending.values(), *self.idle):
            ray.kill(worker)
        if self.owns_ray:
            ray.shutdown()

    def _start_worker(self) -> Any:
        self.started += 1
        return ray.remote(num_cpus=1)(Worker).remote(self.config, self.started)
