"""See what a run's memory, attention and compression do.

compressive analyze runs/enwik8 memory
compressive analyze runs/enwik8 report
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from compressive.cli import run as run_command

if TYPE_CHECKING:
    from compressive.evaluation.score import Progress
    from compressive.runs.run import Run


@dataclass
class Analyze:
    """What to look at."""

    run: Positional[Path]
    """Folder of the run."""
    what: Positional[Literal["memory", "attention", "layers", "report"]]
    """memory: does it help? attention: where does the model look? layers: which compress well? report: all of it."""
    split: Literal["train", "valid", "test"] = "valid"
    """Text to read."""
    tokens: int = 200_000
    """About how many tokens to measure on, once memories are full."""
    lanes: int = 16
    """Stretches of the text to read side by side; fewer where it is short."""
    test_tokens: int = 1_000_000
    """How much of the test split the report scores; 0 for all."""
    which: Literal["best", "last"] = "best"
    """Which checkpoint."""
    memory_size: int | None = None
    """Slots of recent memory, if other than in training; not for the report."""
    compressed_size: int | None = None
    """Slots of compressed memory, if other than in training; not for the report."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one."""
    json: bool = False
    """Print JSON in place of a table."""
    out: Path | None = None
    """Folder for figures and numbers; RUN/analysis if not given, and for the report RUN itself."""
    data_dir: Path | None = None
    """Folder that holds the run's corpus, if it has moved since training."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words and analyse."""
    return run_command(analyze, Analyze, arguments, prog, "See what a run's memory, attention and compression do.")


def analyze(options: Analyze) -> int:
    """Measure, print, and write the figure."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from compressive.runs.run import Run

    run = Run.open(options.run)
    if run.tokenizer(options.data_dir).of_sound:
        raise ValueError(
            f"{run.folder} was trained on sound, whose clips these analyses would read as one; use evaluate"
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
        lanes=options.lanes,
        test_tokens=options.test_tokens or None,
        progress=progress,
    )
    path = (options.out or run.folder) / "report.html"
    write_report(run, found, path)
    print(f"{summary(found)}\n{path}")
    return 0


def _measure(options: Analyze, run: "Run", progress: "Progress") -> int:
    """One of the three analyses; what was measured is kept even where nothing can be drawn."""
    import dataclasses
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
    config = transformer(trained.setting(options.memory_size, options.compressed_size).config)
    model = trained.model(measurable(config), pick_device(options.device))
    text = run.corpus(options.data_dir).split(options.split)
    found = measures[options.what](model, text, tokens=options.tokens, lanes=options.lanes, progress=progress)

    folder = options.out or run.folder / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    about = {"split": options.split, "step": trained.step}
    numbers = json.dumps(about | dataclasses.asdict(found), indent=1)
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
