"""Compression loss by layer, as in the paper's figure 6."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy.typing as npt
import torch

from compressive.analysis.reading import Estimate, read, spread, to_numpy
from compressive.config import ModelConfig
from compressive.evaluation.score import Progress
from compressive.model.language_model import CompressiveLM
from compressive.plotting import COLOURS, INK, WIDTH, figure, save, tidy

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class LayerLoss:
    """Compression loss of each compressing layer; standard errors are over windows, averaged over streams."""

    kind: str  # attention or autoencoding
    windows: int
    layers: dict[int, Estimate]  # by number, from 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)

    def table(self) -> "RenderableType":
        """Return a terminal table of the layers."""
        from rich.table import Table

        title = f"Compression loss ({self.kind}) by layer, {self.windows:,} windows"
        table = Table("layer", "loss", "standard error", title=title, title_justify="left", min_width=WIDTH)
        for number, loss in self.layers.items():
            table.add_row(str(number), f"{loss.mean:.4e}", f"{loss.error:.1e}")
        return table

    def plot(self, to: Path | BinaryIO) -> None:
        """Plot one bar per layer."""
        fig = figure(9, 3)
        axes = fig.subplots()
        axes.bar(
            [str(number) for number in self.layers],
            [loss.mean for loss in self.layers.values()],
            yerr=[loss.error for loss in self.layers.values()],
            color=COLOURS["compressed"],
            ecolor=INK,
            capsize=3,
            width=0.7,
        )
        name = {"attention": "Attention-reconstruction", "autoencoding": "Auto-encoding"}[self.kind]
        tidy(axes, f"{name} loss by layer", "layer", "mean squared difference")
        save(fig, to)


def measurable(config: ModelConfig) -> ModelConfig:
    """Return the configuration with attention reconstruction, which has no weights, if it has no compression loss."""
    return dataclasses.replace(config, compression_loss="attention") if config.compression_loss == "none" else config


def measure_layers(
    model: CompressiveLM,
    text: npt.NDArray[Any],
    *,
    tokens: int = 200_000,
    streams: int = 16,
    progress: Progress | None = None,
) -> LayerLoss:
    """Average each layer's compression loss over about `tokens` tokens of a text (n,), once memories are full.

    Raises ValueError if no layer compresses, or if the model has no compression loss.
    """
    config = model.config
    compressing = [i for i, size in enumerate(config.compressed_sizes) if size]
    if not compressing:
        raise ValueError("compressed_size=0: this model compresses nothing; choose a run that has compressed memory")
    if config.compression_loss == "none":
        raise ValueError(
            "compression_loss='none': this model computes no loss; build it with compression_loss='attention', which "
            "needs no other weights"
        )
    cut = spread(model, text, tokens, streams)
    outs = read(model, cut.tokens, model.initial_memory(len(cut.tokens)), progress=progress)
    losses = to_numpy(torch.stack([out.compression_losses for out in outs][cut.filling :]))
    return LayerLoss(config.compression_loss, len(losses), {i + 1: Estimate.of(losses[:, i]) for i in compressing})
