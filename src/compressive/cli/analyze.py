"""Measure how a run uses its memory, attention and compression; report on a run of any kind.

compressive analyze runs/enwik8 memory
compressive analyze runs/enwik8 report
compressive analyze runs/rooms report --live
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro
from tyro.conf import Positional

from compressive.cli import run as run_command

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from compressive.evaluation.score import Progress
    from compressive.runs.run import Run

TOKENS, REPORT_TOKENS = 200_000, 50_000
"""Tokens to measure on unless asked otherwise: for one analysis, and for each of a report."""


@dataclass
class Analyze:
    """What to measure."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run or release, or the name of a shipped model; for the report also of an agent."""
    what: Positional[Literal["memory", "attention", "layers", "report"]]
    """memory: loss with memories hidden; attention: share per memory; layers: compression loss; report: one HTML page
    about a run on text or speech, or an agent."""
    split: Literal["train", "valid", "test"] = "valid"
    """Split to read."""
    tokens: int | None = None
    """Approximate number of tokens to measure on, once memories are full; 200,000, for the report 50,000."""
    streams: int = 16
    """Streams to cut the text into, read in one batch; fewer if the text is short."""
    test_tokens: int = 250_000
    """Tokens of the test split that the report scores; 0 for all. An evaluation of the whole split is used instead."""
    episodes: int = 128
    """Episodes that the report of an agent evaluates."""
    xz: bool = True
    """Compare with xz in the report of text. It reads the training text, once for each corpus."""
    live: bool = False
    """Write the report again and again while the run trains; the page reloads itself."""
    which: Literal["best", "last"] = "best"
    """Checkpoint to load: the one with the lowest validation loss, or the last."""
    memory_size: int | None = None
    """Slots of recent memory per layer, if other than in training; not for the report."""
    compressed_size: int | None = None
    """Slots of compressed memory per layer, if other than in training; not for the report."""
    device: str = "auto"
    """Device, e.g. cpu or cuda:0; auto: a GPU if there is one."""
    json: bool = False
    """Print one JSON object instead of a table."""
    out: Path | None = None
    """Folder to write to, if not RUN/analysis, or RUN for the report. Without it, nothing is written into a release."""
    data_dir: Path | None = None
    """Folder of prepared corpora, if not the one used in training."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and analyse."""
    description = "Measure how a run uses its memory, attention and compression, or write a report about it."
    return run_command(analyze, Analyze, arguments, prog, description, renamed={"--lanes": "--streams"})


class Analysis(NamedTuple):
    """What an analysis found, and how it is kept."""

    table: "RenderableType"
    numbers: str  # JSON
    write: Callable[[Path], str]  # into a folder; returns what was written


def analyze(options: Analyze) -> int:
    """Measure, print, and write into a folder; say so if that cannot be written."""
    from compressive.runtime import pick_device

    _check(options)
    if options.what == "report":
        return _report(options, pick_device(options.device))

    from rich.console import Console

    from compressive.console import progress_bar
    from compressive.runs.run import Run

    run = Run.open(options.run)
    device = pick_device(options.device)
    if run.tokenizer(options.data_dir).is_audio:
        raise ValueError(
            f"{run.folder} was trained on audio: these analyses would read its clips as one text; use evaluate, or "
            "analyze RUN report"
        )
    with progress_bar() as bar:
        task = bar.add_task(options.what)
        found = _measure(options, run, device, lambda done, total: bar.update(task, completed=done, total=total))
    if options.json:
        print(found.numbers)
    else:
        Console().print(found.table)
    return _keep(options, run.folder / "analysis", found.write)


def _keep(options: Analyze, folder: Path, write: Callable[[Path], str]) -> int:
    """Write results into a folder, or into that of --out; return the exit code."""
    from compressive.console import note, warn
    from compressive.runs.run import RELEASE
    from compressive.runs.shipped import shipped

    if options.out is None and (shipped(options.run) / RELEASE).is_file():
        note("nothing is written into a release: keep the results with --out FOLDER")
        return 0
    folder = options.out or folder
    try:
        note(f"written to {write(folder)}")
    except OSError as error:
        warn(f"{folder} cannot be written to ({error.strerror}): keep the results elsewhere with --out FOLDER")
        return 0 if options.out is None else 2  # the results are there, but not the files that were asked for
    return 0


def _check(options: Analyze) -> None:
    """Raise ValueError, before anything is loaded, for values that cannot work."""
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise ValueError(f"out={options.out} is a file: expected a folder")
    if options.what != "report":
        if options.live:
            raise ValueError(f"live=True with {options.what}: only the report is written again and again")
        return
    if options.test_tokens != 0 and options.test_tokens < 2:  # the first token is not predicted
        raise ValueError(f"test_tokens={options.test_tokens}: expected at least 2, or 0 to score the whole split")
    if options.episodes < 2:
        raise ValueError(f"episodes={options.episodes}: expected at least 2, for an interval")
    for name in ("memory_size", "compressed_size"):
        if (size := getattr(options, name)) is not None:
            raise ValueError(f"{name}={size}: the report is about the sizes in training; leave it out")


def _report(options: Analyze, device: "torch.device") -> int:
    """Write the report of a run of any kind, once or, with --live, until the run has stopped."""
    from compressive.analysis.report.live import follow, report
    from compressive.analysis.report.run import Request
    from compressive.console import progress_bar

    with progress_bar() as bar:
        task = bar.add_task("report")
        request = Request(
            data_dir=options.data_dir,
            device=device,
            which=options.which,
            split=options.split,
            tokens=REPORT_TOKENS if options.tokens is None else options.tokens,
            streams=options.streams,
            test_tokens=options.test_tokens or None,
            xz=options.xz,
            episodes=options.episodes,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        if options.live:
            found = follow(options.run, request, (options.out or options.run) / "report.html")
        else:
            found = report(options.run, request)
    print(found.json() if options.json else found.lines)

    def write(folder: Path) -> str:
        found.write(folder / "report.html")
        return f"{folder / 'report.html'} and .json"

    return _keep(options, options.run, write)


def _measure(options: Analyze, run: "Run", device: "torch.device", progress: "Progress") -> Analysis:
    """Run one of the three analyses; the JSON file is written even if the figure cannot be plotted."""
    import json

    from compressive.analysis.attention import measure_attention
    from compressive.analysis.layers import measurable, measure_layers
    from compressive.analysis.memory import measure_memory
    from compressive.config import transformer
    from compressive.console import warn
    from compressive.plotting import PlotError
    from compressive.runs.trained import Trained
    from compressive.runtime import write_atomically

    measures: dict[str, Callable[..., Any]] = {
        "memory": measure_memory,
        "attention": measure_attention,
        "layers": measure_layers,
    }
    trained = Trained.load(run, options.which)
    config = transformer(trained.eval_config(options.memory_size, options.compressed_size).model)
    model = trained.model(measurable(config), device)
    text = run.corpus(options.data_dir).split(options.split)
    tokens = TOKENS if options.tokens is None else options.tokens
    found = measures[options.what](model, text, tokens=tokens, streams=options.streams, progress=progress)
    about = {"split": options.split, "step": trained.step}
    numbers = json.dumps(about | found.as_dict(), indent=1)

    def write(folder: Path) -> str:
        path = folder / f"{options.what}.json"
        write_atomically(path, numbers + "\n")
        try:
            found.plot(path.with_suffix(".png"))
        except PlotError as error:
            warn(f"no plot: {error}")
            return str(path)
        return f"{path} and .png"

    return Analysis(found.table(), numbers, write)
