"""Training curves from a run's metrics.jsonl."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from compressive.plotting import COLOURS, PALETTE, Panel, bound, hover, label_ends, log_ticks, tidy

SMOOTH = 100
"""Curves with more points than this are smoothed by a running mean."""
EARLY = 1 / 20
"""The y axis is scaled to what follows this share of the steps: before it, the loss is still near chance."""

Points = list[tuple[int, float]]


class Line(NamedTuple):
    """One metric over steps."""

    label: str
    points: Points
    colour: str
    marked: bool = False  # a dot on each point, never smoothed


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
        valid, test = ([line for line in kinds["eval"] if line.get("split", "valid") == x] for x in ("valid", "test"))
        return cls(kinds["train"], valid, test)

    def values(self, name: str, kind: Literal["train", "eval"] = "train") -> Points:
        """Return a metric by step, of the training records or of the evaluations; non-finite values are left out."""
        lines = self.train if kind == "train" else self.evaluations
        return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]

    def skipped(self, name: str) -> str:
        """Say how many training records have no finite value of a metric, if any has."""
        missing = [line["step"] for line in self.train if name in line and line[name] is None]
        return f"{_records(missing)} not finite, and not drawn. " if missing else ""

    def loss_panels(
        self,
        unit: str = "bits per token",
        key: str = "bits",
        bounds: Mapping[str, float] = MappingProxyType({}),
        chance: float | None = None,
    ) -> list[Panel]:
        """Return panels of training and validation loss and, if there is one, of the compression loss.

        `bounds` are drawn as lines by name; `chance` is drawn, or said if the axis does not reach it.
        """
        train, valid = self.values(key), self.values(key, "eval")
        if not train and not valid:
            return []
        claim = f"Training loss ended at {train[-1][1]:.3f} {unit}" if train else ""
        if valid:
            step, best = min(valid, key=lambda point: point[1])
            claim = f"Best validation score: {best:.3f} {unit}, at step {step:,}"
        lines = [Line("training", train, COLOURS["window"]), Line("validation", valid, COLOURS["compressed"], True)]
        caption = "Training is the mean since the record before; validation, the beginning of that split. "
        if chance is not None:
            caption += f"Uniform guessing has {chance:,.4g}. "
        panels = [lines_panel(claim, lines, unit, bounds=bounds, caption=caption + self.skipped(key))]
        losses = self.values("compression_loss")
        if any(value for _, value in losses):
            claim = f"Compression loss ended at {losses[-1][1]:.3g}"
            line = Line("", losses, COLOURS["compressed"])
            panels.append(lines_panel(claim, [line], "sum over layers", caption=self.skipped("compression_loss")))
        return panels

    def optimisation_panels(
        self, speed: str = "tokens_per_second", unit: str = "tokens per second", x: str = "step"
    ) -> list[Panel]:
        """Return panels of gradient norms, learning rate and speed; those without records are left out."""
        panels = []
        norms = [
            Line(label, self.values(name), colour)
            for label, name, colour in (
                ("model", "gradient_norm", COLOURS["recent"]),
                ("compressors", "compressor_gradient_norm", COLOURS["compressed"]),
            )
        ]
        norms = [line for line in norms if any(value for _, value in line.points)]
        if norms:
            claim = f"Gradient norm, before clipping: {norms[0].points[-1][1]:.3g} at the end"
            caption = self.skipped("gradient_norm")
            panels.append(lines_panel(claim, norms, "norm", x=x, log=True, caption=caption))
        if rates := self.values("learning_rate"):
            claim = f"Learning rate: highest {max(value for _, value in rates):.2g}"
            line = Line("", rates, PALETTE[1])
            panels.append(lines_panel(claim, [line], "learning rate", x=x, zero=True, smooth=False))
        if speeds := self.values(speed):
            claim = f"{np.median([value for _, value in speeds]):,.0f} {unit}, median"
            panels.append(lines_panel(claim, [Line("", speeds, PALETTE[1])], unit, x=x, zero=True))
        return panels


def lines_panel(
    claim: str,
    lines: Sequence[Line],
    y: str,
    *,
    x: str = "step",
    log: bool = False,
    zero: bool = False,
    smooth: bool = True,
    bounds: Mapping[str, float] = MappingProxyType({}),
    caption: str = "",
) -> Panel:
    """Return a panel of metrics over steps, labelled at their ends; its caption says which points are not drawn.

    With `log` the y axis is logarithmic, with `zero` it begins at 0. Otherwise it is scaled to the later points.
    """
    lines = [line for line in lines if line.points]
    drawn = [
        line._replace(points=[point for point in line.points if not log or point[1] > 0])
        for line in lines
    ]  # fmt: skip
    if hidden := [step for line in lines for step, value in line.points if log and value <= 0]:
        caption += f"{_records(hidden)} 0 or below, which a logarithmic axis cannot show. "
    low, high = _limits(drawn, bounds) if not log else (-math.inf, math.inf)
    if zero:
        low, high = min(0.0, low), high
    if outside := [(step, value) for line in drawn for step, value in line.points if not low <= value <= high]:
        steps, values = zip(*outside, strict=True)
        most = max(values, key=abs)
        caption += f"{_records(steps)} outside the axis, up to {most:.3g}. "
    if smooth and any(len(line.points) > SMOOTH for line in drawn):
        caption += "Long curves are running means over their faint records. "

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        ends = []
        for line in drawn:
            if line.points:
                ends.append((_draw(axes, line, y, smooth), line.label, line.colour))
        tidy(axes, "", x, y)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        if log:
            axes.set_yticks(**log_ticks(*axes.get_ylim()))
            axes.minorticks_off()
        elif math.isfinite(low):
            axes.set_ylim(low, high)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
            axes.locator_params(axis="y", nbins=6)
        for name, value in bounds.items():
            bound(axes, value, name)
        label_ends(axes, [end for end in ends if end[1]])

    return Panel(claim, draw, caption.strip())


def _draw(axes: Any, line: Line, y: str, smooth: bool) -> float:
    """Draw a line, smoothed if it is long; return where it ends."""
    steps, values = np.array(line.points, dtype=float).T
    if smooth and len(values) > SMOOTH and not line.marked:
        axes.plot(steps, values, color=line.colour, alpha=0.25, linewidth=0.8)
        width = len(values) // 40
        sums = np.concatenate([[0.0], values.cumsum()])
        steps, values = steps[width - 1 :], (sums[width:] - sums[:-width]) / width
    axes.plot(steps, values, color=line.colour, linewidth=1.6, marker="o" * line.marked, markersize=3.5)
    name = f"{line.label}, " if line.label else ""
    texts = [f"{name}step {step:,.0f}: {value:,.4g} {y}" for step, value in zip(steps, values, strict=True)]
    hover(axes, list(zip(steps, values, strict=True)), texts)
    return float(values[-1])


def _limits(lines: Sequence[Line], bounds: Mapping[str, float]) -> tuple[float, float]:
    last = max((step for line in lines for step, _ in line.points), default=0)
    late = [value for line in lines for step, value in line.points if step >= last * EARLY]
    if not late:
        return -math.inf, math.inf
    late += bounds.values()
    margin = 0.06 * (max(late) - min(late)) or 0.05 * abs(late[0]) or 0.05
    return min(late) - margin, max(late) + margin


def _records(steps: Sequence[int]) -> str:
    """Name points by their steps: 'The point at step 3 is', '12 points, steps 1 to 40, are'."""
    if len(steps) == 1:
        return f"The point at step {steps[0]:,} is"
    return f"{len(steps)} points, steps {min(steps):,} to {max(steps):,}, are"
