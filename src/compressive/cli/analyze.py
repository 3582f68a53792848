"""Measure how a run uses its memory, attention and compression.

compressive analyze runs/enwik8 memory
compressive analyze runs/enwik8 report
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from compressive.cli import run as run_command

if TYPE_CHECKING:
    from compressive.evaluation.score import Progress
    from compressive.runs.run import Run


@dataclass
class Analyze:
    """What to measure."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run or release."""
    what: Positional[Literal["memory", "attention", "layers", "report"]]
    """memory: loss with memories hidden; attention: share per memory; layers: compression loss; report: all as HTML."""
    split: Literal["train", "valid", "test"] = "valid"
    """Split to read."""
    tokens: int = 200_000
    """Approximate number of tokens to measure on, once memories are full."""
    streams: int = 16
    """Streams to cut the text into, read in one batch; fewer if the text is short."""
    test_tokens: int = 1_000_000
    """Tokens of the test split that the report scores; 0 for all."""
    which: Literal["best", "last"] = "best"
    """Checkpoint to load: the one with the lowest validation loss, or the last."""
    memory_size: int | None = None
    """Slots of recent memory per layer, if other than in training; not for the report."""
    compressed_size: int | None = None
    """Slots of compressed memory per layer, if other than in training; not for the report."""
    device: str = "auto"
    """Device, e.g. cpu or cuda:0; auto: a GPU if there is one."""
    json: bool = False
    """Print JSON instead of a table."""
    out: Path | None = None
    """Folder for figures and JSON files, if not RUN/analysis, or RUN for the report."""
    data_dir: Path | None = None
    """Folder of prepared corpora, if not the one used in training."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and analyse."""
    description = "Measure how a run uses its memory, attention and compression."
    return run_command(analyze, Analyze, arguments, prog, description, renamed={"--lanes": "--streams"})


def analyze(options: Analyze) -> int:
    """Measure, print, and write the figure and the JSON file."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from compressive.runs.run import Run

    run = Run.open(options.run)
    if run.tokenizer(options.data_dir).is_audio:
        raise ValueError(
            f"{run.folder} was trained on audio: these analyses would read its clips as one text; use evaluate"
        )
    errors = Console(stderr=True)
    with Bar(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(options.what)
        act = _report if options.what == "report" else _measure
        return act(options, run, lambda done, total: bar.update(task, completed=done, total=total))


def _report(options: Analyze, run: "Run", progress: "Progress") -> int:
    from compressive.analysis.report import measure_run, summary, write_report
    from compressive.runtime import pick_device

    found = measure_run(
        run,
        data_dir=options.data_dir,
        device=pick_device(options.device),
        which=options.which,
        split=options.split,
        tokens=options.tokens,
        streams=options.streams,
        test_tokens=options.test_tokens or None,
        progress=progress,
    )
    path = (options.out or run.folder) / "report.html"
    write_report(run, found, path)
    print(f"{summary(found)}\n{path}")
    return 0


def _measure(options: Analyze, run: "Run", progress: "Progress") -> int:
    """Run one of the three analyses; the JSON file is written even if the figure cannot be plotted."""
    import json

    from rich.console import Console

    from compressive.analysis.attention import measure_attention
    from compressive.analysis.layers import measurable, measure_layers
    from compressive.analysis.memory import measure_memory
    from compressive.config import transformer
    from compressive.plotting import PlotError
    from compressive.runs.trained import Trained
    from compressive.runtime import pick_device

    measures: dict[str, Callable[..., Any]] = {
        "memory": measure_memory,
        "attention": measure_attention,
        "layers": measure_layers,
    }
    trained = Trained.load(run, options.which)
    config = transformer(trained.eval_config(options.memory_size, options.compressed_size).model)
    model = trained.model(measurable(config), pick_device(options.device))
    text = run.corpus(options.data_dir).split(options.split)
    found = measures[options.what](model, text, tokens=options.tokens, streams=options.streams, progress=progress)

    folder = options.out or run.folder / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    about = {"split": options.split, "step": trained.step}
    numbers = json.dumps(about | found.as_dict(), indent=1)
    (folder / f"{options.what}.json").write_text(numbers + "\n", "utf-8")
    if options.json:
        print(numbers)
    else:
        Console().print(found.table())
    try:
        found.plot(folder / f"{options.what}.png")
    except PlotError as error:
        print(f"no plot: {error}", file=sys.stderr)
    else:
        print(f"written to {folder / options.what}.json and .png", file=sys.stderr)
    return 0
