"""Training an agent: collect a rollout, update from it, repeat.

compressive rl train rooms-fast --out runs/rooms-fast
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from compressive.config.agent import AgentRun
from compressive.console import warn
from compressive.distributed import World
from compressive.kernels.dispatch import describe, explain
from compressive.rl.acting import Actor, Outcomes, Rollout
from compressive.rl.agent.agent import Agent
from compressive.rl.env.build import build_task
from compressive.rl.env.rooms import human_normalised
from compressive.rl.learning import Learner, UpdateStats, mean_stats
from compressive.rl.run import AgentFolder
from compressive.runs import checkpoint
from compressive.runtime import Stopwatch, cpu_threads, noted_signals, peak_gib, pick_device
from compressive.training.loop import (
    FINISHED,
    INTERRUPTED,
    PATIENCE,
    AsyncReadback,
    DivergedError,
    tolerate_failed_checkpoint,
)
from compressive.training.recorder import Recorder, clock, show


class RolloutSource(Protocol):
    """Where rollouts come from: an actor in this process, or actors in other processes."""

    def rollout(self) -> Rollout:
        """Return the next rollout, on the learner's device."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return everything needed to continue, as the parts of a checkpoint; empty if it cannot be saved."""

    def load_state_dict(self, parts: dict[str, dict[str, Tensor]]) -> None:
        """Continue from a saved state."""

    def close(self) -> None:
        """End the actors in other processes."""


def train(run: AgentFolder) -> int:
    """Train a run to its last step, from its newest checkpoint if it has one. Returns the exit code.

    Raises DivergedError if losses or gradients stay non-finite.
    """
    with cpu_threads(run.config.train.threads):
        return _train(run)


def _train(run: AgentFolder) -> int:
    config, options = run.config, run.config.train
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # image sizes never change
    torch.manual_seed(options.seed)
    agent, source = build_source(config, device)
    learner = Learner(agent, options, device)
    step, seconds = resume(run, learner, source)

    steps_per_rollout = config.envs_per_rollout * config.memory.window
    minibatches = torch.arange(config.envs_per_rollout, device=device).split(config.batch)
    readback, stats = AsyncReadback(device), TrainingStats(device, step, config.task.comparable)
    stopping = out_of_time = False
    with (
        contextlib.closing(source),
        EpisodeRecorder(run.folder, config, step, seconds) as recorder,
        checkpoint.Saver(run.checkpoints, World(device=device)) as saver,
        noted_signals() as signals,
    ):
        where = f"from step {step}" if step else f"{sum(p.numel() for p in agent.parameters()) / 1e6:.2f} M parameters"
        actors = f", {options.actors} Ray actors" if options.actors else ""
        recorder.say(
            f"training {run.folder} on {config.task.name}, {config.task.envs} environments, core {config.agent.core}, "
            f"{device}{actors}, {options.precision}, {where}"
        )
        if config.agent.core in ("compressive", "txl"):
            for line in describe(explain(config.memory, device=device.type, precision=options.precision, agent=True)):
                recorder.say(line)
        rollouts = step // steps_per_rollout
        while step < options.steps and not stopping and not out_of_time:
            rollout = source.rollout()
            progress = step / options.steps
            updates = [learner.update(rollout.select(envs), progress) for envs in minibatches]
            step, rollouts = step + steps_per_rollout, rollouts + 1
            stats.add(step, readback.exchange(pack(mean_stats(updates), rollout.outcomes)))

            last = step >= options.steps
            stopping = bool(signals)
            out_of_time = 0 < options.minutes * 60 <= recorder.seconds
            if rollouts % options.log_every == 0 or last or stopping or out_of_time:
                stats.add(step, readback.flush())
                recorder.train(step, stats.summary(step))
            if rollouts % options.checkpoint_every == 0 or last or stopping or out_of_time:
                with stats.paused():
                    with tolerate_failed_checkpoint(recorder):
                        saver.wait()
                    state = {"step": step, "seconds": recorder.seconds, "actors": options.actors}
                    saver.save(step, _not_empty(learner.state_dict() | source.state_dict()), state)
        saver.wait()  # a failure of the last checkpoint is an error
        if stopping:
            go_on = f"compressive rl train --resume {run.folder}"
            recorder.say(f"saved step {step} after {signals[0].name}; continue with: {go_on}")
            return INTERRUPTED
        why = "steps" if step >= options.steps else f"steps (train.minutes={options.minutes:g} is over)"
        recorder.say(
            f"done: {step} {why} in {clock(recorder.seconds)}; evaluate with: compressive rl evaluate {run.folder}"
        )
    return FINISHED


def build_source(config: AgentRun, device: torch.device) -> tuple[Agent, RolloutSource]:
    """Build the agent and what collects its rollouts: Ray actors if `train.actors` is set, else one actor here."""
    options = config.train
    if options.actors:
        from compressive.rl.ray_actors import RemoteActors, task_shapes

        agent = Agent(config, *task_shapes(config)).to(device)
        return agent, RemoteActors(config, agent, device)
    task = build_task(config.task, options.seed, device, options.compile)
    agent = Agent(config, task.observation_shape, task.n_actions).to(device)
    return agent, Actor(task, agent, options, device, options.seed + 1)


def resume(run: AgentFolder, learner: Learner, source: RolloutSource) -> tuple[int, float]:
    """Load the newest checkpoint, if there is one; return its step and the seconds trained so far.

    Environments and memory continue only if both the saved run and this one act in their own process.
    """
    saved = checkpoint.latest(run.checkpoints)
    if saved is None:
        return 0, 0.0
    continues = not run.config.train.actors and not saved.state["actors"]
    # Empty tensors may be one tensor under several names; loading needs a separate tensor for each name.
    parts = {
        part: {name: tensor.clone() for name, tensor in tensors.items()}
        for part, tensors in (source.state_dict() if continues else {}).items()
    }
    saved.fill(_not_empty(learner.state_dict() | parts))
    if parts:
        source.load_state_dict(parts)
    return saved.state["step"], saved.state["seconds"]


class RolloutReport(NamedTuple):
    """What a rollout and its updates report, on the host."""

    update: UpdateStats[float]  # means over the updates
    outcomes: Outcomes[float]


def pack(update: UpdateStats[Tensor], outcomes: Outcomes[Tensor]) -> Tensor:
    """Return all values of a report as one vector, so that they take one copy from the device."""
    return torch.stack([*update, *outcomes])


def unpack(values: list[float]) -> RolloutReport:
    """Return the report that `pack` made a vector of."""
    count = len(UpdateStats._fields)
    return RolloutReport(UpdateStats(*values[:count]), Outcomes(*values[count:]))


class TrainingStats(Stopwatch):
    """Collects the reports since the last log line, detects divergence and measures speed."""

    def __init__(self, device: torch.device, step: int, comparable: bool) -> None:
        super().__init__(device)
        self.step, self.comparable = step, comparable
        self.reports: list[RolloutReport] = []
        self.in_a_row = 0

    def add(self, step: int, values: list[float] | None) -> None:
        """Add a packed report; None is ignored.

        Raises DivergedError if PATIENCE reports in a row are not finite.
        """
        if values is None:
            return
        report = unpack(values)
        self.reports.append(report)
        self.in_a_row = 0 if report.update.finite else self.in_a_row + 1
        if self.in_a_row:
            loss, norm = report.update.loss, report.update.gradient_norm
            warn(f"loss {loss:.3g}, gradient norm {norm:.3g} about step {step}: update skipped")
        if self.in_a_row >= PATIENCE:
            raise DivergedError(
                f"no finite loss or gradient for {PATIENCE} updates in a row, about step {step}; the last checkpoint "
                "is good: lower train.learning-rate or train.clip, or try train.precision fp32"
            )

    def summary(self, step: int) -> dict[str, float | None]:
        """Return means of the updates, scores of the episodes and the speed since the last call."""
        reports, self.reports = self.reports, []
        speed, self.step = (step - self.step) / self.lap(), step
        means = UpdateStats(*np.mean([report.update for report in reports], axis=0))
        foresight = means.foresight / means.foreseen if means.foreseen > 0 else None  # weighted by choices
        outcomes = Outcomes(*np.sum([report.outcomes for report in reports], axis=0))
        return {
            **{name: _number(value) for name, value in means._asdict().items() if name != "foreseen"},
            "foresight": foresight,
            **scores(outcomes, self.comparable),
            "steps_per_second": speed,
            "peak_gib": peak_gib(self.device),
        }


def scores(outcomes: Outcomes[float], comparable: bool) -> dict[str, float | None]:
    """Return the mean return, choice accuracy and, if the task is `comparable`, the human-normalised score."""
    choices = outcomes.right + outcomes.wrong
    mean = outcomes.returns / outcomes.episodes if outcomes.episodes > 0 else None
    return {
        "return": mean,
        "human_normalised": human_normalised(mean) if comparable and mean is not None else None,
        "choice_accuracy": outcomes.right / choices if choices > 0 else None,
        "episodes": outcomes.episodes,
        "choices": choices,
    }


class EpisodeRecorder(Recorder):
    """A Recorder whose log lines show the figures of an agent."""

    def train(self, step: int, values: dict[str, float | None]) -> None:
        """Record the rollouts since the last log line, up to this step."""
        self._write("train", step, values)
        self._line(
            step,
            f"step {step}/{self.config.train.steps}  return {show(values['return'], 2)}  "
            f"human {show(values['human_normalised'], 1, '%')}  right {show(values['choice_accuracy'], 1, '%')} of "
            f"{show(values['choices'], 0)}  foresight {show(values['foresight'], 2)}  "
            f"entropy {show(values['entropy'], 2)}  baseline {show(values['baseline_loss'], 4)}  "
            f"compression {show(values['compression_loss'], 4)}  "
            f"norm {show(values['gradient_norm'], 2)}  {show(values['steps_per_second'], 0)} steps/s  "
            f"mem {show(values['peak_gib'], 2)} GiB  {clock(self.left(step))} left",
        )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, oldest first."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def _not_empty(parts: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {name: part for name, part in parts.items() if part}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
