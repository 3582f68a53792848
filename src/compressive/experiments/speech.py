"""Figure 4: Compressive Transformer, TransformerXL and WaveNet on raw speech, at equal samples and at equal seconds.

All three have the same number of parameters and of samples, and one update per chunk of five windows of every stream;
WaveNet reads the chunk at once. The TransformerXL has as many slots. Seconds are those of training alone: samples
divided by the run's median speed. At equal seconds, curves are read at the time when the fastest run is done; the
others are then in the middle of their schedule.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from compressive.analysis.curves import Curves
from compressive.config import RunConfig
from compressive.data.speech.codes import RATE
from compressive.distributed import World
from compressive.evaluation.sweep import Reading, sweep
from compressive.experiments.experiment import (
    Comparison,
    Experiment,
    Measured,
    Row,
    Scale,
    configured,
    cost,
    figure_of,
    markdown,
)
from compressive.plotting import COLOURS, INK, bound, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import pick_device
from compressive.speech.floors import linear_prediction

MODELS = {"compressive": "Compressive Transformer", "txl": "TransformerXL", "wavenet": "WaveNet"}
CHUNK = 5
"""Windows of a transformer in a chunk; the paper's have 768 samples, its chunks 3,840."""


class Plan(NamedTuple):
    """How the models of a scale are trained; counts are of updates."""

    family: str  # of presets: FAMILY, FAMILY-txl, FAMILY-wavenet
    window: int  # of a transformer; either of its memories has as many slots
    updates: int
    warmup: int
    eval_every: int
    eval_samples: int  # of each split, in a point of a curve
    test_samples: int | None  # of the last score; None: all
    learning_rates: tuple[float, float]  # of the transformers, of WaveNet
    train: dict[str, Any]  # other values in place of the presets'
    model: dict[str, Any]


PLANS: Mapping[Scale, Plan] = {
    "tiny": Plan("speech-small", 64, 150, 15, 30, 48_000, 120_000, (2e-3, 2e-3), {"log_every": 25}, {}),
    "small": Plan("speech", 768, 900, 90, 75, 240_000, None, (6e-4, 1e-3),
                  {"batch": 8, "precision": "bf16", "compile": True}, {"dropout": 0.0}),
    "paper": Plan("speech", 768, 400_000, 4_000, 1_000, 500_000, None, (3e-4, 3e-4), {}, {}),
}  # fmt: skip
STREAMS: Mapping[Scale, int] = {"tiny": 16, "small": 32, "paper": 32}
"""Streams that the test split is cut into to be scored."""


class Speech(Experiment):
    """Three models of equal size."""

    name = "speech"
    source = "Figure 4"
    claim = (
        "On raw speech the Compressive Transformer outperforms a TransformerXL and keeps a slim advantage over "
        "WaveNet; the transformers train at half of WaveNet's speed."
    )
    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0, 1), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the three models."""
        return [Row(f"speech-{model}", title, _config(model, PLANS[scale])) for model, title in MODELS.items()]

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score the test split; return the curve of its beginning over samples and seconds, and linear prediction."""
        plan, corpus = PLANS[scale], run.corpus()
        trained, world = Trained.load(run, "last"), World(device=pick_device(run.config.train.device))
        reading = Reading("test", STREAMS[scale], plan.test_samples, run.config.train.precision)
        (result,) = sweep(trained, corpus, [trained.eval_config()], reading, world)
        curves = Curves.load(run.folder / "metrics.jsonl")
        speed = statistics.median(record["tokens_per_second"] for record in curves.train)
        per_step = run.config.train.batch * run.config.model.window
        test = corpus.split("test")
        return {
            "train_minutes": len(corpus.split("train")) / RATE / 60,
            "samples_per_second": speed,
            "curve": [
                {
                    "samples": record["step"] * per_step,
                    "seconds": record["step"] * per_step / speed,
                    "bits": record["bits"],
                }
                for record in curves.test
            ],
            "test": {"bits": result.metrics.bits_per_sample, "samples": result.metrics.tokens},
            "linear_prediction": {
                "test": linear_prediction(test[: plan.test_samples]),
                "curve": linear_prediction(test[: plan.eval_samples]),
            },
        }

    def table(self, rows: Sequence[Measured]) -> str:
        """Return the test bits of every model, at equal samples and at equal seconds."""
        heading = ["model", "parameters", "samples", "test, bits per sample", "seconds of training", "samples/s"]
        seconds = equal_seconds(rows)
        lines = []
        for row in rows:
            of = cost(row.row.config, "small")
            lines.append([
                row.row.title, f"{of.parameters:,}", f"{of.tokens:,}", figure_of(row.values("test", "bits"), 3),
                figure_of([curve[-1]["seconds"] for curve in row.values("curve")], 1),
                figure_of(row.values("samples_per_second"), 0), figure_of(_at(row, seconds), 3),
            ])  # fmt: skip
        floor = next(iter(found["linear_prediction"] for row in rows for found in row.runs.values()))
        lines.append(["linear prediction", "–", "–", f"{floor['test']:.3f}", "–", "–", f"{floor['curve']:.3f}"])
        return markdown([*heading, f"curve at {seconds:,.1f} s, bits per sample"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare the Compressive Transformer with each other model, at equal samples and at equal seconds."""
        seconds = equal_seconds(rows)
        found = []
        for label, values in (
            ("equal samples", [row.values("test", "bits") for row in rows]),
            ("equal seconds", [_at(row, seconds) for row in rows]),
        ):
            ours, *others = values
            found += [
                Comparison.of(ours, bits, *others).sentence(
                    f"{rows[0].row.title}, {label},", row.row.title, "bits per sample", 3
                )
                for row, bits in zip(rows[1:], others, strict=True)
            ]
        return found

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot test bits over samples and over seconds of training, every seed."""
        fig = figure(10.5, 4)
        by_samples, by_time = fig.subplots(1, 2, sharey=True)
        for row, colour in zip(rows, COLOURS.values(), strict=True):
            for axes, across in ((by_samples, "samples"), (by_time, "seconds")):
                for number, curve in enumerate(row.values("curve")):
                    label = "" if number else row.row.title
                    axes.plot([one[across] for one in curve], [one["bits"] for one in curve], "o-", color=colour,
                              markersize=3, linewidth=1.2, label=label)  # fmt: skip
        floor = next(iter(found["linear_prediction"]["curve"] for row in rows for found in row.runs.values()))
        for axes in (by_samples, by_time):
            axes.xaxis.set_major_formatter("{x:,.0f}")
            bound(axes, floor, "linear prediction")
        by_time.axvline(equal_seconds(rows), color=COLOURS["window"], linewidth=0.8, linestyle=":")
        tidy(by_samples, "By samples", "samples of training", "test, bits per sample")
        tidy(by_time, "By time; dotted: where they are compared", "seconds of training")
        by_time.legend(fontsize=8.5, frameon=False, labelcolor=INK)
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


def _config(model: str, plan: Plan) -> RunConfig:
    """Return the configuration of a model: the preset's, trained as the plan says."""
    wavenet = model == "wavenet"
    steps = 1 if wavenet else CHUNK  # per update
    sizes: dict[str, Any] = {"window": plan.window, "memory_size": plan.window, "compressed_size": plan.window}
    if model == "txl":
        sizes |= {"memory_size": 2 * plan.window, "compressed_size": 0}
    if wavenet:
        sizes = {"window": CHUNK * plan.window}
    train = {
        "steps": steps * plan.updates, "warmup_steps": steps * plan.warmup,
        "decay_steps": steps * (plan.updates - plan.warmup), "learning_rate": plan.learning_rates[wavenet],
        "update_every": steps, "update_every_from": 0, "eval_every": steps * plan.eval_every,
        "checkpoint_every": steps * plan.eval_every, "eval_tokens": plan.eval_samples, "eval_test": True,
    }  # fmt: skip
    preset = plan.family + ("" if model == "compressive" else f"-{model}")
    return configured(preset, model=sizes | plan.model, train=train | plan.train)


def equal_seconds(rows: Sequence[Measured]) -> float:
    """Return the training time of the fastest run; infinity if none is measured."""
    return min((curve[-1]["seconds"] for row in rows for curve in row.values("curve")), default=math.inf)


def _at(row: Measured, seconds: float) -> list[float]:
    """Return the bits of every seed after so many seconds, from its curve, which begins at chance with 8 bits."""
    return [
        float(np.interp(seconds, [0, *(one["seconds"] for one in curve)], [8, *(one["bits"] for one in curve)]))
        for curve in row.values("curve")
    ]
