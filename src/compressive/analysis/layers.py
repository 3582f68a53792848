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
from compressive.plotting import COLOURS, INK, WIDTH, Panel, arrange, save, tidy, tip

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

    def panels(self) -> list[Panel]:
        """Return one panel, a bar per layer."""
        what = {
            "attention": "Mean squared difference between attention over compressed memories and over the originals",
            "autoencoding": "Mean squared difference between memories decoded from compressed ones and the originals",
        }[self.kind]
        worst = max(self.layers, key=lambda number: self.layers[number].mean)
        claim = f"Layer {worst} loses most in compression: {self.layers[worst].mean:.3g}"
        caption = f"{what}, over {self.windows:,} windows. Error bars, ±: standard error over windows."
        return [Panel(claim, self._draw, caption)]

    def plot(self, to: Path | BinaryIO) -> None:
        """Plot one bar per layer."""
        save(arrange(self.panels()), to)

    def _draw(self, axes: Any) -> None:
        for number, loss in self.layers.items():
            (bar,) = axes.bar(
                str(number), loss.mean, yerr=loss.error, color=COLOURS["compressed"], ecolor=INK, width=0.7
            )
            tip(bar, f"layer {number}: {loss.mean:.3g} ± {loss.error:.1g}")
        tidy(axes, "", "layer", "mean squared difference")


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
