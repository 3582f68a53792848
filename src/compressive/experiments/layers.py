"""Figure 6: the compression loss by layer, of the Compressive Transformer of `enwik8`."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressive.analysis.layers import measure_layers
from compressive.config import transformer
from compressive.experiments.enwik8 import STREAMS, compressive
from compressive.experiments.experiment import Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.plotting import COLOURS, INK, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import pick_device

TOKENS: Mapping[Scale, int] = {"tiny": 20_000, "small": 1_000_000, "paper": 1_000_000}
"""Tokens of the validation split that are measured."""


class Layers(Experiment):
    """Whether the first layer is the most compressible."""

    name = "layers"
    source = "Figure 6"
    claim = "The first layer is the most compressible; after it the loss follows no trend."

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the Compressive Transformer of `enwik8`."""
        return [compressive(scale)]

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Average the attention-reconstruction loss of every layer."""
        trained = Trained.load(run, "last")
        model = trained.model(transformer(trained.config), pick_device(run.config.train.device))
        text = run.corpus().split("valid")
        return measure_layers(model, text, tokens=TOKENS[scale], streams=STREAMS[scale]).as_dict()

    def table(self, rows: Sequence[Measured]) -> str:
        """Return the loss of every layer."""
        lines = [[number, figure_of(values, 5)] for number, values in losses(rows[0]).items()]
        return markdown(["layer", "attention-reconstruction loss"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare the first layer with the most compressible of the others."""
        first, *others = losses(rows[0]).values() or ([],)
        lowest = [min(values) for values in zip(*others, strict=True)]
        return [Comparison.paired(first, lowest).sentence("Layer 1", "the lowest of the other layers", "in loss", 5)]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot one bar per layer, and a dot for each seed."""
        fig = figure(8, 3.2)
        axes = fig.subplots()
        for number, values in losses(rows[0]).items():
            axes.bar(number, statistics.mean(values), 0.7, color=COLOURS["compressed"], alpha=0.85)
            axes.scatter([number] * len(values), values, color=INK, s=9, zorder=3)
        tidy(axes, "Compression loss by layer; a dot is a seed", "layer", "mean squared difference")
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


def losses(row: Measured) -> dict[str, list[float]]:
    """Return the losses of every seed by layer, whose numbers are words in JSON."""
    layers = row.values("layers")
    return {number: [one[number]["mean"] for one in layers] for number in (layers[0] if layers else ())}
