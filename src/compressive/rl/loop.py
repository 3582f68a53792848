"""Training an agent: act for a window, learn from it, and so on.

compressive rl train rooms-fast --out runs/rooms-fast
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from compressive.distributed import World
from compressive.rl.acting import OUTCOMES, Actor, Unroll
from compressive.rl.agent.agent import Agent
from compressive.rl.env.rooms import human_normalised
from compressive.rl.env.task import build_task
from compressive.rl.learning import FIGURES, Learner
from compressive.rl.run import AgentFolder
from compressive.runs import checkpoint
from compressive.runtime import Stopwatch, noted_signals, peak_gib, pick_device
from compressive.training.loop import FINISHED, INTERRUPTED, PATIENCE, DivergedError, Late, shrug_off
from compressive.training.recorder import Recorder, clock, show, warn


class Source(Protocol):
    """Where unrolls come from: an actor in this process, or many elsewhere."""

    def unroll(self) -> Unroll:
        """Give the next one, on the learner's device."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """All that is needed to play on; nothing where that cannot be kept."""

    def load_state_dict(self, parts: dict[str, dict[str, Tensor]]) -> None:
        """Play on from there."""

    def close(self) -> None:
        """Let go of whoever plays elsewhere."""


def train(run: AgentFolder) -> int:
    """Train a run from its newest checkpoint, or from the beginning where it has none, to its last step."""
    config, options = run.config, run.config.train
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # pictures are always of one size
    torch.manual_seed(options.seed)
    source: Source
    if options.actors:
        from compressive.rl.ray_actors import RemoteActors, task_shapes

        shape, n_actions = task_shapes(config)
        agent = Agent(config, shape, n_actions).to(device)
        source = RemoteActors(config, agent, device)
    else:
        task = build_task(config.task, options.seed, device, options.compile)
        agent = Agent(config, task.observation_shape, task.n_actions).to(device)
        source = Actor(task, agent, options, device, options.seed + 1)
    learner = Learner(agent, options, device)

    step, seconds = 0, 0.0
    if (saved := checkpoint.latest(run.checkpoints)) is not None:
        step, seconds = saved.state["step"], saved.state["seconds"]
        kept = {} if options.actors or saved.state["actors"] else source.state_dict()
        # What is empty may be one tensor under many names: each needs its own to be read into.
        kept = {part: {name: tensor.clone() for name, tensor in tensors.items()} for part, tensors in kept.items()}
        saved.fill(_not_empty(learner.state_dict() | kept))
        if kept:
            source.load_state_dict(kept)

    per_unroll = config.lanes_per_source * config.memory.window
    parts_of = torch.arange(config.lanes_per_source, device=device).split(config.batch)
    late, tally, stopping, out_of_time = Late(device), Tally(device, step, config.task.comparable), False, False
    with (
        contextlib.closing(source),
        EpisodeRecorder(run.folder, config, step, seconds) as recorder,
        checkpoint.Saver(run.checkpoints, World(device=device)) as saver,
        noted_signals() as signals,
    ):
        where = f"from step {step}" if step else f"{sum(p.numel() for p in agent.parameters()) / 1e6:.2f} M parameters"
        apart = f", {options.actors} actors apart" if options.actors else ""
        recorder.say(
            f"training {run.folder} on {config.task.name}, {config.task.lanes} lanes, core {config.agent.core}, "
            f"{device}{apart}, {options.precision}, {where}"
        )
        unrolls = step // per_unroll
        while step < options.steps and not stopping and not out_of_time:
            unroll = source.unroll()
            figures = torch.stack([learner.update(unroll.select(lanes)) for lanes in parts_of])
            step, unrolls = step + per_unroll, unrolls + 1
            figures = torch.cat([figures[:, :-1].mean(dim=0), figures[:, -1:].amin(dim=0)])  # finite if all are
            tally.add(step, late.exchange(torch.cat([figures, unroll.outcomes])))

            last = step >= options.steps
            stopping = bool(signals)
            out_of_time = 0 < options.minutes * 60 <= recorder.seconds
            if unrolls % options.log_every == 0 or last or stopping or out_of_time:
                tally.add(step, late.flush())
                recorder.train(step, tally.take(step))
            if unrolls % options.checkpoint_every == 0 or last or stopping or out_of_time:
                with tally.paused():
                    with shrug_off(recorder):
                        saver.wait()
                    state = {"step": step, "seconds": recorder.seconds, "actors": options.actors}
                    saver.save(step, _not_empty(learner.state_dict() | source.state_dict()), state)
        saver.wait()  # the last one is the one that must not fail
        if stopping:
            recorder.say(f"saved step {step} after {signals[0].name}; continue with --resume")
            return INTERRUPTED
        why = "steps" if step >= options.steps else f"steps, as train.minutes={options.minutes:g} are over,"
        recorder.say(
            f"done: {step} {why} in {clock(recorder.seconds)}; evaluate with: compressive rl evaluate {run.folder}"
        )
    return FINISHED


class Tally(Stopwatch):
    """Sums up what updates report, watches for divergence, measures speed."""

    def __init__(self, device: torch.device, step: int, comparable: bool) -> None:
        super().__init__(device)
        self.step, self.comparable = step, comparable
        self.rows: list[list[float]] = []
        self.in_a_row = 0

    def add(self, step: int, row: list[float] | None) -> None:
        """Take the numbers of one update, if there are any."""
        if row is None:
            return
        self.rows.append(row)
        self.in_a_row = 0 if row[FIGURES.index("finite")] else self.in_a_row + 1
        if self.in_a_row:
            warn(
                f"loss {row[0]:.3g}, gradient norm {row[FIGURES.index('gradient_norm')]:.3g} about step {step}: skipped"
            )
        if self.in_a_row >= PATIENCE:
            raise DivergedError(
                f"no finite loss or gradient for {PATIENCE} updates in a row, about step {step}; the last checkpoint "
                "is good: lower train.learning-rate or train.clip, or try train.precision fp32"
            )

    def take(self, step: int) -> dict[str, float | None]:
        """Give averages and counts since the last time."""
        rows, self.rows = np.array(self.rows or [[math.nan] * (len(FIGURES) + len(OUTCOMES))]), []
        speed, self.step = (step - self.step) / self.lap(), step
        means = dict(zip(FIGURES, rows[:, : len(FIGURES)].mean(axis=0), strict=True))
        sums = dict(zip(OUTCOMES, rows[:, len(FIGURES) :].sum(axis=0), strict=True))
        return {
            **{name: _number(value) for name, value in means.items()},
            **scores(sums, self.comparable),
            "steps_per_second": speed,
            "peak_gib": peak_gib(self.device),
        }


def scores(outcomes: dict[str, float], comparable: bool) -> dict[str, float | None]:
    """Turn sums over play, see OUTCOMES, into what people read; `comparable` with people on the original task."""
    episodes, choices = outcomes["episodes"], outcomes["right"] + outcomes["wrong"]
    mean = outcomes["return"] / episodes if episodes > 0 else None
    return {
        "return": mean,
        "human_normalised": human_normalised(mean) if comparable and mean is not None else None,
        "choice_accuracy": outcomes["right"] / choices if choices > 0 else None,
        "episodes": episodes,
        "choices": choices,
    }


class EpisodeRecorder(Recorder):
    """Shows what matters about an agent."""

    def train(self, step: int, values: dict[str, float | None]) -> None:
        """Record a stretch of training that ends with this step."""
        self._write("train", step, values)
        self._line(
            step,
            f"step {step}/{self.config.train.steps}  return {show(values['return'], 2)}  "
            f"human {show(values['human_normalised'], 1, '%')}  right {show(values['choice_accuracy'], 1, '%')} of "
            f"{show(values['choices'], 0)}  entropy {show(values['entropy'], 2)}  "
            f"baseline {show(values['baseline_loss'], 4)}  compression {show(values['compression_loss'], 4)}  "
            f"norm {show(values['gradient_norm'], 2)}  {show(values['steps_per_second'], 0)} steps/s  "
            f"mem {show(values['peak_gib'], 2)} GiB  {clock(self.left(step))} left",
        )


def _not_empty(parts: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {name: part for name, part in parts.items() if part}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def curve(folder: Path) -> list[dict[str, Any]]:
    """Read what a run has recorded so far."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
