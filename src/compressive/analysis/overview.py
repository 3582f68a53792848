"""What a run's folder tells about the run: kind, progress, scores, speed and state. No model is loaded."""

import dataclasses
import json
import math
import os
import re
import statistics
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from compressive.analysis.curves import Curves
from compressive.config import AgentRun, RunConfig, preset_names
from compressive.data.tokenizer import tokenizer_file
from compressive.runs.run import RELEASE, naming, read_config
from compressive.runs.shipped import shipped
from compressive.runs.weights import SCALE, weight_files

Kind = Literal["text", "speech", "agent"]
State = Literal["training", "finished", "interrupted", "failed", "release"]

PATIENCE = 120.0
"""Seconds without a record after which an unfinished run counts as stopped; more if its records are far apart."""
PARTS = 10
"""An agent's score is the mean over a stretch of this fraction of its records, as single records are noisy."""


@dataclass(frozen=True)
class Metric:
    """The main score of a run, as training records it."""

    name: str
    key: str  # in metrics.jsonl
    higher_is_better: bool = False


METRICS = {
    "bytes": Metric("bits per character", "bits"),
    "mulaw": Metric("bits per sample", "bits"),
    "pcm16": Metric("bits per sample", "bits"),
    "words": Metric("perplexity", "perplexity"),
    "bpe": Metric("perplexity per token", "perplexity"),
}
"""By kind of tokeniser."""
UNKNOWN = Metric("bits per token", "bits")
"""Of runs of version 0.1, which hold no tokeniser."""
RETURN = Metric("return", "return", higher_is_better=True)
"""Of agents."""
CHANCE = 0.5
"""Share of right choices by chance: the rooms offer two objects."""
SPEEDS: dict[Kind, str] = {"text": "tokens/s", "speech": "samples/s", "agent": "steps/s"}
"""Units of training speed."""


@dataclass(frozen=True)
class Overview:
    """A run on text or audio, an agent's run, or a release, as its folder describes it."""

    folder: Path
    kind: Kind
    config: RunConfig | AgentRun
    metric: Metric
    curves: Curves
    checkpoint: Path | None
    """The newest checkpoint's folder."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run's folder, or a shipped model's by its name.

        Raises FileNotFoundError if it holds no run, ValueError if that is damaged.
        """
        folder = shipped(folder)
        tables = read_config(folder, "compressive train")
        with naming(folder / "config.json"):
            config = AgentRun.from_tables(tables) if "task" in tables else RunConfig.from_tables(tables)
        tokenizer = _json(tokenizer_file(folder)).get("kind")
        metric = RETURN if isinstance(config, AgentRun) else METRICS.get(tokenizer or "", UNKNOWN)
        kind: Kind = (
            "agent" if isinstance(config, AgentRun) else "speech" if tokenizer in ("mulaw", "pcm16") else "text"
        )
        places = (folder / "checkpoints").glob("step-*")
        checkpoints = sorted(path for path in places if path.is_dir() and re.fullmatch(r"step-\d+", path.name))
        curves = Curves.load(folder / "metrics.jsonl")
        return cls(folder, kind, config, metric, curves, checkpoints[-1] if checkpoints else None)

    @property
    def corpus(self) -> str:
        """The corpus, or an agent's task."""
        return self.config.task.name if isinstance(self.config, AgentRun) else self.config.data.corpus

    @cached_property
    def environments(self) -> list[dict[str, Any]]:
        """What was noted at the start and at each resume: command, commit, versions, hardware, time."""
        path = self.folder / "environment.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.is_file() else []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:  # cut short by a crash
                continue
        return [line for line in found if isinstance(line, dict)]

    @property
    def preset(self) -> str | None:
        """The preset or file that the run was started from, as its first command says; None if that is unknown."""
        words = self.environments[0].get("command", []) if self.environments else []
        after = [str(word) for word in words[words.index("train") + 1 :]] if "train" in words else []
        if after and after[0] in preset_names():
            return after[0]
        configs = [following for word, following in pairwise(after) if word == "--config"]
        configs += [word.removeprefix("--config=") for word in after if word.startswith("--config=")]
        return Path(configs[0]).name if configs else None

    @cached_property
    def steps(self) -> int:
        """Steps done: of the newest record or checkpoint; of a release, the step it was exported at."""
        recorded = [int(line["step"]) for line in (*self.curves.train, *self.curves.evaluations)]
        return max([*recorded, self.saved, int(_json(self.folder / RELEASE).get("step", 0))])

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return int(self.checkpoint.name.removeprefix("step-")) if self.checkpoint else 0

    @property
    def seconds(self) -> float | None:
        """Seconds of training up to the newest record, those before a resume included."""
        times = [line["seconds"] for line in (*self.curves.train, *self.curves.evaluations) if "seconds" in line]
        return max(times, default=None)

    @property
    def started(self) -> str | None:
        """When it began, UTC."""
        return self.environments[0].get("time") if self.environments else None

    @cached_property
    def changed(self) -> float:
        """When a file of the run was written last, as seconds since 1970."""
        names = ("config.json", "environment.jsonl", "metrics.jsonl", "checkpoints", "samples", RELEASE)
        return max((path.stat().st_mtime for name in names if (path := self.folder / name).exists()), default=0.0)

    @property
    def scores(self) -> list[tuple[int, float]]:
        """The main score by step: on the validation split, or an agent's mean return over a tenth of its records."""
        if self.kind != "agent":
            return self.curves.values(self.metric.key, "eval")
        lines = [line for line in self.curves.train if isinstance(line.get("return"), int | float)]
        width = max(1, len(lines) // PARTS)
        found = []
        for end in range(width, len(lines) + 1):
            part = lines[end - width : end]
            episodes = sum(line.get("episodes") or 1 for line in part)
            mean = sum(line["return"] * (line.get("episodes") or 1) for line in part) / episodes
            found.append((int(part[-1]["step"]), mean))
        return found

    @property
    def best(self) -> float | None:
        """The best main score so far; None before the first."""
        values = [value for _, value in self.scores]
        return (max if self.metric.higher_is_better else min)(values) if values else None

    @property
    def final(self) -> float | None:
        """The newest main score."""
        return self.scores[-1][1] if self.scores else None

    @property
    def test(self) -> float | None:
        """The score of the whole test split as `compressive evaluate` or training wrote it, in the main metric."""
        found = _json(self.folder / "evaluation" / "test.json")
        value = None
        if found.get("whole_split"):
            if self.metric.key == "perplexity":
                value = found.get("perplexity")
            elif self.metric is not UNKNOWN:
                value = found.get(self.metric.name.replace(" ", "_"))
            elif found.get("nats") is not None and found.get("tokens"):
                value = found["nats"] / found["tokens"] / math.log(2)
        if value is None and self.curves.test:
            value = self.curves.test[-1].get(self.metric.key)
        return value if isinstance(value, int | float) else None

    @property
    def speed(self) -> float | None:
        """Median training speed over all records: tokens, samples or environment steps per second."""
        key = "steps_per_second" if self.kind == "agent" else "tokens_per_second"
        speeds = [value for _, value in self.curves.values(key)]
        return statistics.median(speeds) if speeds else None

    @property
    def parameters(self) -> int | None:
        """Number of parameters, from the header of the newest checkpoint or of a release's weights; None if unknown."""
        shards = sorted(self.checkpoint.glob("*.safetensors")) if self.checkpoint else []
        prefix = "model." if shards else ""
        shards = shards or [file for file in weight_files(self.folder) if file.is_file()]
        tensors = [item for shard in shards for item in _header(shard).items() if not item[0].endswith(SCALE)]
        sizes = [math.prod(about["shape"]) for name, about in tensors if name.startswith(prefix)]
        return sum(sizes) or None

    @cached_property
    def state(self) -> State:
        """Where the run stands, as far as its folder tells.

        training: a file was written not long ago; finished: all steps or minutes are done; interrupted: stopped with
        its last step saved, or saved since its last record; failed: stopped without saving, or before the first step.
        """
        if (self.folder / RELEASE).is_file():
            return "release"
        minutes = self.config.train.minutes if isinstance(self.config, AgentRun) else 0.0
        out_of_time = 0 < minutes * 60 <= (self.seconds or 0.0)
        if self.steps >= self.config.train.steps or out_of_time:
            return "finished"
        times = [line["seconds"] for line in self.curves.train if "seconds" in line]
        gap = max((after - before for before, after in pairwise(times)), default=0.0)
        if time.time() - self.changed < max(PATIENCE, 3 * gap):
            return "training"
        return "interrupted" if 0 < self.steps <= self.saved else "failed"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names = (
            "kind preset corpus state steps best final test speed parameters seconds started".split()  # noqa: SIM905
        )
        return {
            "run": str(self.folder),
            **{name: getattr(self, name) for name in names},
            "planned_steps": self.config.train.steps,
            "seed": self.config.train.seed,
            "metric": self.metric.name.replace(" ", "_"),
            "higher_is_better": self.metric.higher_is_better,
        }


@dataclass(frozen=True)
class Broken:
    """A folder that looks like a run but cannot be read."""

    folder: Path
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"run": str(self.folder), "reason": self.reason}


def find_runs(folder: Path) -> tuple[list[Overview], list[Broken]]:
    """Return all runs below a folder, or the folder itself if it is one, newest first; and folders that are broken.

    Raises FileNotFoundError if the folder does not exist.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: train a run, or name the folder that holds your runs")
    runs, broken = [], []
    for path in _candidates(folder):
        try:
            runs.append(Overview.read(path))
        except (OSError, ValueError) as error:
            broken.append(Broken(path, str(error)))
    return sorted(runs, key=lambda run: (run.started or "", run.changed), reverse=True), broken


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield folders with a configuration, or with what a run leaves; nothing below them is searched."""
    for place, inside, files in os.walk(folder):
        inside.sort()
        if "config.json" in files or "metrics.jsonl" in files or "checkpoints" in inside:
            inside.clear()
            yield Path(place)
        inside[:] = [name for name in inside if not name.startswith(".")]


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is missing or damaged gives an empty one."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _header(path: Path) -> dict[str, Any]:
    """Read names, types and shapes of a safetensors file; a damaged file gives none."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            found: dict[str, Any] = json.loads(file.read(size))
    except (OSError, ValueError, struct.error, MemoryError):
        return {}
    return {name: about for name, about in found.items() if name != "__metadata__"}


def same_but_for_the_seed(config: RunConfig | AgentRun) -> dict[str, Any]:
    """Return the values of a configuration that its results depend on, as `table.field`, without the seed."""
    return {
        f"{table}.{name}": tuple(value) if isinstance(value, list) else value
        for table, values in dataclasses.asdict(config).items()
        for name, value in values.items()
        if f"{table}.{name}" not in IRRELEVANT
    }


IRRELEVANT = {
    "train.seed", "data.data_dir", "train.checkpoint_every", "train.sample_every", "train.sample_tokens",
    "train.tensorboard", "train.wandb",
}  # fmt: skip
"""Fields in which runs may differ and still be one recipe."""
