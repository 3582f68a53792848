"""Figure 3: lowering the learning rate during training, against lowering the update frequency.

Runs of one model and one seed are the same up to a step, at the paper's share of all steps, and differ from it on:
the rate stays, falls to a tenth or to zero, or every four steps share one update. What is compared is the loss of the
text that they are trained on, which all read in the same order, and the test loss of the last step. Two more runs of
the TransformerXL have the paper's cosine decay, with and without the lower frequency.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from compressive.analysis.curves import Curves
from compressive.experiments.enwik8 import compressive, paper_s_transformer_xl, score_run
from compressive.experiments.experiment import Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.experiments.memory_sizes import TEST
from compressive.plotting import INK, PALETTE, figure, save, tidy
from compressive.runs.run import Run


class Plan(NamedTuple):
    """When things happen at a scale, in steps."""

    steps: int
    warmup: int
    change: int
    log_every: int


PLANS: Mapping[Scale, Plan] = {
    "tiny": Plan(300, 40, 176, 4),
    "small": Plan(3_000, 300, 1_700, 50),
    "paper": Plan(104_000, 4_000, 60_000, 500),
}
LATER = {
    "held": "rate held",
    "tenth": "rate to a tenth",
    "zero": "rate to zero",
    "every4": "rate held, update every 4",
    "cosine": "cosine decay",
    "cosine-every4": "cosine decay, update every 4",
}
"""What happens at the change."""
MODELS = {
    "txl": ("TransformerXL", tuple(LATER)),
    "compressive": ("Compressive Transformer", ("held", "zero", "every4")),
}
"""Models, and what is tried with each."""
PAPER = {"txl-cosine": 0.995, "txl-cosine-every4": 0.984}
"""The paper's test bits per character on enwik8."""


class Schedule(Experiment):
    """Two models, six ways to go on."""

    name = "schedule"
    source = "Figure 3"
    claim = (
        "Lowering the learning rate during training, to zero at worst, harms; lowering the update frequency to every 4 "
        "steps helps, at no cost: a TransformerXL on enwik8 gets from 0.995 to 0.984 bits per character."
    )
    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0, 1), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the rows of both models."""
        plan, found = PLANS[scale], []
        for model, (title, ways) in MODELS.items():
            row = {"txl": paper_s_transformer_xl, "compressive": compressive}[model](scale)
            for way in ways:
                peak = row.config.train.learning_rate
                held: dict[str, Any] = {
                    "hold_steps": plan.change - plan.warmup - 1, "decay": "linear", "decay_steps": 1,
                    "final_learning_rate": {"zero": 0.0, "tenth": peak / 10}.get(way, peak),
                }  # fmt: skip
                train = dataclasses.replace(
                    row.config.train, steps=plan.steps, warmup_steps=plan.warmup, log_every=plan.log_every,
                    update_every=4 if "every4" in way else 1, update_every_from=plan.change,
                    optimiser="adam",  # as in the paper, whose figure is about its rate
                    **({"decay_steps": plan.steps - plan.warmup} if "cosine" in way else held),
                )  # fmt: skip
                config = dataclasses.replace(row.config, train=train)
                found.append(Row(f"schedule-{model}-{way}", f"{title}, {LATER[way]}", config))
        return found

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Return the training curve, its means before and after the change, speed and memory, and the test bits."""
        records = Curves.load(run.folder / "metrics.jsonl").train
        return summarise(records, PLANS[scale]) | {"test": score_run(run, "test", scale, TEST[scale])}

    def table(self, rows: Sequence[Measured]) -> str:
        """Return training and test bits of every row, and what it costs."""
        heading = ["model, and what happens at the change", "paper, test", "training before", "training after"]
        lines = []
        for row in rows:
            paper = PAPER.get(row.row.name.removeprefix("schedule-"))
            lines.append([
                row.row.title, "–" if paper is None else f"{paper:.3f}",
                *(figure_of(row.values(key)) for key in ("before", "after")),
                figure_of(row.values("test", "bits_per_byte")),
                *(figure_of(row.values(key), 2) for key in ("speed", "peak_gib")),
            ])  # fmt: skip
        return markdown([*heading, "test, bits per byte", "speed after / before", "peak GiB"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare what the paper compares, seed by seed: until the change these runs are the same."""
        found = {row.row.name.removeprefix("schedule-"): row for row in rows}

        def compare(model: str, way: str, other: str, *keys: str) -> str:
            both = [found[f"{model}-{name}"] for name in (way, other)]
            seeds = sorted(both[0].runs.keys() & both[1].runs.keys())
            values = [Measured(row.row, {seed: row.runs[seed] for seed in seeds}).values(*keys) for row in both]
            said = "on test" if keys[0] == "test" else "in training after the change"
            return Comparison.paired(*values).sentence(both[0].row.title, LATER[other], f"bits per byte {said}")

        test = ("test", "bits_per_byte")
        return [
            *(compare(model, "zero", "held", "after") for model in MODELS),
            compare("txl", "tenth", "held", "after"),
            *(compare(model, "every4", "held", *keys) for model in MODELS for keys in (("after",), test)),
            compare("txl", "every4", "tenth", *test),
            compare("txl", "cosine-every4", "cosine", *test),
        ]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot training bits over steps for each model, and the test bits of every seed."""
        fig = figure(13, 4)
        *curves, test = fig.subplots(1, len(MODELS) + 1, width_ratios=(1.2, 1.2, 1))
        colours = dict(zip(LATER, PALETTE, strict=False))
        measured = [row for row in rows if row.runs]
        for place, row in enumerate(measured):
            colour, bits = colours[_way(row)], row.values("test", "bits_per_byte")
            test.scatter(bits, [place] * len(bits), color=colour, s=26, zorder=3)
            test.vlines(statistics.mean(bits), place - 0.25, place + 0.25, color=colour, linewidth=2)
        test.set_yticks(range(len(measured)), [row.row.title.replace(", ", ",\n", 1) for row in measured])
        test.invert_yaxis()
        tidy(test, "Test, every seed and the mean", "bits per byte", grid="x")
        test.tick_params(axis="y", labelsize=7)
        for axes, (model, (title, _)) in zip(curves, MODELS.items(), strict=True):
            shown = [row for row in measured if row.row.name.startswith(f"schedule-{model}-")]
            later: list[float] = []  # bits that the axis is scaled to
            for row in shown:
                change = row.row.config.train.update_every_from
                points = [
                    (seeds[0]["step"], statistics.mean(seed["bits"] for seed in seeds))
                    for seeds in zip(*row.values("curve"), strict=True)
                ]
                later += [bits for step, bits in points if step > 0.8 * change]
                axes.plot(*zip(*points, strict=True), color=colours[_way(row)], linewidth=1.2, label=LATER[_way(row)])
                axes.axvline(change, color=INK, linewidth=0.8, linestyle=":")
            if shown:
                axes.set_ylim(min(later), max(later))
                axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            tidy(axes, f"{title}, training; dotted: the change", "steps", "bits per byte")
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


def _way(row: Measured) -> str:
    return row.row.name.split("-", 2)[2]


def summarise(records: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, Any]:
    """Return curve, means and speeds of a run from its training records, each a mean over the steps up to its own.

    `before` are as many steps as `after`, as far as the warm-up allows.
    """
    since = max(plan.warmup, plan.change - (plan.steps - plan.change))
    before = [record for record in records if since < record["step"] <= plan.change]
    after = [record for record in records if record["step"] > plan.change]
    speeds = [statistics.median(one["tokens_per_second"] for one in part) for part in (before, after)]
    return {
        "curve": [{"step": record["step"], "bits": record["bits"]} for record in records],
        "before": statistics.mean(record["bits"] for record in before),
        "after": statistics.mean(record["bits"] for record in after),
        "speed": speeds[1] / speeds[0],
        "peak_gib": records[-1]["peak_gib"],
    }
