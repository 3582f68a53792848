"""Export a run's model as one folder.

compressive export runs/enwik8 --out release/enwik8
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from compressive.cli import run as run_command


@dataclass(frozen=True)
class Export:
    """What to write, and where."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    out: Path
    """Folder to create, for weights as safetensors, configuration and tokeniser; transformers loads it, too."""
    which: Literal["best", "last"] = "best"
    """Checkpoint to load: the one with the lowest validation loss, or the last."""
    onnx: bool = False
    """Also write model.onnx: one window, with both memories in and out. Needs `pip install -e '.[onnx]'`."""
    data_dir: Path | None = None
    """Folder of prepared corpora, if not the one used in training: runs of version 0.1 have their tokeniser there."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and export."""
    description = "Export a run's model as one folder, which evaluate, generate and analyze take instead of a run."
    return run_command(export, Export, arguments, prog, description)


def export(options: Export) -> int:
    """Write the folder and print its size."""
    from compressive.runs import export as release
    from compressive.runs.run import Run

    folder = release.export(Run.open(options.run), options.out, options.which, options.data_dir, options.onnx)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:,.1f} MB; try: compressive generate {folder}")
    return 0
