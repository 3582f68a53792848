"""Tables 8 and 9: memory sizes swept at evaluation, without retraining; chosen on validation, reported on test.

The models are those of `enwik8`. Sizes are the paper's, divided as there. The TransformerXL is given as many slots in
all. Slots that are still empty are zeros, as in training, or masked.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from compressive.config import EmptyMemory, transformer
from compressive.distributed import World
from compressive.evaluation.sweep import Reading, sweep
from compressive.experiments.enwik8 import STREAMS, compressive, equal_cost
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
from compressive.runs.trained import Trained
from compressive.runtime import pick_device

SIZES: Mapping[Scale, tuple[int, ...]] = {
    "tiny": (0, 32, 72, 128, 192, 256),
    "small": (0, 256, 576, 1024, 1536, 2048),
    "paper": (0, 512, 1152, 2048, 3072, 4096),
}
"""Slots of compressed memory; the third is that of training."""
VALIDATION: Mapping[Scale, int | None] = {"tiny": 80_000, "small": 1_000_000, "paper": None}
"""Bytes of the validation split that sizes are chosen on; None: all."""
TEST: Mapping[Scale, int | None] = {"tiny": 60_000, "small": None, "paper": None}
"""Bytes of the test split that are scored; None: all."""
EMPTY: tuple[EmptyMemory, ...] = get_args(EmptyMemory)


def score_at(
    trained: Trained, run: Run, slots: int, empty: EmptyMemory | Literal["auto"], reading: Reading
) -> dict[str, Any]:
    """Score a run's weights with so many slots in all; recent memory as in training where the model compresses.

    Returns bits per token, beside slots, what empty slots were, and seconds.
    """
    model, world = transformer(trained.config), World(device=pick_device(run.config.train.device))
    recent = model.memory_sizes[0]
    sizes = (recent, slots - recent) if any(model.compressed_sizes) else (slots, 0)
    config = trained.eval_config(*sizes, empty)
    (result,) = sweep(trained, run.corpus(), [config], reading, world)
    empty_memory = transformer(config.model).empty_memory
    bits = result.metrics.bits_per_token
    return {"slots": slots, "empty_memory": empty_memory, "bits": bits, "seconds": result.seconds}


class MemorySizes(Experiment):
    """Both models at all sizes."""

    name = "memory-sizes"
    source = "Tables 8 and 9"
    claim = (
        "A larger compressed memory at evaluation helps up to a point: on enwik8 1.01, 0.99, 0.98, 0.97 and 1.00 bits "
        "per character with 512, 1,024, 2,048, 3,072 and 4,096 slots."
    )

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the two models of `enwik8` that have equally many slots."""
        return [compressive(scale), equal_cost(scale)]

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score the validation split at every size, zeros and masked; the test split as trained and as chosen."""
        trained, precision = Trained.load(run, "last"), run.config.train.precision
        model = transformer(trained.config)
        on_valid = Reading("valid", STREAMS[scale], VALIDATION[scale], precision)
        on_test = Reading("test", STREAMS[scale], TEST[scale], precision)
        first = transformer(compressive(scale).config.model).memory_sizes[0]
        as_trained = model.memory_sizes[0] + model.compressed_sizes[0]
        valid = [score_at(trained, run, first + size, empty, on_valid) for size in SIZES[scale] for empty in EMPTY]
        best = min(valid, key=lambda one: one["bits"])
        return {
            "valid": valid,
            "test_as_trained": score_at(trained, run, as_trained, model.empty_memory, on_test),
            "test_as_chosen": score_at(trained, run, best["slots"], best["empty_memory"], on_test),
        }

    def table(self, rows: Sequence[Measured]) -> str:
        """Return validation bits by size, then the test bits at the size that validation chose."""
        heading, lines = ["memory slots in all"], []
        names = [f"{row.row.title}, {empty}" for row in rows for empty in EMPTY]
        for slots in sorted({one["slots"] for row in rows for run in row.values("valid") for one in run}):
            bits = [figure_of(_bits(row, slots, empty)) for row in rows for empty in EMPTY]
            lines.append([f"validation, {slots:,}", *bits])
        for key, label in (("test_as_trained", "test, as trained"), ("test_as_chosen", "test, chosen on validation")):
            cells = []
            for row in rows:
                found = row.values(key)
                how = ", ".join(dict.fromkeys(f"{one['slots']:,} {one['empty_memory']}" for one in found))
                cells += [f"{figure_of([one['bits'] for one in found])} at {how}" if found else "–", ""]
            lines.append([label, *cells])
        return markdown([*heading, *names], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare chosen with trained sizes, the two models at chosen sizes, and zeros with masked slots."""
        ours, txl = rows
        chosen, as_trained = (
            {row.row.name: [one["bits"] for one in row.values(key)] for row in rows}
            for key in ("test_as_chosen", "test_as_trained")
        )
        found = [
            Comparison.paired(chosen[row.row.name], as_trained[row.row.name]).sentence(
                f"{row.row.title}, size chosen on validation,", "its size in training", "bits on test"
            )
            for row in rows
        ]
        both = Comparison.of(chosen[ours.row.name], chosen[txl.row.name])
        found.append(both.sentence(f"{ours.row.title}, both at chosen sizes,", txl.row.title, "bits on test"))
        largest = max((one["slots"] for run in ours.values("valid") for one in run), default=0)
        empty = Comparison.paired(*(_bits(ours, largest, empty) for empty in EMPTY))
        where = f"{ours.row.title} at {largest:,} slots: {EMPTY[0]} for what is empty"
        return [*found, empty.sentence(where, EMPTY[1], "bits on validation", 5)]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot validation bits over slots, a line for each model and way of treating empty slots."""
        fig = figure(8, 3.8)
        axes = fig.subplots()
        for row, colour in zip(rows, COLOURS.values(), strict=False):
            sizes = sorted({one["slots"] for run in row.values("valid") for one in run})
            for empty, style in zip(EMPTY, ("o-", "x--"), strict=True):
                bits = [_bits(row, slots, empty) for slots in sizes]
                if bits:
                    means = [statistics.mean(values) for values in bits]
                    axes.plot(sizes, means, style, color=colour, markersize=4.5, label=f"{row.row.title}, {empty}")
                if bits and empty == EMPTY[0]:
                    low, high = ([pick(values) for values in bits] for pick in (min, max))
                    axes.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
        trained = transformer(rows[0].row.config.model)
        axes.axvline(trained.memory_sizes[0] + trained.compressed_sizes[0], color=INK, linewidth=0.8, linestyle=":")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK)
        tidy(axes, "Memory at evaluation; dotted: in training", "memory slots per layer", "validation, bits per byte")
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


def _bits(row: Measured, slots: int, empty: EmptyMemory) -> list[float]:
    """Return the validation bits of every seed at one size."""
    return [
        one["bits"]
        for run in row.values("valid")
        for one in run
        if (one["slots"], one["empty_memory"]) == (slots, empty)
    ]
