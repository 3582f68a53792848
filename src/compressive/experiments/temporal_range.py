"""Section 3.3: the temporal range l × (n_m + c·n_cm) and what it costs, computed and measured.

The paper's example is tested: a TransformerXL with n slots against n / 2 recent and n / 2 compressed slots, which have
the same attention cost and at rate 3 twice the range; here also at rate 7, four times the range. TransformerXLs of
the same ranges have 2 n and 4 n slots. The window is n / 2, a multiple of both rates.

The range is measured at the first token of a window, where the formula's is exact: how far back a token can be and
still change the prediction. What passes through many layers may be lost by rounding, so the measured reach is that of a
NaN in place of one token's embedding, which nothing absorbs. The influence of a token is how much the predicted
probabilities change, in float64, if another one takes its place.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compressive import bench
from compressive.config import RunConfig, transformer
from compressive.experiments.enwik8 import compressive, score_run, transformer_xl
from compressive.experiments.experiment import (
    Comparison,
    Experiment,
    Measured,
    Row,
    Scale,
    figure_of,
    markdown,
)
from compressive.kernels.dispatch import using
from compressive.model.language_model import CompressiveLM
from compressive.plotting import PALETTE, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import pick_device
from compressive.training.flops import training_flops_per_token

RATES = (3, 7)
"""With as many recent as compressed slots, the range is 2 and 4 times that of as many slots without compression."""


class Sizes(NamedTuple):
    """The models of a scale, and how they are measured."""

    window: int  # and recent memory, and compressed memory
    train: dict[str, Any]  # in place of the steps of `enwik8`
    texts: int  # over which the influence of a token is averaged


SIZES: Mapping[Scale, Sizes] = {
    "tiny": Sizes(42, {}, 16),
    "small": Sizes(336, {"steps": 2_000, "warmup_steps": 400, "decay_steps": 1_600}, 8),
    "paper": Sizes(756, {}, 4),
}
"""Windows are the multiples of both rates that are next to those of `enwik8`."""
ROUNDS, STEPS = 5, 6
"""The fastest of some rounds of some steps is taken: a machine may have other work."""
AT_A_TIME = 32
"""Texts that are read in one batch."""
DISTANCES = 24
"""Distances at which influence is measured, from 1 to the formula's range, evenly spaced in their logarithm."""


@torch.no_grad()
def last_hidden(model: CompressiveLM, tokens: Tensor, poisoned: Tensor | None = None) -> Tensor:
    """Read texts (B, n) from empty memory; return the hidden state at their last token, (B, D).

    Where `poisoned` (B, n), bool, holds, a NaN is read in place of the embedding.
    """
    memory, hidden, window = model.initial_memory(len(tokens)), tokens.new_empty(0), model.config.window
    for start in range(0, tokens.shape[1], window):
        x = model.embedding(tokens[:, start : start + window])
        if poisoned is not None:
            x = x.masked_fill(poisoned[:, start : start + window, None], torch.nan)
        out = model.trunk(x, memory)
        memory, hidden = out.memory, out.hidden
    return hidden[:, -1]


def reach(model: CompressiveLM, text: Tensor) -> int:
    """Return the largest distance before the last token of a text (n,) at which a token can change its prediction."""
    low, high = 0, len(text)  # a token reaches itself; the text has none at distance n
    while high - low > 1:
        distances = torch.linspace(low, high, AT_A_TIME + 2).round().long().unique()[1:-1]
        poisoned = len(text) - 1 - distances[:, None] == torch.arange(len(text))
        hidden = last_hidden(model, text.expand(len(distances), -1), poisoned.to(text.device))
        changed = hidden.isnan().any(dim=1).cpu()
        high = int(distances[~changed].min()) if not changed.all() else high
        low = int(distances[changed].max()) if changed.any() else low
    return low


@torch.no_grad()
def influence(model: CompressiveLM, texts: Tensor, distances: Sequence[int]) -> list[float]:
    """Return, by distance, how much a probability after texts (B, n) changes if the token there becomes another one.

    It is the largest change of any probability, averaged over texts. The model should be of float64.
    """
    before = model.embedding.logits(last_hidden(model, texts)).softmax(dim=-1)
    found = []
    for distance in distances:
        changed = texts.clone()
        changed[:, -1 - distance] = (changed[:, -1 - distance] + 1) % model.config.vocab_size
        after = model.embedding.logits(last_hidden(model, changed)).softmax(dim=-1)
        found.append(float((after - before).abs().amax(dim=-1).mean()))
    return found


def step_cost(config: RunConfig) -> dict[str, Any]:
    """Measure a training step on random tokens: microseconds per token, and peak memory (on a CPU, the process's)."""
    device = pick_device(config.train.device)
    with using(config.train.attention):
        subject = bench.ours(config, device)
        rounds = [bench.measure(subject, config, device, STEPS, sampled=0) for _ in range(ROUNDS)]
    fastest = min(rounds, key=lambda row: row["step_ms"])
    return {"us_per_token": 1e6 / fastest["tokens_per_second"], "peak_gib": fastest["peak_gib"]}


class TemporalRange(Experiment):
    """Range and cost of the paper's example, at equal cost and at equal range."""

    name = "temporal-range"
    source = "section 3.3"
    claim = (
        "With n / 2 recent and n / 2 compressed slots at rate 3 the temporal range is twice that of a TransformerXL "
        "with n slots, at an identical attention cost."
    )
    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0, 1), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the TransformerXL, the Compressive Transformers of its cost, and the TransformerXLs of their range."""
        config, (window, train, _) = compressive(scale).config, SIZES[scale]
        sizes: dict[str, Any] = {"window": window, "memory_size": window, "compressed_size": window}

        def ours(rate: int) -> Row:
            model = dataclasses.replace(transformer(config.model), **sizes, compression_rate=rate)
            row = dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, **train))
            return Row(f"range-rate{rate}", f"Compressive Transformer, rate {rate}", row)

        def txl(times: int) -> Row:
            title = f"TransformerXL, {times} n slots" if times > 1 else "TransformerXL, n slots"
            return transformer_xl(ours(RATES[0]), f"range-txl-{times}n", title, times)

        return [txl(1), *(ours(rate) for rate in RATES), *(txl((1 + rate) // 2) for rate in RATES)]

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Score the test split; measure reach, influence by distance, and the cost of a step."""
        trained, device = Trained.load(run, "last"), pick_device(run.config.train.device)
        config = transformer(trained.config)
        model, count = trained.model(config, device).eval(), SIZES[scale].texts
        formula, window = config.temporal_range, config.window
        length = -(-(formula + 2 * window) // window) * window + 1  # the last token is the first of its window
        split = np.resize(np.asarray(run.corpus().split("valid")), count * length)
        texts = torch.from_numpy(split.astype(np.int64)).view(count, length).to(device)
        distances = np.unique(np.geomspace(1, formula, DISTANCES).round().astype(int)).tolist()
        costs, reached = step_cost(run.config), reach(model, texts[0])
        changes = influence(model.double(), texts, [*distances, formula + 1])
        return {
            "formula": formula,
            "reach": reached,
            "influence": [{"distance": d, "change": c} for d, c in zip(distances, changes, strict=False)],
            "beyond": changes[-1],
            "flops_per_token": training_flops_per_token(config),
            **costs,
            "test": score_run(run, "test", scale),
        }

    def table(self, rows: Sequence[Measured]) -> str:
        """Return range, cost and bits of every row."""
        heading = ["model", "slots attended to", "range", "measured", "MFLOPs", "µs", "peak GiB", "test, bits per byte"]
        lines = []
        for row in rows:
            model = transformer(row.row.config.model)
            attended = model.window + model.memory_sizes[0] + model.compressed_sizes[0]
            lines.append([
                row.row.title, f"{attended:,}", f"{model.temporal_range:,}",
                " and ".join(f"{found:,}" for found in sorted(set(row.values("reach")))) or "–",
                f"{training_flops_per_token(model) / 1e6:,.2f}", figure_of(row.values("us_per_token"), 1),
                figure_of(row.values("peak_gib"), 2), figure_of(row.values("test", "bits_per_byte")),
            ])  # fmt: skip
        return markdown(heading, lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare time and bits at equal range, then at equal cost."""
        txl, *others = rows
        ours, longer = others[: len(RATES)], others[len(RATES) :]
        pairs = [*zip(ours, longer, strict=True), *((row, txl) for row in ours)]
        units = {"us_per_token": ("µs per token of a training step", 1), "test": ("bits per byte", 4)}
        found = []
        for key, unit in units.items():
            path = (key,) if key == "us_per_token" else (key, "bits_per_byte")
            for first, second in pairs:
                rest = [row.values(*path) for row in rows if row is not first and row is not second]
                compared = Comparison.of(first.values(*path), second.values(*path), *rest)
                found.append(compared.sentence(first.row.title, second.row.title, *unit))
        return found

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot influence over distance with the formula's range, and time and bits over range."""
        fig = figure(14, 4.2)
        left, middle, right = fig.subplots(1, 3, width_ratios=(1.5, 1, 1))
        for row, colour in zip(rows, PALETTE, strict=False):
            if not row.runs:
                continue
            span = transformer(row.row.config.model).temporal_range
            curves = row.values("influence")
            changes = [statistics.mean(one["change"] for one in points) for points in zip(*curves, strict=True)]
            shown = [(one["distance"], change) for one, change in zip(curves[0], changes, strict=True) if change > 0]
            style = "o-" if any(transformer(row.row.config.model).compressed_sizes) else "s--"
            left.plot(*zip(*shown, strict=True), style, markersize=3, linewidth=1.2, color=colour, label=row.row.title)
            left.axvline(span, color=colour, linewidth=1, linestyle=":")
            for axes, path in ((middle, ("us_per_token",)), (right, ("test", "bits_per_byte"))):
                values = row.values(*path)
                axes.plot([span] * len(values), values, style[0], markersize=5, color=colour)
        left.set_xscale("log")
        left.set_yscale("log")
        left.xaxis.set_major_formatter("{x:,.0f}")
        left.legend(fontsize=7.5, frameon=False, loc="lower left")
        tidy(left, "Influence of a token; dotted: the formula", "tokens back", "change of a probability")
        for axes, title, label in (
            (middle, "Time, every seed", "µs per token of a training step"),
            (right, "Test, every seed", "bits per byte"),
        ):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            tidy(axes, title, "temporal range, tokens", label)
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)
