"""Write a run's model as one folder, to hand on.

compressive export runs/enwik8 --out release/enwik8
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from compressive.cli import run as run_command


@dataclass(frozen=True)
class Export:
    """What to write, and where."""

    run: Positional[Path]
    """Folder of the run."""
    out: Path
    """Folder to write, which must not exist yet: safetensors, configuration and tokeniser."""
    which: Literal["best", "last"] = "best"
    """Which checkpoint."""
    data_dir: Path | None = None
    """Folder that holds the run's corpus, if it has moved since training."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words and export."""
    return run_command(export, Export, arguments, prog, "Write a run's model as one folder, to hand on.")


def export(options: Export) -> int:
    """Write the folder."""
    from compressive.runs import export as release
    from compressive.runs.run import Run

    folder = release.export(Run.open(options.run), options.out, options.which, options.data_dir)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:,.1f} MB; try: compressive generate {folder}")
    return 0
