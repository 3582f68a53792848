"""Table 7: perplexity by how often a word occurs in training, of the models of `wikitext`, and the gain in each bucket.

Buckets are the paper's, by number of occurrences, whatever the size of the corpus.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from compressive.analysis.against import relative_gain
from compressive.distributed import World
from compressive.evaluation.sweep import Reading, sweep
from compressive.experiments.experiment import Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.experiments.wikitext import STREAMS, compressive_words, equal_cost_words
from compressive.plotting import COLOURS, FAINT, INK, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import pick_device

PAPER = {">10K": (7.8, 7.6), "1K-10K": (61.2, 55.9), "100-1K": (188, 158), "<100": (1123, 937), "all": (18.1, 17.1)}
"""Perplexities of the paper's TransformerXL and Compressive Transformer on WikiText-103; it prints a gain of 21 % for
the third bucket, where 188 / 158 is 19 % more."""
FREQUENT, RARE = ">10K", "<100"


class Words(Experiment):
    """Whether rare words gain most."""

    name = "words"
    source = "Table 7"
    claim = (
        "The Compressive Transformer gains little over a TransformerXL on frequent words, 2.6 % of perplexity, and "
        "much on rare ones, about 20 %."
    )

    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1, 2, 3), "small": (0, 1, 2), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the models of `wikitext`."""
        return [compressive_words(scale), equal_cost_words(scale)]

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score the test split with the memory of training; average nats by bucket."""
        trained, world = Trained.load(run, "last"), World(device=pick_device(run.config.train.device))
        reading = Reading("test", STREAMS[scale], None, run.config.train.precision)
        (result,) = sweep(trained, run.corpus(), [trained.eval_config()], reading, world)
        found = {"all": {"words": result.metrics.tokens, "nats": result.metrics.nats_per_token}}
        for bucket in result.metrics.buckets:
            assert bucket.perplexity is not None, f"no word of the test split is seen {bucket.name} times in training"
            found[bucket.name] = {"words": bucket.tokens, "nats": math.log(bucket.perplexity)}
        return found

    def table(self, rows: Sequence[Measured]) -> str:
        """Return the perplexities of both models and the gain, beside the paper's."""
        ours, txl = rows
        lines = []
        for bucket, (paper_txl, paper_ours) in PAPER.items():
            counts = [count for row in rows for count in row.values(bucket, "words")]
            lines.append([
                "all" if bucket == "all" else f"{bucket} times", f"{paper_txl:,} / {paper_ours:,}",
                f"{100 * (paper_txl / paper_ours - 1):.1f} %", f"{counts[0]:,}" if counts else "–",
                *(figure_of([math.exp(nats) for nats in row.values(bucket, "nats")], 1) for row in (txl, ours)),
                f"{figure_of([100 * gain for gain in gains(ours, txl, bucket)], 1)} %",
            ])  # fmt: skip
        heading = ["in training", "paper, TransformerXL / Compressive", "paper's gain", "words of test"]
        return markdown([*heading, txl.row.title, ours.row.title, "gain"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare the models in every bucket, then the gains of rare and of frequent words."""
        ours, txl = rows
        found = [
            Comparison.of(ours.values(bucket, "nats"), txl.values(bucket, "nats")).sentence(
                f"{ours.row.title}, {'all words' if bucket == 'all' else f'words seen {bucket} times'},",
                txl.row.title, "nats per word",
            )
            for bucket in PAPER
        ]  # fmt: skip
        rare, frequent = ([100 * gain for gain in gains(ours, txl, bucket)] for bucket in (RARE, FREQUENT))
        apart = Comparison.paired(rare, frequent)
        return [*found, apart.sentence(f"Gain in words seen {RARE} times", f"{FREQUENT} times", "% of perplexity", 2)]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot the gain of every bucket, a dot for each seed, beside the paper's."""
        ours, txl = rows
        fig = figure(9, 3.6)
        axes = fig.subplots()
        for place, (bucket, (paper_txl, paper_ours)) in enumerate(PAPER.items()):
            axes.bar(place - 0.2, 100 * (paper_txl / paper_ours - 1), 0.36, color=FAINT, label="paper" * (not place))
            found = [100 * gain for gain in gains(ours, txl, bucket)]
            if found:
                mean = statistics.mean(found)
                axes.bar(place + 0.2, mean, 0.36, color=COLOURS["compressed"], alpha=0.85, label="here" * (not place))
                axes.scatter([place + 0.2] * len(found), found, color=INK, s=12, zorder=3)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xticks(range(len(PAPER)), ["all" if name == "all" else f"seen {name} times" for name in PAPER])
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK)
        tidy(axes, "Gain over TransformerXL by frequency in training; a dot is a seed", y="% of perplexity")
        self.headline(fig, self.verdicts(rows)[-1])
        save(fig, to)


def gains(ours: Measured, txl: Measured, bucket: str) -> list[float]:
    """Return, seed by seed, by how much the TransformerXL's perplexity is higher: 0.2 is 20 %."""
    seeds = sorted(ours.runs.keys() & txl.runs.keys())
    return [relative_gain(ours.runs[seed][bucket]["nats"], txl.runs[seed][bucket]["nats"]) for seed in seeds]
