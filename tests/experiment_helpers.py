"""An experiment of two models that train in a second, on the tests' tiny corpus: two steps apart from nothing."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from training_helpers import tiny_run_config

from compressive.experiments.enwik8 import score_run
from compressive.experiments.experiment import Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.plotting import figure, save, tidy
from compressive.runs.run import Run


class Tiny(Experiment):
    """With and without compressed memory; `small` has one model that trains for minutes."""

    name = "tiny-experiment"
    source = "no table"
    claim = "Two models differ."
    seeds: ClassVar[dict[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0,), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        if scale == "small":
            return [Row("long", "long", tiny_run_config(Path("data"), steps=100_000, log_every=1, eval_every=0))]
        steps = int(os.environ.get("TINY_STEPS", "6"))
        quick: dict[str, Any] = {
            "steps": steps,
            "eval_every": 0,
            "log_every": 1,
            "warmup_steps": 1,
            "decay_steps": steps,
        }
        return [
            Row("with", "with", tiny_run_config(Path("data"), **quick)),
            Row("without", "without", tiny_run_config(Path("data"), {"compressed_size": 0}, **quick)),
        ]

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        if os.environ.get("TINY_FAILS") == run.folder.name:
            raise ValueError("this run is told to fail")
        return {"test": score_run(run, "test", scale)}

    def table(self, rows: Sequence[Measured]) -> str:
        return markdown(["", "bits"], [[row.row.title, figure_of(row.values("test", "bits_per_byte"))] for row in rows])

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        bits = [row.values("test", "bits_per_byte") for row in rows]
        return [Comparison.of(bits[0], bits[-1]).sentence("with", "without")]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        fig = figure(3, 2)
        tidy(fig.subplots(), "Nothing")
        save(fig, to)


class Again(Tiny):
    """Measures the same runs under another name."""

    name = "again"
