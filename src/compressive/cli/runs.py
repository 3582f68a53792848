"""List runs.

compressive runs
compressive runs experiments/runs --json
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from compressive.cli import run

if TYPE_CHECKING:
    from rich.table import Table

    from compressive.analysis.overview import Overview

STYLES = {"training": "yellow", "finished": "green", "interrupted": "cyan", "failed": "red", "release": "dim"}


@dataclass(frozen=True)
class Runs:
    """List runs."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Folder that holds runs, at any depth."""
    json: bool = False
    """Print JSON instead of a table."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and list."""
    description = (
        "List the runs below a folder, newest first: models of text and speech, agents, releases. State: training (a "
        "file was written not long ago), finished, interrupted (its last step is saved: --resume), failed (stopped "
        "without saving, or before its first step)."
    )
    return run(show, Runs, arguments, prog, description)


def show(options: Runs) -> int:
    """Print all runs; name the folders that cannot be read."""
    import json

    from rich.console import Console

    from compressive.analysis.overview import find_runs
    from compressive.console import warn

    with warnings.catch_warnings():  # of configurations that are there already, and need not be this user's
        warnings.simplefilter("ignore", UserWarning)
        runs, broken = find_runs(options.folder)
    if options.json:
        found = {"runs": [each.as_dict() for each in runs], "broken": [each.as_dict() for each in broken]}
        print(json.dumps(found, indent=1))
        return 0
    if runs:
        Console(width=None if Console().is_terminal else 160).print(_table(runs, options.folder))
    else:
        print(f"no runs in {options.folder}; train one: compressive train quickstart")
    for each in broken:
        warn(f"{each.folder} is broken: {each.reason}")
    return 0


def _table(runs: list["Overview"], folder: Path) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    from compressive.analysis.overview import SPEEDS

    table = Table(
        title=f"{len(runs)} run{'s' * (len(runs) > 1)} in {escape(str(folder))}", title_justify="left", box=None
    )
    for name in ("run", "preset", "corpus", "steps", "best score", "speed", "state", "started"):
        right = name in ("steps", "best score", "speed")
        table.add_column(name, justify="right" if right else "left", overflow="fold", header_style="bold")
    for each in runs:
        table.add_row(
            "." if each.folder == folder else escape(str(each.folder.relative_to(folder))),
            escape(each.preset or "–"),
            escape(each.corpus),
            f"{each.steps:,}/{each.config.train.steps:,}",
            "–" if each.best is None else f"{each.best:.3f} {each.metric.name}",
            "–" if each.speed is None else f"{each.speed:,.0f} {SPEEDS[each.kind]}",
            f"[{STYLES[each.state]}]{each.state}[/]",
            (each.started or "–").replace("T", " ").removesuffix("Z")[:16],
        )
    return table
