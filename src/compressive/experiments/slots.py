"""Where compression pays: bits over memory slots, with and without compression, at equal attention cost. Ours.

A TransformerXL has n slots, a Compressive Transformer n / 2 recent and n / 2 compressed ones. What the other half of
the recent slots was worth, and what there is to win further back, both depend on n. Windows are short, so that memory
counts.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from compressive.config import transformer
from compressive.evaluation.metrics import Split
from compressive.experiments.enwik8 import BYTES, Tables, quiet, score_run, transformer_xl
from compressive.experiments.experiment import Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.plotting import COLOURS, INK, figure, save, tidy
from compressive.runs.run import Run

SLOTS: Mapping[Scale, tuple[int, ...]] = {
    "tiny": (16, 32, 64, 128),
    "small": (64, 128, 256, 512),
    "paper": (240, 480, 960, 1920),
}
"""Memory slots of a layer, n."""
RATE = 4
OURS, OTHER = "Compressive Transformer", "TransformerXL"
CHANGES: Mapping[Scale, Tables] = {
    # Long enough for distant text to be worth something: after 800 steps of Adam more memory made both models worse.
    "tiny": {
        "model": {"window": 16},
        "train": {
            "batch": 32,
            "steps": 3_000,
            "decay_steps": 0,
            "learning_rate": 1e-3,
            "optimiser": "muon",
            "muon_scale": 4,
        },
    },
    "small": {"model": {"window": 64}, "train": {"batch": 128, "steps": 5_000, "warmup_steps": 300}},
    "paper": {"model": {"window": 240}},
}
"""Values in place of those of `enwik8`."""


class Slots(Experiment):
    """Two models at each number of slots."""

    name = "slots"
    source = "ours"
    claim = (
        "At equal attention cost, half of the slots compressed, compression pays where slots are few: each compressed "
        f"one stands for {RATE} tokens."
    )
    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0, 1), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the Compressive Transformer and the TransformerXL of every number of slots, in this order."""
        preset, tables = BYTES[scale]
        changed = {name: {**tables.get(name, {}), **CHANGES[scale].get(name, {})} for name in ("model", "train")}
        found = []
        for slots in SLOTS[scale]:
            half = {"memory_size": slots // 2, "compressed_size": slots // 2, "compression_rate": RATE}
            config = quiet(preset, changed | {"model": changed["model"] | half})
            ours = Row(f"slots-{slots}-compressive", f"{OURS}, {slots:,} slots", config)
            found += [ours, transformer_xl(ours, f"slots-{slots}-txl", f"{OTHER}, {slots:,} slots")]
        return found

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score validation and test split."""
        splits: tuple[Split, ...] = ("valid", "test")
        return {split: score_run(run, split, scale) for split in splits}

    def table(self, rows: Sequence[Measured]) -> str:
        """Return the test bits of both models at every number of slots."""
        heading = ["memory slots", "tokens that a layer reaches", OTHER, OURS]
        lines = []
        for (ours, other), compared in zip(pairs(rows), comparisons(rows), strict=True):
            bits = [figure_of(row.values("test", "bits_per_byte")) for row in (other, ours)]
            reached = " or ".join(f"{transformer(row.row.config.model).memory_span:,}" for row in (other, ours))
            apart = "–" if compared.difference is None else f"{compared.difference:+.4f} ± {compared.margin:.4f}"
            lines.append([f"{n_slots(other):,}", reached, *bits, apart, compared.verdict])
        return markdown([*heading, "difference, bits per byte", "verdict"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare the two models at every number of slots."""
        return [
            compared.sentence(f"{n_slots(other):,} slots, half of them compressed,", "all recent", "bits per byte")
            for (_, other), compared in zip(pairs(rows), comparisons(rows), strict=True)
        ]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot test bits over slots, and how far the Compressive Transformer is below the TransformerXL."""
        fig = figure(10, 3.6)
        left, right = fig.subplots(1, 2)
        for place, (title, colour) in enumerate(zip((OURS, OTHER), COLOURS.values(), strict=False)):
            of_model = [pair[place] for pair in pairs(rows) if pair[place].runs]
            bits = [row.values("test", "bits_per_byte") for row in of_model]
            slots = [n_slots(row) for row in of_model]
            left.plot(slots, list(map(statistics.mean, bits)), color=colour, label=title)
            for at, values in zip(slots, bits, strict=True):
                left.scatter([at] * len(values), values, color=colour, s=20, zorder=3)
        compared = [
            (n_slots(pair[0]), one)
            for pair, one in zip(pairs(rows), comparisons(rows), strict=True)
            if one.difference is not None
        ]
        margins = [one.margin if one.seeds > 1 else 0.0 for _, one in compared]
        right.errorbar(
            [slots for slots, _ in compared], [one.difference for _, one in compared], margins,
            fmt="o-", color=next(iter(COLOURS.values())), ecolor=INK, capsize=3,
        )  # fmt: skip
        right.axhline(0, color=INK, linewidth=0.8, linestyle=":")
        ticks = [n_slots(ours) for ours, _ in pairs(rows)]
        for axes in (left, right):
            axes.set_xlim(min(ticks) / 1.3, max(ticks) * 1.3)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks)
            axes.xaxis.set_major_formatter("{x:,.0f}")
        left.legend(fontsize=8.5, frameon=False, labelcolor=INK)
        tidy(left, "Test, every seed and the mean", "memory slots per layer", "bits per byte")
        tidy(right, "With compression less without, 95 % interval", "memory slots per layer", "bits per byte")
        better = sum(one.verdict == "lower" for _, one in compared)
        self.headline(fig, f"Half of the slots compressed: fewer bits at {better} of {len(compared)} numbers of slots.")
        save(fig, to)


def pairs(rows: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Return the Compressive Transformer and the TransformerXL of every number of slots."""
    return list(zip(rows[::2], rows[1::2], strict=True))


def n_slots(row: Measured) -> int:
    """Return the memory slots of a layer."""
    model = transformer(row.row.config.model)
    return model.memory_sizes[0] + model.compressed_sizes[0]


def comparisons(rows: Sequence[Measured]) -> list[Comparison]:
    """Compare each pair on the test split; spread and variance are those of all rows."""
    bits = {row.row.name: row.values("test", "bits_per_byte") for row in rows}
    return [Comparison.of(bits[ours.row.name], bits[other.row.name], *bits.values()) for ours, other in pairs(rows)]
