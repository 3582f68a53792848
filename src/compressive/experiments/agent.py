"""Figure 5: memory cores of an agent on the two rooms; and, ours, the same cores with a delay between the rooms.

A trial of the plain task takes 11 to 27 steps and an episode fits into window and memories, so that compression rates
cannot differ there by reach. `agent-delays` has a corridor between the rooms: the choice then comes up to several
memories after the object was seen. Its cores have one layer, whose reach is the formula's.

`tiny`, and `agent-delays` at `small` too, have no images: an observation is position, direction and the objects in
view, so that memory alone is tested.
"""

import dataclasses
import functools
import math
import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from compressive.config.agent import AgentRun
from compressive.experiments.experiment import Comparison, Cost, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.plotting import bound, figure, label_ends, save, tidy
from compressive.rl.agent.agent import Agent
from compressive.rl.env.build import build_task
from compressive.rl.evaluate import compare, evaluate
from compressive.rl.loop import read_metrics, train
from compressive.rl.policies import load_policy
from compressive.rl.run import AgentFolder
from compressive.runtime import pick_device

Tables = Mapping[str, Mapping[str, Any]]

RATES = (1, 2, 4, 8)
EPISODES: Mapping[Scale, int] = {"tiny": 512, "small": 1_024, "paper": 1_024}
"""Episodes of an evaluation, for each delay."""
ENVS = 256
SEED = 1_000_000
"""Seed of evaluations, far from those of training."""
POINTS = 100
"""Most points of a training curve that are kept."""
SPEEDS: Mapping[str, Mapping[Scale, float]] = {
    "image": {"tiny": 2_000.0, "small": 54_000.0, "paper": 20_000.0},
    "vector": {"tiny": 35_000.0, "small": 200_000.0},
}
"""Assumed agent steps per second by observation, for estimates. Measured: vectors at `tiny`, images at `small`."""
COLOURS = {
    "none": "#8a9ba8", "lstm": "#4f7a4a", "txl": "#2f6690", "txl-recent": "#7fb2d9", "rate1": "#e9b44c",
    "rate2": "#dd8a3e", "rate4": "#c8553d", "rate8": "#7d2a1b",
}  # fmt: skip
"""One colour per core."""
SHORT, OFTEN = 2, 4
"""The shortest delays, so many, are sampled so many times as often as each of the others: they teach what to remember.
With all delays alike nothing was learnt in 3 million steps (docs/log.md)."""
LEARNT = 0.6
"""Share of right choices from which on a delay counts as remembered; chance is 0.5 ± 0.03 over three seeds."""

_TINY: Tables = {
    "model": {"n_layers": 1, "d_model": 64, "n_heads": 1, "d_ff": 128, "window": 16, "memory_size": 16,
              "compressed_size": 16, "spanning_slots": "partial"},
    "task": {"envs": 64, "observation": "vector", "objects": 4},
    "train": {"batch": 8, "steps": 1_000_000, "stagger": True, "final_learning_rate": None, "final_entropy_cost": None},
}  # fmt: skip
_SMALL: Tables = {"model": {}, "task": {}, "train": {"steps": 20_000_000}}
_DELAYED: Mapping[Scale, Tables] = {
    "tiny": {"model": {}, "task": {"envs": 256, "objects": 2},
             "train": {"batch": 32, "steps": 8_000_000, "learning_rate": 1e-3, "final_learning_rate": 1e-4}},
    "small": {"model": {"n_layers": 1, "spanning_slots": "partial"},
              "task": {"envs": 1_024, "observation": "vector", "objects": 2},
              "train": {"batch": 64, "steps": 30_000_000, "entropy_cost": 0.04, "discount": 0.9, "learning_rate": 1e-3,
                        "final_learning_rate": 1e-4}},
    "paper": {"model": {"n_layers": 1, "spanning_slots": "partial"}, "task": {}, "train": {"steps": 200_000_000}},
}  # fmt: skip
"""What differs with delays. Batches are larger, as of a thousand steps only ten choose. With two objects every core
soon learns to choose; with four, three cores of four had learnt nothing after 5 million steps (docs/log.md)."""


@dataclass(frozen=True)
class AgentRow(Row):
    """An agent to be trained, once per seed."""

    config: AgentRun  # type: ignore[assignment]

    def cost(self, scale: Scale) -> Cost:
        """Estimate what one run costs; its tokens are agent steps."""
        return _cost(self.config, scale)

    def train(self, folder: Path, seed: int, data_dir: Path, device: str) -> int:
        """Train one run to its end, or on from where it was; return the exit code of training."""
        learning = dataclasses.replace(self.config.train, seed=seed, device=device)
        return train(AgentFolder.begin(folder, dataclasses.replace(self.config, train=learning), True))

    def open(self, folder: Path) -> AgentFolder:
        """Open a trained run."""
        return AgentFolder.open(folder)


@functools.cache
def _cost(config: AgentRun, scale: Scale) -> Cost:
    task = build_task(dataclasses.replace(config.task, envs=1), 0, torch.device("cpu"))
    with torch.device("meta"):
        agent = Agent(config, task.observation_shape, task.n_actions)
    compressors = sum(parameter.numel() for parameter in agent.compressor_parameters())
    steps = config.train.steps
    seconds = steps / SPEEDS[config.task.observation][scale]
    return Cost(sum(p.numel() for p in agent.parameters()), compressors, steps, steps, seconds)


class Cores(Experiment):
    """No memory, an LSTM, a TransformerXL with as many slots, and compressed memory at four rates."""

    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1, 2), "small": (0, 1, 2), "paper": (0, 1, 2)}

    @abstractmethod
    def base(self, scale: Scale) -> AgentRun:
        """Return the agent that all rows are changes of."""

    def row(self, scale: Scale, name: str, title: str, core: str = "compressive", **model: Any) -> AgentRow:
        """Return the row of one core."""
        base = self.base(scale)
        changed = dataclasses.replace(base.model, **model)
        agent = dataclasses.replace(base.agent, core=core)  # type: ignore[arg-type]
        return AgentRow(f"{self.name}-{name}", title, dataclasses.replace(base, model=changed, agent=agent))

    def rows(self, scale: Scale) -> Sequence[AgentRow]:
        """Return the cores, those that the claim compares first."""
        base = self.base(scale)
        slots = base.model.memory_sizes[0] + base.model.compressed_sizes[0]
        row = functools.partial(self.row, scale)
        rates = {rate: row(f"rate{rate}", f"rate {rate}", compression_rate=rate) for rate in RATES}
        return [
            rates[4],
            rates[1],
            row("txl", "TransformerXL", "txl", memory_size=slots),
            row("lstm", "LSTM", "lstm"),
            rates[2],
            rates[8],
            row("none", "no memory", "none"),
        ]

    def prepare(self, scale: Scale, data_dir: Path) -> None:
        """Do nothing: agents need no corpus."""

    def _colour(self, row: Row) -> str:
        return COLOURS[row.name.removeprefix(f"{self.name}-")]


class Rooms(Cores):
    """The plain task: return, right choices, and how fast they are learnt."""

    name = "agent"
    source = "Figure 5"
    claim = "With compressed memory the agent comes to human level; rate 4 is best, and rate 1 learns it less well."

    def base(self, scale: Scale) -> AgentRun:
        """Return a small agent with perfect eyes, rooms-fast, or the paper's."""
        if scale == "tiny":
            return configured("rooms-tiny", _TINY)
        return configured("rooms-fast", _SMALL) if scale == "small" else configured("rooms", {})

    def measure(self, run: AgentFolder, scale: Scale) -> dict[str, Any]:  # type: ignore[override]
        """Evaluate the agent beside a random policy and the oracle; keep its curve."""
        device = pick_device(run.config.train.device)
        _, found = compare(str(run.folder), EPISODES[scale], ENVS, SEED, device)
        rows = [row for row in read_metrics(run.folder) if row["choices"]]
        return {
            **{name: evaluation.as_dict() for name, evaluation in found.items()},
            "curve": [
                {name: row[name] for name in ("step", "return", "choice_accuracy")}
                for row in rows[:: max(1, -(-len(rows) // POINTS))]
            ],
        }

    def table(self, rows: Sequence[Measured]) -> str:
        """Return the evaluations, with chance and oracle below."""
        lines = [[row.row.title, *_scores(row, "agent")] for row in rows]
        measured = [row for row in rows if row.runs][:1]
        lines += [[title, *_scores(row, who)] for row in measured for who, title in OTHERS.items()]
        return markdown(["core", "return", "right choices", "choices per episode"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare every core with the first, rate 4, by return and by the spread of all."""
        first, *others = rows
        returns = [row.values("agent", "return") for row in rows]
        return [
            Comparison.of(first.values("agent", "return"), row.values("agent", "return"), *returns).sentence(
                first.row.title, row.row.title, "of return", 1
            )
            for row in others
        ]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot return and right choices over steps, the mean of the seeds."""
        fig = figure(11, 4.4)
        panels = {"return": "return per episode", "choice_accuracy": "share of right choices"}
        for axes, (key, title) in zip(fig.subplots(1, len(panels)), panels.items(), strict=True):
            ends = []
            for row in rows:
                points = _mean_curve(row.values("curve"), key)
                if points:
                    axes.plot(*zip(*points, strict=True), color=self._colour(row.row))
                    ends.append((points[-1][1], row.row.title, self._colour(row.row)))
            tidy(axes, title, "million agent steps")
            measured = next(row for row in rows if row.runs)
            if key == "return":
                for who, name in OTHERS.items():
                    bound(axes, measured.values(who, "return")[0], name)
            else:
                axes.set_ylim(0, 1)
                bound(axes, 0.5, "chance")
            label_ends(axes, ends)
        self.headline(fig, " ".join(self.verdicts(rows)[:2]))
        save(fig, to)


class Delays(Cores):
    """A corridor between the rooms, of lengths that are mixed in training: right choices by its length."""

    name = "agent-delays"
    source = "ours"
    claim = "A layer remembers what was seen up to n_m + c·n_cm steps before the window."

    def base(self, scale: Scale) -> AgentRun:
        """Return an agent with a core of one layer and delays within and beyond every reach."""
        config = configured("rooms-tiny", _TINY) if scale == "tiny" else configured("rooms-fast", _SMALL)
        config = changed(config, _DELAYED[scale])
        lengths = delays(config)
        mixed = lengths[:SHORT] * OFTEN + lengths[SHORT:]
        return dataclasses.replace(config, task=dataclasses.replace(config.task, delays=mixed))

    def rows(self, scale: Scale) -> Sequence[AgentRow]:
        """Return the cores, and a TransformerXL that has recent memory alone, without more slots in its place."""
        return [*super().rows(scale), self.row(scale, "txl-recent", "TransformerXL, half the slots", "txl")]

    def measure(self, run: AgentFolder, scale: Scale) -> dict[str, Any]:  # type: ignore[override]
        """Evaluate the agent at every delay."""
        device, found = pick_device(run.config.train.device), []
        for delay in _lengths(run.config):
            loaded = load_policy(str(run.folder), ENVS, SEED, device, delays=(delay,))
            evaluation = evaluate(loaded.task, loaded.policy, EPISODES[scale], SEED).as_dict()
            found.append({"delay": delay, **evaluation})
        shares = [share for one in found if isinstance(share := one["choice_accuracy"], float)]
        return {"formula": _reach(run.config), "mean_accuracy": statistics.mean(shares) if shares else 0.5,
                "delays": found}  # fmt: skip

    def table(self, rows: Sequence[Measured]) -> str:
        """Return right choices by delay, the longest that is remembered, and the formula."""
        lengths = _lengths(rows[0].row.config)  # type: ignore[arg-type]
        lines = []
        for row in rows:
            reach = _reach(row.row.config)  # type: ignore[arg-type]
            lines.append([
                row.row.title, "–" if reach is None else f"{reach:,}", _remembered(row),
                *(figure_of(_shares(row, length), 2) for length in lengths),
            ])  # fmt: skip
        return markdown(["core", "formula", "remembered", *(f"delay {length}" for length in lengths)], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare right choices within the formula's reach with those beyond it, then every core with TransformerXL."""
        within = []
        for row in rows:
            reach, lengths = _reach(row.row.config), _lengths(row.row.config)  # type: ignore[arg-type]
            near, far = ([n for n in lengths if (n < (reach or 0)) == inside] for inside in (True, False))
            if not near or not far:
                continue
            shares = [_mean_shares(row, some) for some in (near, far)]
            within.append(
                Comparison.paired(*shares).sentence(
                    f"{row.row.title}, delays of up to {near[-1]}", f"delays from {far[0]}", "of right choices", 3
                )
            )
        means = [row.values("mean_accuracy") for row in rows]
        (txl,) = (row for row in rows if row.row.title == "TransformerXL")
        return within + [
            Comparison.of(row.values("mean_accuracy"), txl.values("mean_accuracy"), *means).sentence(
                row.row.title, txl.row.title, "of right choices", 3
            )
            for row in rows
            if row is not txl
        ]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot right choices over the delay, the mean of the seeds and their range, with the reach of each core."""
        fig = figure(9, 4.8)
        axes, ends = fig.subplots(), []
        for row in rows:
            lengths, colour = _lengths(row.row.config), self._colour(row.row)  # type: ignore[arg-type]
            if not row.runs:
                continue
            at = range(len(lengths))
            shares = [_shares(row, length) or [math.nan] for length in lengths]
            axes.plot(at, list(map(statistics.mean, shares)), color=colour, marker="o", markersize=3)
            axes.fill_between(at, list(map(min, shares)), list(map(max, shares)), color=colour, alpha=0.12, linewidth=0)
            ends.append((statistics.mean(shares[-1]), row.row.title, colour))
            reach = _reach(row.row.config)  # type: ignore[arg-type]
            if reach is not None:
                axes.axvline(sum(n < reach for n in lengths) - 0.5, color=colour, linewidth=0.8, linestyle=(0, (2, 3)))
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        tidy(axes, "", "steps in the corridor between the rooms; dotted: the reach n_m + c·n_cm of each core",
             "share of right choices")  # fmt: skip
        axes.set_ylim(0.3, 1.02)
        bound(axes, 0.5, "chance")
        label_ends(axes, ends)
        self.headline(fig, " ".join(self.verdicts(rows)[:1]))
        save(fig, to)


OTHERS = {"random": "random policy", "oracle": "oracle"}


def configured(preset: str, tables: Tables) -> AgentRun:
    """Return an agent's preset with some values replaced."""
    return changed(AgentRun.from_preset(preset), tables)


def changed(config: AgentRun, tables: Tables) -> AgentRun:
    """Return a run with some values replaced."""
    sections = {name: dataclasses.replace(getattr(config, name), **values) for name, values in tables.items()}
    return dataclasses.replace(config, **sections)


def delays(config: AgentRun) -> tuple[int, ...]:
    """Return delays that tell the cores apart: short ones, and one below the reach of each rate and of none."""
    window = config.model.window
    reaches = [window * (1 + rate) for rate in (*RATES, 2 * max(RATES))]
    return (0, window // 2, *(reach - window // 2 for reach in reaches))


def _reach(config: AgentRun) -> int | None:
    """How many steps before its window a core of one layer sees; None for cores without slots."""
    return config.memory.temporal_range if config.agent.core in ("compressive", "txl") else None


def _lengths(config: AgentRun) -> list[int]:
    """Return the delays, each once."""
    return sorted(set(config.task.delays))


def _shares(row: Measured, delay: int) -> list[float]:
    """Return the share of right choices of every seed at one delay."""
    found = (one["choice_accuracy"] for delays in row.values("delays") for one in delays if one["delay"] == delay)
    return [share for share in found if share is not None]


def _mean_shares(row: Measured, lengths: Sequence[int]) -> list[float]:
    """Return the mean share of right choices over some delays, of every seed; chance where no choice was made."""
    means = []
    for delays in row.values("delays"):
        shares = [one["choice_accuracy"] for one in delays if one["delay"] in lengths]
        means.append(statistics.mean(0.5 if share is None else share for share in shares))
    return means


def _remembered(row: Measured) -> str:
    """Write the longest delay up to which the mean of the seeds is learnt; a dash for none."""
    longest = "–"
    for length in _lengths(row.row.config):  # type: ignore[arg-type]
        shares = _shares(row, length)
        if not shares or statistics.mean(shares) < LEARNT:
            break
        longest = f"{length:,}"
    return longest


def _scores(row: Measured, who: str) -> list[str]:
    shares = [share for share in row.values(who, "choice_accuracy") if share is not None]
    per_episode = [found[who]["choices"] / found[who]["episodes"] for found in row.runs.values()]
    return [figure_of(row.values(who, "return"), 1), figure_of(shares, 3), figure_of(per_episode, 1)]


def _mean_curve(curves: Sequence[Sequence[Mapping[str, float]]], key: str) -> list[tuple[float, float]]:
    """Return (million steps, mean of the seeds) for the points that all seeds have."""
    by_seed = [{point["step"]: point[key] for point in curve if point[key] is not None} for curve in curves]
    shared = sorted(set.intersection(*(set(curve) for curve in by_seed))) if by_seed else []
    return [(step / 1e6, statistics.mean(curve[step] for curve in by_seed)) for step in shared]
