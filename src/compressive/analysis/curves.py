"""Training curves from a run's metrics.jsonl."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np

from compressive.plotting import COLOURS, INK, figure, log_ticks, save, tidy

SMOOTH = 100
"""Curves with more points than this are smoothed by a running mean."""


@dataclass(frozen=True)
class Curves:
    """The records of metrics.jsonl, by kind."""

    train: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    """On the validation split."""
    test: list[dict[str, Any]]
    """On the test split, if training evaluated on it too."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a run's metrics; truncated lines are skipped, and a missing file gives no records."""
        lines = []
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        lines = [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]
        kinds = {kind: [line for line in lines if line.get("kind") == kind] for kind in ("train", "eval")}
        splits = (
            [line for line in kinds["eval"] if line.get("split", "valid") == split] for split in ("valid", "test")
        )
        return cls(kinds["train"], *splits)

    def values(self, name: str, kind: Literal["train", "eval"] = "train") -> list[tuple[int, float]]:
        """Return a metric by step, of the training records or of the evaluations; non-finite values are left out."""
        lines = self.train if kind == "train" else self.evaluations
        return [(line["step"], line[name]) for line in lines if _has(line, name)]

    def plot_loss(self, to: Path | BinaryIO) -> None:
        """Plot training and validation loss, and the compression loss if there is one."""
        fig, ratios = figure(9, 3.4), (5, 3) if any(line.get("compression_loss") for line in self.train) else (1,)
        loss, *rest = fig.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
        _line(loss, self.train, "bits", COLOURS["window"], "training")
        _line(loss, self.evaluations, "bits", COLOURS["compressed"], "validation", marker="o")
        tidy(loss, "Loss", "step", "bits per token")
        # Scale the y axis to the records after the first 5 % of steps, where the loss is still near uniform.
        lines = [line for line in (*self.train, *self.evaluations) if _has(line, "bits")]
        last = max((line["step"] for line in lines), default=0)
        if late := [line["bits"] for line in lines if line["step"] >= last / 20]:
            margin = 0.05 * (max(late) - min(late)) + 0.01
            loss.set_ylim(min(late) - margin, max(late) + margin)
            loss.legend(fontsize=8.5, frameon=False, labelcolor=INK)
        for compression in rest:
            _line(compression, self.train, "compression_loss", COLOURS["compressed"], "")
            tidy(compression, "Compression loss", "step", "sum over layers")
        save(fig, to)

    def plot_optimisation(self, to: Path | BinaryIO) -> None:
        """Plot gradient norms, learning rate and tokens per second."""
        fig = figure(9, 2.5)
        norms, rate, speed = fig.subplots(1, 3)
        norms.set_yscale("log")
        _line(norms, self.train, "gradient_norm", COLOURS["recent"], "model")
        _line(norms, self.train, "compressor_gradient_norm", COLOURS["compressed"], "compressors")
        norms.set_yticks(**log_ticks(*norms.get_ylim()))
        norms.minorticks_off()
        tidy(norms, "Gradient norm", "step")
        if norms.lines:
            norms.legend(fontsize=8, frameon=False, labelcolor=INK)
        _line(rate, self.train, "learning_rate", COLOURS["recent"], "", smooth=False)
        rate.set_ylim(bottom=0)
        rate.yaxis.set_major_formatter("{x:g}")
        tidy(rate, "Learning rate", "step")
        _line(speed, self.train, "tokens_per_second", COLOURS["recent"], "")
        speed.set_ylim(bottom=0)
        speed.yaxis.set_major_formatter("{x:,.0f}")
        tidy(speed, "Tokens per second", "step")
        save(fig, to)


def _line(
    axes: Any,
    lines: Sequence[dict[str, Any]],
    name: str,
    colour: str,
    label: str,
    marker: str = "",
    smooth: bool = True,
) -> None:
    """Plot one metric over steps; many points are plotted faintly, under their running mean."""
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    points = [(line["step"], line[name]) for line in lines if _has(line, name)]
    if axes.get_yscale() == "log":
        points = [point for point in points if point[1] > 0]
    if not points:
        return
    steps, values = np.array(points, dtype=float).T
    if smooth and len(values) > SMOOTH and not marker:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        width = len(values) // 40
        sums = np.concatenate([[0.0], values.cumsum()])
        steps, values = steps[width - 1 :], (sums[width:] - sums[:-width]) / width
    axes.plot(steps, values, color=colour, linewidth=1.6, label=label, marker=marker, markersize=3.5)


def _has(line: dict[str, Any], name: str) -> bool:
    """Whether the record has a number under this name; non-finite values are written as null."""
    return isinstance(line.get(name), int | float)
