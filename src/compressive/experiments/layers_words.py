"""Figure 6, second half: the compression loss by layer on words, beside that on bytes.

The models are the Compressive Transformers of `wikitext` and `enwik8`.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from compressive.experiments.enwik8 import compressive
from compressive.experiments.experiment import Comparison, Measured, Row, Scale, figure_of, markdown
from compressive.experiments.layers import Layers, losses
from compressive.experiments.wikitext import compressive_words
from compressive.plotting import COLOURS, INK, figure, save, tidy


class LayersWords(Layers):
    """Whether words are an order of magnitude harder to compress."""

    name = "layers-words"
    source = "Figure 6"
    claim = "The compression loss is about one order of magnitude higher on words than on characters."

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the models of both experiments."""
        words, characters = compressive_words(scale), compressive(scale)
        return [Row(words.name, "words", words.config), Row(characters.name, "bytes", characters.config)]

    def table(self, rows: Sequence[Measured]) -> str:
        """Return the loss of every layer of both, and the mean over layers."""
        by_layer = [losses(row) for row in rows]
        numbers = dict.fromkeys(number for found in by_layer for number in found)
        lines = [[number, *(figure_of(found.get(number, []), 4) for found in by_layer)] for number in numbers]
        mean = ["mean", *(figure_of(_means(row), 4) for row in rows)]
        return markdown(["layer", *(row.row.title for row in rows)], [*lines, mean])

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare the logarithm of the mean over layers: one order of magnitude is a difference of 1."""
        words, characters = ([math.log10(mean) for mean in _means(row)] for row in rows)
        return [Comparison.of(words, characters).sentence("The loss on words", "that on bytes", "powers of ten", 2)]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot a line over layers for each model, on a log axis, and a dot for each seed."""
        fig = figure(8, 3.4)
        axes = fig.subplots()
        for row, colour in zip(rows, COLOURS.values(), strict=False):
            found = losses(row)
            for number, values in found.items():
                axes.scatter([int(number)] * len(values), values, color=colour, s=14, zorder=3)
            means = [statistics.mean(values) for values in found.values()]
            axes.plot([int(number) for number in found], means, color=colour, label=row.row.title)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7, colors=INK)
        axes.set_xticks(sorted({int(number) for row in rows for number in losses(row)}))
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK)
        tidy(axes, "Compression loss by layer; a dot is a seed", "layer", "mean squared difference")
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


def _means(row: Measured) -> list[float]:
    """Return the mean over layers of every seed."""
    return [statistics.mean(values) for values in zip(*losses(row).values(), strict=True)]
