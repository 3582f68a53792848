"""Run the paper's tables and figures as experiments.

compressive experiment                                     # lists them, with what each costs at each scale
compressive experiment enwik8 --scale tiny                 # on a CPU, in minutes
compressive experiment enwik8 --scale small --dry-run      # the runs it would train
compressive experiment enwik8 attention layers --scale small --jobs 3 --minutes 9
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from compressive.cli import run as run_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compressive.experiments.experiment import Experiment
    from compressive.experiments.runner import Options


@dataclass(frozen=True)
class Run:
    """Run experiments, or list them."""

    names: Positional[tuple[str, ...]] = ()
    """Experiments; none: list them. Models that several of them need are trained once. `module:class` is one of your
    own, see compressive/experiments/experiment.py."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny: minutes on a CPU, on the books of this repository, speech on your recordings. small: minutes on one GPU.
    paper: the paper's models."""
    seeds: tuple[int, ...] = ()
    """Seeds of every model, such as 0 1 2; the experiment's own if none is given."""
    out: Path = Path("experiments/results")
    """Folder of results: NAME/SCALE.json, the table as .md and the picture as .png."""
    runs: Path = Path("runs/experiments")
    """Folder of trained models. What is there is not trained again, and what was measured is not measured again."""
    data_dir: Path = Path("data")
    """Folder of prepared corpora."""
    jobs: int = 1
    """Models that are trained at once, on the same device; 0: train nothing, write the tables of what was measured."""
    minutes: float | None = None
    """Stop after so many minutes: runs save their state, and the same command goes on. The exit code is then 75."""
    device: str = "auto"
    """Device, e.g. cpu or cuda:0; auto: a GPU if there is one."""
    dry_run: bool = False
    """Only list the runs, with parameters, tokens and estimated seconds."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and run."""
    about = "Train, measure and tabulate what the paper claims; resumable run by run."
    return run_command(lambda options: experiment(options, " ".join([prog, *arguments])), Run, arguments, prog, about)


def experiment(options: Run, command: str) -> int:
    """List experiments, list the runs of some, or run them."""
    from compressive.experiments import EXPERIMENTS, load, runner

    if not options.names:
        for name in EXPERIMENTS:
            _describe(load(name))
        return 0
    experiments = [load(name) for name in dict.fromkeys(options.names)]
    chosen = runner.Options(
        options.scale, options.out, options.runs, options.data_dir, options.seeds, options.jobs, options.minutes,
        options.device,
    )  # fmt: skip
    if options.dry_run:
        _list_runs(experiments, chosen)
        return 0
    return runner.run(experiments, chosen, command)


def _describe(experiment: "Experiment") -> None:
    from compressive.experiments.experiment import HARDWARE, SCALES
    from compressive.experiments.runner import Options, tasks

    print(f"{experiment.name}  ({experiment.source})\n    {experiment.claim}")
    for scale in SCALES:
        planned = tasks([experiment], Options(scale, runs=Path()))
        seconds = sum(task.row.cost(scale).seconds for task in planned)
        runs = f"{len(planned):>3} run{'s' * (len(planned) > 1)}"
        print(f"    {scale:<6} {runs}, about {_duration(seconds)} of training on {HARDWARE[scale].name}")
    print()


def _list_runs(experiments: "Sequence[Experiment]", options: "Options") -> None:
    from rich.console import Console
    from rich.table import Table

    from compressive.experiments.experiment import HARDWARE
    from compressive.experiments.runner import tasks

    table = Table("run", "for", "parameters", "compressors'", "steps", "tokens", "estimated", "state", box=None)
    total = 0.0
    for task in tasks(experiments, options):
        of = task.row.cost(options.scale)
        state = "measured" if not task.due else f"at step {task.step:,}" if task.step else "not begun"
        total += of.seconds if task.due else 0
        table.add_row(
            f"{task.row.name}-seed{task.seed}", ", ".join(experiment.name for experiment in task.experiments),
            f"{of.parameters:,}", f"{of.compressors:,}", f"{of.steps:,}", f"{of.tokens:,}", _duration(of.seconds),
            state,
        )  # fmt: skip
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    print(f"left: about {_duration(total)} of training on {HARDWARE[options.scale].name}, besides measuring")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:,.0f} min"
    return f"{minutes / 60:,.0f} h" if minutes < 48 * 60 else f"{minutes / 60 / 24:,.0f} days"
