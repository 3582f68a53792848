"""How time per token of a training step, and memory, grow with the compressed memory and with the window.

    python benchmarks/growth.py --size base --results benchmarks/results/growth/DATE-h200.json --plot docs/growth.png
    python benchmarks/growth.py --size tiny --results growth.json --plot growth.png     # a minute or two on a CPU
    python benchmarks/growth.py --plot-only benchmarks/results/growth/DATE-cpu.json --plot docs/growth.png

The paper gives attention a cost of O(n_s² + n_s (n_m + n_cm)) per window, which is a + b (n_s + n_m + n_cm) per token.
A line of that form is fitted to each sweep; the figure shows the measured points beside it. One sweep enlarges the
compressed memory and changes nothing else. The other enlarges the window and both memories together and lowers the
batch size, so that each step reads the same number of tokens. The slopes differ: slots are also projected to keys and
values once per window, which the formula leaves out and which a longer window divides among more tokens.

Random tokens, no compilation, bf16 on a GPU and fp32 on a CPU. On a CPU each point runs in its own process, because
memory is that of the process. A point that fails holds its error message. On a shared machine use --rounds: all points
are measured in rotation, and the fastest round of each is kept.
"""

import argparse
import dataclasses
import gc
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressive import bench
from compressive.bench import Row
from compressive.config import Attention, ModelConfig, Precision, RunConfig, TrainConfig
from compressive.console import note
from compressive.kernels import dispatch
from compressive.runtime import pick_device


@dataclass(frozen=True)
class Size:
    """A model, the number of tokens per step, and the values of both sweeps."""

    model: ModelConfig
    tokens: int
    compressed: tuple[int, ...]
    windows: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """One configuration to measure."""

    attention: Attention
    window: int
    compressed: int


SIZES = {
    "tiny": Size(
        ModelConfig(n_layers=2, d_model=128, n_heads=4, d_ff=512, window=64, memory_size=64),
        tokens=512, compressed=(0, 64, 128, 256, 512, 1024), windows=(32, 64, 128, 256, 512),
    ),
    "base": Size(
        ModelConfig(),
        tokens=4096, compressed=(0, 256, 512, 1024, 2048, 4096, 8192), windows=(128, 256, 512, 1024, 2048),
    ),
}  # fmt: skip
COLOURS = {"reference": "#2f6690", "fused": "#c8553d"}
FIGURES = {"us_per_token": "µs per token of a training step", "peak_gib": "peak memory, GiB"}
"""Keys of a row, and what a figure calls them."""
RENAMED = {"readable": "reference", "µs per token": "us_per_token", "peak GiB": "peak_gib"}
"""Forms of attention and figures in results files written before 2026-11-18."""


def main() -> None:
    """Measure, print, write and plot; with --child, measure one point; with --plot-only, plot only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base" if torch.cuda.is_available() else "tiny")
    parser.add_argument(
        "--compressed", type=numbers, help="compressed sizes, separated by commas (default: the size's own)"
    )
    parser.add_argument("--windows", type=numbers, help="windows, separated by commas (default: the size's own)")
    parser.add_argument("--steps", type=int, default=8, help="training steps that are timed (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each point is measured (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    parser.add_argument("--json", type=Path, dest="results", help=argparse.SUPPRESS)  # its old name
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--plot-only", type=Path, metavar="RESULTS", help="plot this results file; measure nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot_only is not None:
        if options.plot is None:
            parser.error("--plot-only needs --plot")
        plot_results(json.loads(options.plot_only.read_text("utf-8")), options.plot)
        return
    if options.child is not None:
        print(json.dumps(measure(Point(**json.loads(options.child)), SIZES[options.size], options.steps)))
        return
    size = SIZES[options.size]
    sweeps = sweeps_of(
        size.model.window,
        size.compressed if options.compressed is None else options.compressed,
        size.windows if options.windows is None else options.windows,
    )

    def run(point: Point) -> Row:
        if torch.cuda.is_available():
            return measured_here(point, size, options.steps)
        words = ["--size", options.size, "--steps", str(options.steps)]
        return bench.in_own_process([__file__, *words, "--child", json.dumps(dataclasses.asdict(point))])

    rows = measured(sweeps, size, options.rounds, run)
    fits = [fit(rows, sweep, attention, key) for sweep in sweeps for attention in backends() for key in FIGURES]
    bench.print_table(list({row["name"]: row for row in rows}.values()), f"one training step, {options.size}")
    for line in fits:
        print(describe(line))
    if options.results:
        what = f"how the cost of a training step grows, {options.size}; on a CPU memory is that of the process"
        bench.write_results(options.results, what, " ".join(["python", *sys.argv]), rows, fits=fits)
    if options.plot:
        plot(rows, fits, options.size, options.plot, on_gpu=torch.cuda.is_available())


def numbers(text: str) -> tuple[int, ...]:
    """Parse integers separated by commas."""
    return tuple(int(word) for word in text.split(",") if word)


def backends() -> tuple[Attention, ...]:
    """Return the forms of attention that run on this machine."""
    fused = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    return ("reference", "fused") if fused else ("reference",)


def sweeps_of(window: int, compressed: tuple[int, ...], windows: tuple[int, ...]) -> dict[str, list[Point]]:
    """Return the points of both sweeps, for each form of attention."""
    return {
        "compressed size": [Point(backend, window, size) for backend in backends() for size in compressed],
        "window": [Point(backend, size, size) for backend in backends() for size in windows],
    }


def measured(sweeps: dict[str, list[Point]], size: Size, rounds: int, run: Callable[[Point], Row]) -> list[Row]:
    """Return one row per point of each sweep; a point of both sweeps is measured once."""
    found: dict[Point, list[Row]] = {point: [] for points in sweeps.values() for point in points}
    for _ in range(rounds):
        for point, rows in found.items():
            note(f"measuring {name_of(point)}")
            rows.append(run(point))
    return [
        {"name": name_of(point), "sweep": sweep, **dataclasses.asdict(point), "memory": recent(point, size)}
        | {"batch": size.tokens // point.window}
        | fastest(found[point])
        for sweep, points in sweeps.items()
        for point in points
    ]


def name_of(point: Point) -> str:
    """Return the name of a point's row."""
    return f"{point.attention}, window {point.window}, compressed {point.compressed}"


def fastest(rounds: list[Row]) -> Row:
    """Return the round with the shortest steps, or the first error."""
    return next((row for row in rounds if "error" in row), None) or min(rounds, key=lambda row: row["step_ms"])


def recent(point: Point, size: Size) -> int:
    """Return the size of the recent memory: the window's, or the model's own at the model's own window."""
    memory = size.model.memory_size
    assert isinstance(memory, int)
    return memory if point.window == size.model.window else point.window


def measured_here(point: Point, size: Size, steps: int) -> Row:
    """Measure one point in this process and free its memory; an exception becomes an error row."""
    try:
        return measure(point, size, steps)
    except Exception as error:  # an error is a result too
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure(point: Point, size: Size, steps: int) -> Row:
    """Measure one point in this process."""
    device = pick_device("auto")
    model = dataclasses.replace(
        size.model, window=point.window, memory_size=recent(point, size), compressed_size=point.compressed
    )
    precision: Precision = "bf16" if device.type == "cuda" else "fp32"
    train = TrainConfig(batch=size.tokens // point.window, precision=precision, attention=point.attention)
    config = RunConfig(model=model, train=train)
    with dispatch.using(point.attention):
        row = bench.measure(bench.ours(config, device), config, device, steps, sampled=0)
    return row | {"us_per_token": 1e6 / row["tokens_per_second"]}


def fit(rows: list[Row], sweep: str, attention: str, key: str) -> Row:
    """Fit a + b (n_s + n_m + n_cm) to a sweep by least squares.

    Points without compressed memory are left out: they run no compression, so their constant a is another one.
    """
    found: Row = {"sweep": sweep, "attention": attention, "figure": key}
    chosen = [row for row in rows if (row["sweep"], row["attention"]) == (sweep, attention)]
    chosen = [row for row in chosen if key in row and row["compressed"] > 0]
    slots, values = (np.array(column, float) for column in ([attended(r) for r in chosen], [r[key] for r in chosen]))
    if len(set(slots)) < 2:
        return found | {"error": f"{len(chosen)} points measured, a line needs two"}
    slope, constant = np.polyfit(slots, values, 1)
    off = np.abs(values / (constant + slope * slots) - 1).max()
    return found | {
        "constant": float(constant),
        "per_1000_slots": float(1000 * slope),
        "max_relative_deviation": float(off),
    }


def attended(row: Row) -> int:
    """Return the number of slots that a token attends to, n_s + n_m + n_cm."""
    return int(row["window"] + row["memory"] + row["compressed"])


def describe(line: Row) -> str:
    """Return a fitted line as text."""
    name = f"{line['attention']}, by {line['sweep']}, {FIGURES[line['figure']]}: "
    if "error" in line:
        return f"{name}{line['error']}"
    formula = f"{line['constant']:.3g} + {line['per_1000_slots']:.3g} per 1,000 slots"
    return f"{name}{formula}; no point further off than {line['max_relative_deviation']:.0%}"


def plot_results(results: dict[str, Any], to: Path) -> None:
    """Plot a results file that this script has written."""
    found = re.search(r"grows, (\w+)", results["what"])
    if found is None:
        raise SystemExit("not a results file of this script")
    rows, fits = (
        [
            row | {name: RENAMED.get(row[name], row[name]) for name in ("attention", "figure") if name in row}
            for row in table
        ]
        for table in (results["rows"], results["fits"])
    )
    plot(rows, fits, found[1], to, on_gpu=results["hardware"]["gpu"] is not None)


def plot(rows: list[Row], fits: list[Row], size: str, to: Path, on_gpu: bool) -> None:
    """Plot points and fitted lines: one column per sweep, one row per figure."""
    from compressive import plotting as plots

    fig = plots.figure(10, 7)
    sweeps = list(dict.fromkeys(row["sweep"] for row in rows))
    for across, (key, label) in zip(
        fig.subplots(len(FIGURES), len(sweeps), squeeze=False), FIGURES.items(), strict=True
    ):
        for axes, sweep in zip(across, sweeps, strict=True):
            for line in fits:
                if (line["sweep"], line["figure"]) == (sweep, key):
                    plot_line(
                        axes, [r for r in rows if (r["sweep"], r["attention"]) == (sweep, line["attention"])], line
                    )
            axes.set_ylim(bottom=0)
            if len({row["attention"] for row in rows}) > 1:
                axes.legend(frameon=False, fontsize=8.5, loc="upper left", labelcolor=plots.INK)
            others = "all else fixed" if sweep == "compressed size" else "both memories as large, tokens per step fixed"
            of_process = ", whole process" if key == "peak_gib" and not on_gpu else ""
            plots.tidy(axes, f"{label}{of_process}", f"{sweep} ({others})")
    off = max((line["max_relative_deviation"] for line in fits if "max_relative_deviation" in line), default=None)
    straight = "" if off is None else f": points lie within {off:.0%} of straight lines"
    plots.headline(fig, f"Cost grows with the slots attended to, size {size!r}{straight}", caption(rows))
    plots.save(fig, to)


def plot_line(axes: Any, sweep: list[Row], line: Row) -> None:
    """Plot the points and the line of one form of attention.

    Points without compressed memory are hollow; points that failed are crosses on the axis.
    """
    key, colour = line["figure"], COLOURS[line["attention"]]
    label = f"{line['attention']} attention"
    by = "compressed" if line["sweep"] == "compressed size" else "window"
    for row in sweep:
        if key in row:
            fill = colour if row["compressed"] else "white"
            axes.plot(row[by], row[key], "o", color=colour, markerfacecolor=fill, markersize=5, zorder=3)
        else:
            axes.plot(row[by], 0, "x", color=colour, clip_on=False, zorder=3)
    if "error" in line:
        axes.plot([], [], "o", color=colour, label=label)
        return
    ends = sorted((row for row in sweep if key in row), key=attended)
    heights = [line["constant"] + line["per_1000_slots"] * attended(row) / 1000 for row in ends]
    axes.plot([row[by] for row in ends], heights, color=colour, linewidth=1.2, alpha=0.7, label=label)


def caption(rows: list[Row]) -> str:
    """Return the text below the figure: what is shown, what was fitted, what failed."""
    lines = [
        "Points: measured. Lines: a + b (n_s + n_m + n_cm), which is the paper's n_s² + n_s (n_m + n_cm) per token;",
        "a and b are fitted by least squares to the filled points. a is the cost that does not depend on memory sizes.",
    ]
    if any(row["compressed"] == 0 for row in rows):
        lines.append("Hollow points have no compressed memory and run no compression; they are not part of the fit.")
    if failed := {row["name"]: row["error"] for row in rows if "error" in row}:
        lines += ["Crosses failed:", *(f"{name}: {error[:90]}" for name, error in failed.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
