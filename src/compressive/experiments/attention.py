"""Figure 2: average attention over eighteen buckets of compressed memory, recent memory and window, sizes equal.

The model is the Compressive Transformer of `enwik8`.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressive.analysis.attention import BUCKETS, PLACES, measure_attention
from compressive.config import transformer
from compressive.experiments.enwik8 import STREAMS, compressive
from compressive.experiments.experiment import Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.plotting import COLOURS, INK, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import pick_device

SEQUENCES: Mapping[Scale, int] = {"tiny": 500, "small": 6_000, "paper": 20_000}
"""Windows that are averaged; the paper has 20,000."""


class Attention(Experiment):
    """Whether attention rises from recent to compressed memory."""

    name = "attention"
    source = "Figure 2"
    claim = (
        "Attention rises from the oldest recent memories to the compressed ones, against the trend that older memories "
        "are attended to less."
    )

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the Compressive Transformer of `enwik8`."""
        return [compressive(scale)]

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Average the attention of windows of the validation split, with both memories of the window's size."""
        trained = Trained.load(run, "last")
        window = trained.config.window
        config = transformer(trained.eval_config(window, window).model)
        model = trained.model(config, pick_device(run.config.train.device))
        text, tokens = run.corpus().split("valid"), SEQUENCES[scale] * window
        return measure_attention(model, text, tokens=tokens, streams=2 * STREAMS[scale]).as_dict()

    def table(self, rows: Sequence[Measured]) -> str:
        """Return the share of attention of every bucket, oldest first, with the standard error within a seed."""
        (row,) = rows
        lines = [
            [place, str(number + 1), figure_of(_shares(row, index)), f"{max(_errors(row, index), default=0):.1e}"]
            for index, (place, number) in enumerate((place, number) for place in PLACES for number in range(BUCKETS))
        ]
        return markdown(["place", "bucket, oldest first", "share of attention", "standard error"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare the buckets on both sides of the border, and the oldest with the newest compressed ones."""
        (row,) = rows
        newest, oldest_recent = (_shares(row, index) for index in (BUCKETS - 1, BUCKETS))
        oldest = _shares(row, 0)
        counts = ", ".join(dict.fromkeys(f"{count:,}" for count in row.values("sequences")))
        border = Comparison.paired(newest, oldest_recent)
        inside = Comparison.paired(oldest, newest)
        return [
            border.sentence("Newest compressed bucket", "oldest recent bucket", f"of all attention ({counts} windows)"),
            inside.sentence("Oldest compressed bucket", "newest compressed bucket", "of all attention"),
        ]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot the buckets as bars: the mean of the seeds, a dot for each seed, and the largest standard error."""
        (row,) = rows
        fig = figure(9, 3.4)
        axes = fig.subplots()
        for index in range(len(PLACES) * BUCKETS):
            shares, colour = _shares(row, index), COLOURS[PLACES[index // BUCKETS]]
            mean, error = statistics.mean(shares), max(_errors(row, index))
            axes.bar(index, mean, 0.85, color=colour, yerr=error, ecolor=INK, capsize=2, alpha=0.85)
            axes.scatter([index] * len(shares), shares, color=INK, s=7, zorder=3)
        middles = [place * BUCKETS + (BUCKETS - 1) / 2 for place in range(len(PLACES))]
        axes.set_xticks(middles, ["compressed memory", "recent memory", "window"])
        axes.set_xlim(-0.6, len(PLACES) * BUCKETS - 0.4)
        tidy(axes, "Attention by bucket, oldest to newest; a dot is a seed", y="share of attention")
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


def _shares(row: Measured, index: int) -> list[float]:
    return [shares[index]["mean"] for shares in row.values("shares")]


def _errors(row: Measured, index: int) -> list[float]:
    return [shares[index]["error"] for shares in row.values("shares")]
