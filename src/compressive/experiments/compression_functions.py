"""Table 5: the compression functions and the losses that train them, and ours below the line.

The paper's rows are trained at every rate; the rate with the lowest mean validation loss is reported, on the test
split. Ours have one rate. BPTT unrolls two windows at half the batch, so that all rows read equally many tokens a step.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from compressive.config import transformer
from compressive.evaluation.metrics import Split
from compressive.experiments.enwik8 import compressive, score_run
from compressive.experiments.experiment import (
    Comparison,
    Experiment,
    Measured,
    Row,
    Scale,
    figure_of,
    markdown,
)
from compressive.plotting import COLOURS, INK, figure, save, tidy
from compressive.runs.run import Run


class Function(NamedTuple):
    """A row of the table."""

    title: str
    paper: float | None  # bits per character on enwik8; None: not in the paper
    model: dict[str, Any]
    unroll: int = 1


FUNCTIONS: Mapping[str, Function] = {
    "conv-bptt": Function("conv, BPTT", 0.996, {"compression_loss": "none"}, unroll=2),
    "max": Function("max pooling", 0.986, {"compression": "max"}),
    "conv-autoencoding": Function("conv, auto-encoding", 0.984, {"compression_loss": "autoencoding"}),
    "mean": Function("mean pooling", 0.982, {"compression": "mean"}),
    "most-used": Function("most-used", 0.980, {"compression": "most_used"}),
    "dilated": Function("dilated conv, attention", 0.977, {"compression": "dilated"}),
    "conv": Function("conv, attention", 0.973, {}),
    "gru": Function("GRU, attention (ours)", None, {"compression": "gru"}),
    "attention": Function("attention pooling, attention (ours)", None, {"compression": "attention"}),
    "separate": Function(
        "conv, attention, separate positions (ours)", None, {"compressed_positions": "separate"}
    ),
}  # fmt: skip
"""The seven rows of the paper, worst first as there, and ours."""
BEST = "conv"
"""The paper's best row, with which the others are compared."""
RATES: Mapping[Scale, tuple[int, ...]] = {"tiny": (3,), "small": (3, 2, 4), "paper": (3, 2, 4)}
"""The first one is trained first, and is the only one of ours."""
SHORTER: Mapping[Scale, dict[str, Any]] = {
    "tiny": {"steps": 150, "warmup_steps": 30, "decay_steps": 120},
    "small": {"steps": 3_000, "warmup_steps": 500, "decay_steps": 2_500},
    "paper": {},
}
"""Steps of these many runs, in place of those of `enwik8`."""
LIMIT: Mapping[Scale, int | None] = {"tiny": 60_000, "small": None, "paper": None}
"""Bytes of each split that are scored; None: all."""


class CompressionFunctions(Experiment):
    """Seven rows of the paper, three of ours, each at its best rate."""

    name = "compression-functions"
    source = "Table 5"
    claim = (
        "Convolution trained by attention reconstruction compresses best: 0.973 bits per character on enwik8, before "
        "dilated convolutions, most-used, mean pooling, auto-encoding, max pooling and BPTT, 0.996."
    )
    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0, 1), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return one row per function and rate."""
        config = compressive(scale).config
        shorter = dataclasses.replace(config.train, **SHORTER[scale])
        found = []
        for rate in RATES[scale]:
            for name, function in FUNCTIONS.items():
                if function.paper is None and rate != RATES[scale][0]:
                    continue
                values = {"compression_rate": rate, **function.model}
                model = dataclasses.replace(transformer(config.model), **values)
                train = dataclasses.replace(shorter, unroll=function.unroll, batch=shorter.batch // function.unroll)
                row = dataclasses.replace(config, model=model, train=train)
                found.append(Row(f"function-{name}-rate{rate}", f"{function.title}, rate {rate}", row))
        return found

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score validation and test split."""
        splits: tuple[Split, ...] = ("valid", "test")
        return {split: score_run(run, split, scale, LIMIT[scale]) for split in splits}

    def table(self, rows: Sequence[Measured]) -> str:
        """Return one line per function, at the rate that validation chose."""
        chosen, lines = _at_best_rate(rows), []
        for name, function in FUNCTIONS.items():
            bits = [figure_of(chosen[name].values(split, "bits_per_byte")) for split in ("valid", "test")]
            verdict = "–" if name == BEST else _against_best(chosen, name).verdict
            paper = "–" if function.paper is None else f"{function.paper:.3f}"
            lines.append([function.title, paper, str(_rate(chosen[name])), *bits, verdict])
        heading = ["function and loss", "paper", "best rate", "validation", "test, bits per byte"]
        return markdown([*heading, f"against {FUNCTIONS[BEST].title}"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare every function with the paper's best."""
        chosen = _at_best_rate(rows)
        return [
            _against_best(chosen, name).sentence(function.title, FUNCTIONS[BEST].title, "bits per byte")
            for name, function in FUNCTIONS.items()
            if name != BEST
        ]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot the test bits of every seed, beside the paper's figures."""
        found = [(FUNCTIONS[name], row) for name, row in _at_best_rate(rows).items() if row.runs]
        fig = figure(10, 1.8 + 0.28 * len(found))
        left, right = fig.subplots(1, 2, sharey=True, width_ratios=(5, 3))
        for place, (function, best) in enumerate(found):
            colour = COLOURS["recent" if function.paper is None else "compressed"]
            bits = best.values("test", "bits_per_byte")
            left.scatter(bits, [place] * len(bits), color=colour, s=26, zorder=3)
            left.vlines(statistics.mean(bits), place - 0.25, place + 0.25, color=colour, linewidth=2)
            if function.paper is not None:
                right.scatter([function.paper], [place], color=INK, s=26, zorder=3)
        left.set_yticks(range(len(found)), [f"{function.title}, rate {_rate(best)}" for function, best in found])
        left.invert_yaxis()
        tidy(left, "Here: test, every seed and the mean", "bits per byte", grid="x")
        tidy(right, "The paper, enwik8", "bits per character", grid="x")
        right.tick_params(labelleft=False)
        chosen = _at_best_rate(rows)
        beyond = sum(_against_best(chosen, name).verdict != "inconclusive" for name in FUNCTIONS if name != BEST)
        others = f"{beyond} of {len(FUNCTIONS) - 1} functions differ from {FUNCTIONS[BEST].title}"
        self.headline(fig, f"{others}, by more than seeds do.")
        save(fig, to)


def _rate(row: Measured) -> int:
    return transformer(row.row.config.model).compression_rates[0]


def _at_best_rate(rows: Sequence[Measured]) -> dict[str, Measured]:
    """Return the row of every function's best rate: the lowest mean on validation, of those with most seeds."""

    def order(row: Measured) -> tuple[int, float]:
        bits = row.values("valid", "bits_per_byte")
        return -len(bits), statistics.mean(bits) if bits else 0.0

    return {
        name: min((row for row in rows if row.row.name.startswith(f"function-{name}-rate")), key=order)
        for name in FUNCTIONS
    }


def _against_best(chosen: Mapping[str, Measured], name: str) -> Comparison:
    bits = {one: row.values("test", "bits_per_byte") for one, row in chosen.items()}
    return Comparison.of(bits[name], bits[BEST], *bits.values())
