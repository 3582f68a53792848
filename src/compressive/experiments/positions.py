"""Positions of compressed slots: shared with the other slots, separate, or counted from the window. Ours.

The paper's text has one scheme of relative positions. The authors' released code gives compressed slots a W_r and a
bias of their own, and distances that begin at the window, as if there were no recent memory. `separate` has the first
of these two changes, `from_window` both. The paper evaluates with a larger compressed memory than it trains with, at
distances that training never saw, so that is scored too.
"""

import dataclasses
import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compressive.config import ModelConfig, transformer
from compressive.distributed import World
from compressive.evaluation.metrics import Split
from compressive.evaluation.sweep import Reading, sweep
from compressive.experiments.enwik8 import STREAMS, compressive, score_run
from compressive.experiments.experiment import (
    Comparison,
    Experiment,
    Measured,
    Row,
    Scale,
    cost,
    figure_of,
    markdown,
)
from compressive.plotting import COLOURS, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import pick_device

SHORTER: Mapping[Scale, dict[str, Any]] = {
    "tiny": {},
    "small": {"steps": 3_000, "warmup_steps": 500, "decay_steps": 2_500},
    "paper": {},
}
"""Steps in place of those of `enwik8`."""
ENLARGED = 3072 / 1152
"""How much larger compressed memory is when the paper evaluates on enwik8."""


class Variant(NamedTuple):
    """A change of the Compressive Transformer on bytes."""

    title: str
    model: dict[str, Any]


class Variants(Experiment):
    """Variants of the Compressive Transformer of `enwik8`; the first is that model itself, the others are compared."""

    @abstractmethod
    def variants(self, model: ModelConfig) -> Mapping[str, Variant]:
        """Return the variants of a model, by the names of their rows; the first one changes nothing."""

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return one row per variant. The first shares the runs of `enwik8`, unless it has fewer steps."""
        whole = compressive(scale)
        train = dataclasses.replace(whole.config.train, **SHORTER[scale])
        found = []
        for name, variant in self.variants(transformer(whole.config.model)).items():
            model = dataclasses.replace(transformer(whole.config.model), **variant.model)
            own = f"{self.name}-{name}" if variant.model else whole.name + "-shorter" * bool(SHORTER[scale])
            found.append(Row(own, variant.title, dataclasses.replace(whole.config, model=model, train=train)))
        return found

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score validation and test split."""
        splits: tuple[Split, ...] = ("valid", "test")
        return {split: score_run(run, split, scale) for split in splits}

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare every variant with the first, on the test split."""
        return self.compared(rows, "test", "bits per byte")

    def compared(self, rows: Sequence[Measured], key: str, unit: str) -> list[str]:
        """Compare the bits of every variant with those of the first, in words."""
        titles = [row.row.title for row in rows]
        return [
            one.sentence(title, titles[0], unit)
            for title, one in zip(titles[1:], against_first(rows, key), strict=True)
        ]

    def dots(self, axes: Any, rows: Sequence[Measured], key: str, title: str) -> None:
        """Draw the bits of every seed, and their mean, a line of the axes for every variant."""
        for place, row in enumerate(rows):
            colour = COLOURS["compressed" if place else "recent"]
            if bits := row.values(key, "bits_per_byte"):
                axes.scatter(bits, [place] * len(bits), color=colour, s=26, zorder=3)
                axes.vlines(statistics.mean(bits), place - 0.25, place + 0.25, color=colour, linewidth=2)
        axes.set_yticks(range(len(rows)), [row.row.title for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        tidy(axes, title, "bits per byte", grid="x")


def against_first(rows: Sequence[Measured], key: str) -> list[Comparison]:
    """Compare the bits of every row with those of the first; spread and variance are those of all rows."""
    first, *others = (row.values(key, "bits_per_byte") for row in rows)
    return [Comparison.of(bits, first, *others[:place], *others[place + 1 :]) for place, bits in enumerate(others)]


class Positions(Variants):
    """The three values of `compressed_positions`."""

    name = "positions"
    source = "ours"
    claim = (
        "The paper has one scheme of positions, its authors' code a separate one for compressed slots, counted from "
        "the window: neither says which is better."
    )

    def variants(self, model: ModelConfig) -> Mapping[str, Variant]:
        """Return the paper's text, half of what the authors' code does, and all of it."""
        return {
            "shared": Variant("shared", {}),
            "separate": Variant("separate", {"compressed_positions": "separate"}),
            "from-window": Variant("from the window", {"compressed_positions": "from_window"}),
        }

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score validation and test split, and the test split with an enlarged compressed memory."""
        trained, world = Trained.load(run, "last"), World(device=pick_device(run.config.train.device))
        model = transformer(trained.config)
        size = round(ENLARGED * model.compressed_sizes[0])
        reading = Reading("test", STREAMS[scale], None, run.config.train.precision)
        (result,) = sweep(trained, run.corpus(), [trained.eval_config(None, size)], reading, world)
        enlarged = {"bits_per_byte": result.headline, "compressed_size": size}
        return super().measure(run, scale) | {"enlarged": enlarged}

    def table(self, rows: Sequence[Measured]) -> str:
        """Return the bits of every scheme, as trained and with an enlarged compressed memory."""
        sizes = {size for row in rows for size in row.values("enlarged", "compressed_size")}
        heading = ["positions of compressed slots", "parameters", "validation", "test, bits per byte"]
        lines = [
            [
                row.row.title,
                f"{cost(row.row.config, 'small').parameters:,}",
                *(figure_of(row.values(key, "bits_per_byte")) for key in ("valid", "test", "enlarged")),
            ]
            for row in rows
        ]
        return markdown([*heading, f"test, {', '.join(f'{size:,}' for size in sizes)} compressed slots"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare with shared positions, as trained and with an enlarged compressed memory."""
        enlarged = self.compared(rows, "enlarged", "bits per byte with an enlarged compressed memory")
        return [*super().verdicts(rows), *enlarged]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot the test bits of every seed, as trained and enlarged."""
        fig = figure(10, 2.9)
        left, right = fig.subplots(1, 2, sharey=True, sharex=True)
        self.dots(left, rows, "test", "Test, memory as in training")
        self.dots(right, rows, "enlarged", "Test, compressed memory enlarged")
        right.tick_params(labelleft=False)
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)
