"""What an experiment is: a claim, the models that test it at each scale, what is measured of each, table and picture.

    class Mine(Experiment):
        name, source, claim = "mine", "Table 1", "..."

        def rows(self, scale): return [Row("a", "model A", configured("quickstart", model={"window": 32}))]
        def measure(self, run, scale): return {"bits": ...}        # of one trained run; plain values for JSON
        def table(self, rows): return markdown(["", "bits"], [[row.row.title, figure_of(row.values("bits"))] ...])
        def verdicts(self, rows): return [Comparison.of(...).sentence(...)]
        def plot(self, rows, to): ...

Seeds, training, resuming and files are the runner's concern.
"""

import dataclasses
import functools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch

from compressive.architectures import build_model
from compressive.config import RunConfig, load_preset
from compressive.data.prepare import prepare
from compressive.data.sources import PUBLISHED
from compressive.distributed import World
from compressive.plotting import headline
from compressive.runs.run import Run
from compressive.runtime import pick_device
from compressive.training import loop, preflight
from compressive.training.flops import training_flops_per_token

Scale = Literal["tiny", "small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
BOOKS = Path("books")
"""The books of this repository, seen from its root: the corpus of `tiny`."""


class Hardware(NamedTuple):
    """What a scale is meant for, and the rate at which it trains there, for estimates."""

    name: str
    flops: float  # per second, counted as `training.flops` does


HARDWARE: Mapping[Scale, Hardware] = {
    "tiny": Hardware("one CPU core", 6e10),
    "small": Hardware("one H200", 1.2e14),
    "paper": Hardware("one H200", 2.5e14),
}
"""Assumed, not measured for each model: `base` reaches 2.6e14 on an H200, and narrower models less."""


class Cost(NamedTuple):
    """What one run costs."""

    parameters: int
    compressors: int  # parameters of the compressors, which are among them
    steps: int
    tokens: int
    seconds: float  # of training, estimated for the hardware that the scale is meant for


@functools.cache
def cost(config: RunConfig, scale: Scale) -> Cost:
    """Estimate what a run costs, from its configuration alone; nothing is allocated."""
    with torch.device("meta"):
        model = build_model(config.model)
    compressors = sum(parameter.numel() for parameter in model.compressor_parameters())
    tokens = config.train.steps * config.train.batch * config.train.unroll * config.model.window
    seconds = tokens * training_flops_per_token(config.model) / HARDWARE[scale].flops
    return Cost(sum(p.numel() for p in model.parameters()), compressors, config.train.steps, tokens, seconds)


@dataclass(frozen=True)
class Row:
    """A model to be trained, once per seed: a row of a table, or a curve of a picture.

    Experiments whose rows have the same name and configuration share the trained runs.
    """

    name: str
    """Of the runs' folders: letters, digits and dashes."""
    title: str
    """As tables and pictures show it."""
    config: RunConfig

    def cost(self, scale: Scale) -> Cost:
        """Estimate what one run costs."""
        return cost(self.config, scale)

    def train(self, folder: Path, seed: int, data_dir: Path, device: str) -> int:
        """Train one run to its end, or on from where it was; return the exit code of training."""
        config, world = self.seeded(seed, data_dir, device), World(device=pick_device(device))
        return loop.train(preflight.begin(folder, config, (), True, world), world)

    def open(self, folder: Path) -> Any:
        """Open a trained run, for `Experiment.measure`."""
        return Run.open(folder)

    def seeded(self, seed: int, data_dir: Path, device: str) -> RunConfig:
        """Return the configuration of one run."""
        return dataclasses.replace(
            self.config,
            data=dataclasses.replace(self.config.data, data_dir=str(data_dir)),
            train=dataclasses.replace(self.config.train, seed=seed, device=device),
        )


@dataclass(frozen=True)
class Measured:
    """A row and what was measured of its runs."""

    row: Row
    runs: Mapping[int, Mapping[str, Any]]
    """By seed: what `Experiment.measure` returned. Seeds that are not measured yet are missing."""

    def values(self, *keys: str) -> list[Any]:
        """Return one value of every seed, found under nested keys."""
        found = []
        for run in self.runs.values():
            value: Any = run
            for key in keys:
                value = value[key]
            found.append(value)
        return found


class Experiment(ABC):
    """One table or figure of the paper, or a question of our own."""

    name: ClassVar[str]
    source: ClassVar[str]
    """Where the claim stands: Table 4, Figure 2."""
    claim: ClassVar[str]
    """What the paper says, and so what is tested: one sentence."""
    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0, 1, 2), "paper": (0,)}

    @property
    def path(self) -> str:
        """How `compressive.experiments.load` finds it from another process."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @abstractmethod
    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the models to train, those to be trained first in front."""

    @abstractmethod
    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Measure one trained run; return plain values for JSON, keys without spaces."""

    @abstractmethod
    def table(self, rows: Sequence[Measured]) -> str:
        """Return the result as a Markdown table; some rows may not be measured yet."""

    @abstractmethod
    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Return sentences that say whether the claim holds here, each from a `Comparison`."""

    @abstractmethod
    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Write the picture as PNG; at least one row is measured."""

    def headline(self, fig: Any, verdict: str) -> None:
        """Write a verdict above a figure, and the paper's claim below it."""
        headline(fig, verdict, f"{self.source}: {self.claim}")

    def prepare(self, scale: Scale, data_dir: Path) -> None:
        """Prepare the corpora of the rows as far as this repository holds them.

        Raises FileNotFoundError, naming the command, for a corpus that has to be prepared by the user.
        """
        for corpus in dict.fromkeys(row.config.data.corpus for row in self.rows(scale)):
            prepare_corpus(corpus, data_dir)


def prepare_corpus(corpus: str, data_dir: Path) -> None:
    """Prepare a corpus of the books of this repository; raise FileNotFoundError if another one is not there."""
    if (data_dir / corpus / "manifest.json").exists():
        return
    ours = {"books": ("bytes", None), "books-words": ("words", None), "books-subwords": ("bpe", 2000)}
    if corpus in ours and BOOKS.is_dir():
        least = 3 if corpus == "books-words" else None  # else <unk> would never be seen in training
        prepare("text", (BOOKS,), None, data_dir, *ours[corpus], corpus, (0.9, 0.05, 0.05), min_count=least)
        return
    where = "" if data_dir == Path("data") else f" --data-dir {data_dir}"
    remedy = {
        **{name: f"compressive data prepare {name}" for name in PUBLISHED},
        **dict.fromkeys(ours, "run this in the root of the repository, which has books/"),
        "pg19": "compressive data prepare pg19 --source BUILT",
        "speech": "compressive data prepare speech --source RECORDINGS",
    }.get(corpus, f"compressive data prepare text FILES --name {corpus}")
    raise FileNotFoundError(f"{data_dir / corpus} does not exist: {remedy}{where if 'data prepare' in remedy else ''}")


def configured(preset: str, **tables: Mapping[str, Any]) -> RunConfig:
    """Return a preset with some values replaced: `configured("enwik8", model={"window": 96}, train={"steps": 10})`."""
    merged = load_preset(preset)
    for table, values in tables.items():
        merged[table] = {**merged.get(table, {}), **values}
    return RunConfig.from_tables(merged)


_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t distribution with 1 to 30 degrees of freedom."""


def _student(freedom: int) -> float:
    return math.inf if freedom < 1 else _STUDENT[min(freedom, len(_STUDENT)) - 1]


@dataclass(frozen=True)
class Comparison:
    """Two rows, seed by seed: how far their means are apart, and how far the seeds of one row are."""

    difference: float | None
    """Mean of the first less mean of the second; None if one has no values."""
    spread: float
    """Between the lowest and the highest seed of a row, in the row that has most of it."""
    margin: float
    """Half the width of the 95 % interval of the difference, by Student's t."""
    seeds: int
    """Seeds of the row that has fewer."""

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float], *others: Sequence[float]) -> Self:
        """Compare the values of two rows, one per seed; spread and variance are those of all rows of their table."""
        if not first or not second:
            return cls(None, 0.0, math.inf, 0)
        rows = [values for values in (first, second, *others) if values]
        spread = max(max(values) - min(values) for values in rows)
        freedom = sum(len(values) - 1 for values in rows)
        squares = sum((len(values) - 1) * statistics.variance(values) for values in rows if len(values) > 1)
        error = math.sqrt(squares / max(1, freedom) * (1 / len(first) + 1 / len(second)))
        difference = statistics.mean(first) - statistics.mean(second)
        return cls(difference, spread, _student(freedom) * error, min(len(first), len(second)))

    @classmethod
    def paired(cls, first: Sequence[float], second: Sequence[float]) -> Self:
        """Compare two measurements of the same runs: the spread is that of their difference, seed by seed."""
        apart = [a - b for a, b in zip(first, second, strict=True)]
        if not apart:
            return cls(None, 0.0, math.inf, 0)
        error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        return cls(statistics.mean(apart), max(apart) - min(apart), _student(len(apart) - 1) * error, len(apart))

    @property
    def verdict(self) -> Literal["lower", "higher", "inconclusive"]:
        """Whether the first is lower or higher.

        Inconclusive with one seed, if seeds differ as much as rows do, or if the 95 % interval has 0 in it.
        """
        if self.difference is None or self.seeds < 2 or abs(self.difference) <= max(self.spread, self.margin):
            return "inconclusive"
        return "lower" if self.difference < 0 else "higher"

    def sentence(self, first: str, second: str, unit: str = "bits", digits: int = 4) -> str:
        """Say it in words, with the numbers that the verdict follows from."""
        if self.difference is None:
            return f"{first} against {second}: not measured yet."
        if self.seeds < 2:
            return f"{first} against {second}: {self.difference:+.{digits}f} {unit}, one seed: inconclusive."
        return (
            f"{first} against {second}: {self.difference:+.{digits}f} ± {self.margin:.{digits}f} {unit}, seeds differ "
            f"by up to {self.spread:.{digits}f}: {self.verdict}."
        )


def figure_of(values: Sequence[float], digits: int = 4) -> str:
    """Write the mean of the seeds, and the lowest and the highest where there are several; a dash for none."""
    if not values:
        return "–"
    mean, low, high = (f"{of(values):,.{digits}f}" for of in (statistics.mean, min, max))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
