"""Table 4: the Compressive Transformer against TransformerXL on bytes.

Windows and memories have the paper's sizes, divided by 16 at `tiny` and by 2 at `small`. A TransformerXL has as many
slots, and so the same attention cost, or as many as the paper gave it.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressive.analysis.memory import measure_memory
from compressive.config import RunConfig, transformer
from compressive.distributed import World
from compressive.evaluation.metrics import Split
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
from compressive.plotting import COLOURS, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import pick_device

Tables = dict[str, dict[str, Any]]

BYTES: Mapping[Scale, tuple[str, Tables]] = {
    "tiny": ("quickstart", {
        "model": {"n_layers": 3, "d_model": 96, "d_ff": 384, "window": 48, "memory_size": 48, "compressed_size": 72,
                  "compression_rate": 3},
        "train": {"steps": 800, "warmup_steps": 100, "decay_steps": 700},
    }),
    "small": ("enwik8-base", {
        # Weights of 8 million parameters, 16 MiB in bf16: the model that ships as `enwik8-small` has this shape.
        "model": {"n_layers": 8, "d_model": 256, "n_heads": 4, "d_ff": 960, "dropout": 0.0, "window": 384,
                  "memory_size": 384, "compressed_size": 576, "compression_rate": 3},
        "train": {"steps": 8_000, "warmup_steps": 500, "decay_steps": 0, "batch": 32, "learning_rate": 6e-4,
                  "optimiser": "muon", "muon_scale": 4, "update_every": 1, "checkpoint_every": 2_000},
    }),
    "paper": ("enwik8", {}),
}  # fmt: skip
"""The Compressive Transformer on bytes: a preset, and values in place of the preset's."""
STREAMS: Mapping[Scale, int] = {"tiny": 16, "small": 32, "paper": 16}
"""Streams that a split is cut into to be scored."""
LOOKED_AT: Mapping[Scale, int] = {"tiny": 20_000, "small": 500_000, "paper": 500_000}
"""Tokens of the validation split for the loss by tokens read."""
LEAST = 1e-3
"""Bits above full memory that are still shown; less is noise, and may be below 0."""


def quiet(preset: str, tables: Tables) -> RunConfig:
    """Return a preset with other values, without samples and evaluations: rows are measured at their last step."""
    train = {"sample_every": 0, "eval_every": 0} | tables.get("train", {})
    return configured(preset, **(tables | {"train": train}))


def compressive(scale: Scale) -> Row:
    """The Compressive Transformer on bytes; other experiments measure its runs too."""
    return Row("compressive", "Compressive Transformer", quiet(*BYTES[scale]))


def transformer_xl(row: Row, name: str, title: str, factor: float = 1.0) -> Row:
    """The TransformerXL of a row: with as many slots, times a factor, all of them of recent memory."""
    model = transformer(row.config.model)
    slots = round(factor * (model.memory_sizes[0] + model.compressed_sizes[0]))
    model = dataclasses.replace(model, memory_size=slots, compressed_size=0)
    return Row(name, title, dataclasses.replace(row.config, model=model))


def equal_cost(scale: Scale) -> Row:
    """The TransformerXL on bytes with as many slots."""
    return transformer_xl(compressive(scale), "txl-equal-cost", "TransformerXL, equal cost")


def paper_s_transformer_xl(scale: Scale) -> Row:
    """The TransformerXL on bytes with the slots that the paper gave it."""
    return transformer_xl(compressive(scale), "txl-paper", "TransformerXL, the paper's", 2304 / (768 + 1152))


def score_run(run: Run, split: Split, scale: Scale, limit: int | None = None) -> dict[str, Any]:
    """Score a split, or its first `limit` bytes, with the weights of the last step and memory sizes as in training.

    Returns bits per byte and, of a whole split, the perplexity per word and why it may not be compared with PG-19's.
    """
    trained, world = Trained.load(run, "last"), World(device=pick_device(run.config.train.device))
    reading = Reading(split, STREAMS[scale], limit, run.config.train.precision)
    (result,) = sweep(trained, run.corpus(), [trained.eval_config()], reading, world)
    metrics = result.metrics
    bits = metrics.bits_per_byte if metrics.bits_per_character is None else metrics.bits_per_character
    return {
        "bits_per_byte": bits, "word_perplexity": metrics.word_perplexity, "not_comparable": metrics.not_comparable,
        "tokens": metrics.tokens, "seconds": result.seconds,
    }  # fmt: skip


def slots(row: Row) -> str:
    """Write the slots of a row's memories: `384 + 576 × 3`, or `960`."""
    model = transformer(row.config.model)
    recent, compressed, rate = model.memory_sizes[0], model.compressed_sizes[0], model.compression_rates[0]
    return f"{recent:,} + {compressed:,} at rate {rate}" if compressed else f"{recent:,}"


class AgainstTransformerXL(Experiment):
    """The first row is compared with every other, a TransformerXL."""

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score validation and test split; measure the loss by tokens read since an empty memory."""
        trained, corpus = Trained.load(run, "last"), run.corpus()
        model = trained.model(transformer(trained.config), pick_device(run.config.train.device))
        memory = measure_memory(model, corpus.split("valid"), tokens=LOOKED_AT[scale], streams=STREAMS[scale])
        return {
            "valid": score_run(run, "valid", scale),
            "test": score_run(run, "test", scale),
            "memory": memory.as_dict(),
        }

    def table(self, rows: Sequence[Measured]) -> str:
        """Return validation and test bits of every row, with what was equal."""
        heading = ["model", "memory slots", "parameters", "steps × tokens", "validation", "test, bits per byte"]
        lines = []
        for found in rows:
            of = cost(found.row.config, "small")
            of_compressors = f", {of.compressors:,} of them compressors'" * bool(of.compressors)
            lines.append([
                found.row.title, slots(found.row), f"{of.parameters:,}{of_compressors}",
                f"{of.steps:,} × {of.tokens // of.steps:,}", figure_of(found.values("valid", "bits_per_byte")),
                figure_of(found.values("test", "bits_per_byte")),
            ])  # fmt: skip
        return markdown(heading, lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare with each TransformerXL on the test split."""
        ours, *others = (row.values("test", "bits_per_byte") for row in rows)
        return [
            Comparison.of(ours, bits, *others).sentence(rows[0].row.title, row.row.title, "bits per byte")
            for row, bits in zip(rows[1:], others, strict=True)
        ]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot the test bits of every seed, and the loss by tokens read since an empty memory."""
        fig = figure(10, 3.6)
        left, right = fig.subplots(1, 2)
        measured = [row for row in rows if row.runs]
        for place, (row, colour) in enumerate(zip(measured, COLOURS.values(), strict=False)):
            bits = row.values("test", "bits_per_byte")
            left.scatter([place] * len(bits), bits, color=colour, s=36, zorder=3)
            left.hlines(statistics.mean(bits), place - 0.2, place + 0.2, color=colour, linewidth=2)
            since = row.values("memory", "since_empty")
            means = [statistics.mean(one["excess"]["mean"] for one in seeds) for seeds in zip(*since, strict=True)]
            shown = [index for index, mean in enumerate(means) if mean > LEAST]
            read = [since[0][index]["last"] for index in shown]
            right.plot(read, [means[index] for index in shown], "o-", markersize=3.5, color=colour)
        names = [f"{row.row.title}, {slots(row.row)}".replace(", ", "\n").replace(" at ", "\nat ") for row in measured]
        left.set_xticks(range(len(measured)), names)
        left.set_xlim(-0.6, len(measured) - 0.4)
        tidy(left, "Test, every seed and the mean", y="bits per byte")
        right.set_xscale("log")
        right.set_yscale("log")
        right.xaxis.set_major_formatter("{x:,.0f}")
        right.yaxis.set_major_formatter("{x:g}")
        tidy(right, "Loss since an empty memory, on validation", "tokens read", "bits above full memory")
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


class Enwik8(AgainstTransformerXL):
    """On bytes, at equal cost and as the paper set the sizes."""

    name = "enwik8"
    source = "Table 4"
    claim = "On enwik8 the Compressive Transformer has fewer bits per character, 0.97, than a TransformerXL, 0.98."

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the Compressive Transformer and two TransformerXLs."""
        return [compressive(scale), equal_cost(scale), paper_s_transformer_xl(scale)]
