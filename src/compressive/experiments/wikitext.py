"""Tables 6 and 9: the Compressive Transformer against TransformerXL on words, with adaptive inputs and softmax.

Compressed sizes are swept on validation, and the test split is read at the chosen size, once as it is and once with
dynamic evaluation. Windows and memories have the sizes of the paper's WikiText-103 model, divided by 16 at `tiny` and
by 8 at `small`. The TransformerXL has as many slots in all, and so the same attention cost.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from compressive.config import transformer
from compressive.evaluation.sweep import Reading
from compressive.experiments.enwik8 import Tables, quiet, slots, transformer_xl
from compressive.experiments.experiment import Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.experiments.memory_sizes import score_at
from compressive.plotting import COLOURS, INK, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained

WORDS: Mapping[Scale, tuple[str, Tables]] = {
    "tiny": ("quickstart", {
        "model": {"vocab_size": 8_587, "n_layers": 3, "d_model": 96, "d_ff": 384, "window": 32, "memory_size": 32,
                  "compressed_size": 32, "adaptive_cutoffs": [1_000, 3_000], "adaptive_factor": 4},
        "data": {"corpus": "books-words"},
        "train": {"steps": 500, "warmup_steps": 100, "decay_steps": 400},
    }),
    "small": ("wikitext2", {"train": {"precision": "bf16", "checkpoint_every": 2_000}}),
    "paper": ("wikitext103", {}),
}  # fmt: skip
"""The Compressive Transformer on words: a preset, and values in place of the preset's.

`books-words` are the books of this repository, cut at white space; words seen once or twice are
`<unk>`, as in WikiText.
"""
SIZES: Mapping[Scale, tuple[int, ...]] = {
    "tiny": (0, 16, 32, 64, 96, 128),
    "small": (0, 32, 64, 128, 192, 256),
    "paper": (0, 256, 512, 1024, 1536, 2048),
}
"""Slots of compressed memory at evaluation; the third is that of training."""
PAPER = (None, 18.2, 17.9, 17.6, 17.1, 17.7)
"""The paper's test perplexity at these sizes, Table 9. Its text has 17.6 at the size of training."""
STREAMS: Mapping[Scale, int] = {"tiny": 4, "small": 4, "paper": 1}
"""Streams that a split is cut into: few, as dynamic evaluation takes one update per window of all streams."""
TESTS: Mapping[str, tuple[str, float | None, float | None]] = {
    "test_as_trained": ("test, as trained", 17.6, None),
    "test_as_chosen": ("test, size chosen on validation", 17.1, 18.1),
    "test_dynamic": ("test, at that size, dynamic evaluation", 16.1, None),
}
"""What is measured on the test split, and the paper's perplexity of each model."""


def compressive_words(scale: Scale) -> Row:
    """The Compressive Transformer on words; other experiments measure its runs too."""
    return Row("words-compressive", "Compressive Transformer", quiet(*WORDS[scale]))


def equal_cost_words(scale: Scale) -> Row:
    """The TransformerXL on words with as many slots."""
    return transformer_xl(compressive_words(scale), "words-txl", "TransformerXL, equal cost")


def perplexity(row: Measured, *keys: str) -> list[float]:
    """Return the perplexity of every seed, of what has bits per word."""
    return [2 ** one["bits"] for one in row.values(*keys)]


class WikiText(Experiment):
    """Both models at all sizes, and with dynamic evaluation."""

    name = "wikitext"
    source = "Tables 6 and 9"
    claim = (
        "On WikiText-103 the Compressive Transformer has a lower test perplexity, 17.1, than a TransformerXL, 18.1; "
        "17.6 before its compressed size was chosen on validation, 16.1 with dynamic evaluation."
    )

    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1, 2, 3), "small": (0, 1, 2), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the Compressive Transformer and the TransformerXL."""
        return [compressive_words(scale), equal_cost_words(scale)]

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score validation at every size; test as trained, as chosen, and as chosen with dynamic evaluation.

        Dynamic evaluation has a tenth of the peak learning rate of training.
        """
        trained, train = Trained.load(run, "last"), run.config.train
        model = transformer(trained.config)
        on_valid = Reading("valid", STREAMS[scale], None, train.precision)
        on_test = Reading("test", STREAMS[scale], None, train.precision)
        dynamic = dataclasses.replace(on_test, dynamic=train.learning_rate / 10, clip=train.clip)
        first = transformer(compressive_words(scale).config.model).memory_sizes[0]
        as_trained = model.memory_sizes[0] + model.compressed_sizes[0]
        valid = [score_at(trained, run, first + size, "auto", on_valid) for size in SIZES[scale]]
        best = min(valid, key=lambda one: one["bits"])["slots"]
        return {
            "valid": valid,
            "test_as_trained": score_at(trained, run, as_trained, "auto", on_test),
            "test_as_chosen": score_at(trained, run, best, "auto", on_test),
            "test_dynamic": score_at(trained, run, best, "auto", dynamic),
        }

    def table(self, rows: Sequence[Measured]) -> str:
        """Return validation perplexity by size, then that of the test split; the paper's figures in front."""
        sizes = next([one["slots"] for one in row.values("valid")[0]] for row in rows if row.runs)
        lines = []
        for place, (size, paper) in enumerate(zip(sizes, PAPER, strict=True)):
            ours = [figure_of(_valid(row, place), 1) for row in rows]
            lines.append([f"validation, {size:,} slots", "–" if paper is None else f"{paper} on test", "–", *ours])
        for key, (label, *papers) in TESTS.items():
            ours = []
            for row in rows:
                at = ", ".join(dict.fromkeys(f"{one['slots']:,}" for one in row.values(key)))
                ours.append(f"{figure_of(perplexity(row, key), 1)} at {at}" if at else "–")
            lines.append([label, *("–" if paper is None else f"{paper}" for paper in papers), *ours])
        titles = [f"{row.row.title}, {slots(row.row)}" for row in rows]
        heading = ["perplexity per word", "paper, Compressive Transformer", "paper, TransformerXL", *titles]
        return markdown(heading, lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare the two models on the test split in all three ways, and these ways for each model."""
        ours, txl = rows
        unit = "perplexity on test"
        found = [
            Comparison.of(perplexity(ours, key), perplexity(txl, key)).sentence(
                f"{ours.row.title}, {label.removeprefix('test, ')},", txl.row.title, unit, 2
            )
            for key, (label, *_) in TESTS.items()
        ]
        for row in rows:
            trained, chosen, dynamic = (perplexity(row, key) for key in TESTS)
            title = row.row.title.split(",")[0]
            size = Comparison.paired(chosen, trained).sentence(f"{title}, chosen size,", "size of training", unit, 2)
            found += [size, Comparison.paired(dynamic, chosen).sentence(f"{title}, dynamic,", "static", unit, 2)]
        return found

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot validation perplexity over slots, and the perplexities of the test split, every seed."""
        fig = figure(10, 3.8)
        left, right = fig.subplots(1, 2)
        for row, colour in zip(rows, COLOURS.values(), strict=False):
            if not row.runs:
                continue
            sizes = [one["slots"] for one in row.values("valid")[0]]
            values = [_valid(row, place) for place in range(len(sizes))]
            left.plot(sizes, [statistics.mean(one) for one in values], "o-", color=colour, markersize=4.5)
            low, high = ([pick(one) for one in values] for pick in (min, max))
            left.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            for place, key in enumerate(TESTS):
                found = perplexity(row, key)
                at = place + (0.12 if row is rows[0] else -0.12)
                label = row.row.title if place == 0 else None
                right.scatter([at] * len(found), found, color=colour, s=30, zorder=3, label=label)
                right.hlines(statistics.mean(found), at - 0.1, at + 0.1, color=colour, linewidth=2)
        trained = transformer(rows[0].row.config.model)
        left.axvline(trained.memory_sizes[0] + trained.compressed_sizes[0], color=INK, linewidth=0.8, linestyle=":")
        right.set_xticks(range(len(TESTS)), ["as trained", "size chosen\non validation", "that, dynamic\nevaluation"])
        right.legend(fontsize=8.5, frameon=False, labelcolor=INK)
        tidy(left, "Memory at evaluation; dotted: in training", "memory slots per layer", "validation, perplexity")
        tidy(right, "Test, every seed and the mean", y="perplexity per word")
        self.headline(fig, self.verdicts(rows)[1])
        save(fig, to)


def _valid(row: Measured, place: int) -> list[float]:
    """Return the validation perplexity of every seed at one of the sizes."""
    return [2 ** run[place]["bits"] for run in row.values("valid")]
