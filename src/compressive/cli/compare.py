"""Compare runs.

compressive compare runs/enwik8-base runs/enwik8-base-txl
compressive compare runs/ours-seed* runs/txl-seed* --plot comparison.svg
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from compressive.cli import run


@dataclass(frozen=True)
class Compare:
    """Compare runs."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN")]
    """Folders of the runs, at least two, all of text, of speech or of agents."""
    plot: Path | None = None
    """File for the curves, PNG or SVG; compare.png in this folder if not given."""
    json: bool = False
    """Print JSON instead of tables."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and compare."""
    description = (
        "Compare runs: what differs in their configurations, scores, speed, number of parameters, and curves in one "
        "figure. Runs that differ only in their seed are one recipe, shown as mean and range."
    )
    return run(compare, Compare, arguments, prog, description)


def compare(options: Compare) -> int:
    """Print the tables and plot; a plot that is not possible costs a warning unless it was asked for."""
    import json

    from rich.console import Console

    from compressive.analysis.compare import Comparison
    from compressive.analysis.overview import Overview
    from compressive.console import note, warn
    from compressive.plotting import PlotError, check_format

    path = options.plot or Path("compare.png")
    check_format(path)
    found = Comparison.of([Overview.read(folder) for folder in options.runs])
    if options.json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        Console(width=None if Console().is_terminal else 160).print(found.table())
        print(found.claim)
    for text in found.notes:
        note(f"note: {text}")
    try:
        found.plot(path)
    except (PlotError, OSError) as error:
        warn(f"no plot: {error}")
        return 0 if options.plot is None else 2
    note(f"written to {path}")
    return 0
