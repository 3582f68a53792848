"""Export a run's model, or an agent, as one folder.

compressive export runs/enwik8 --out release/enwik8
compressive export runs/rooms --out release/rooms
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
    """Folder of the run or release, or the name of a shipped model."""
    out: Path
    """Folder to create, for weights as safetensors, configuration and tokeniser; transformers loads it, too."""
    which: Literal["best", "last"] = "best"
    """Checkpoint to load: the one with the lowest validation loss, or the last; agents have the last only."""
    precision: Literal["fp32", "bf16", "int8"] = "fp32"
    """Precision of the weights: fp32, bf16 in half the size, or int8 in a quarter, which transformers cannot load. They
    are loaded as fp32 in any case."""
    shard_size: int = 0
    """Largest size of a file of weights, in MiB; larger weights are split into several. 0 for one file."""
    onnx: bool = False
    """Also write model.onnx: one window, with both memories in and out. Needs `pip install 'compressive[onnx]'`."""
    data_dir: Path | None = None
    """Folder of prepared corpora, if not the one used in training: runs of version 0.1 have their tokeniser there."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and export."""
    description = (
        "Export a run's model as one folder, which evaluate, generate and analyze take instead of a run; an agent's, "
        "which rl evaluate and rl watch take."
    )
    return run_command(export, Export, arguments, prog, description)


def export(options: Export) -> int:
    """Write the folder and print its size."""
    from compressive.runs.run import Run, read_config
    from compressive.runs.shipped import shipped

    if "task" in read_config(shipped(options.run), "compressive train"):
        folder, then = _export_agent(options), "rl evaluate"
    else:
        from compressive.runs import export as release

        run = Run.open(options.run)
        words = (options.which, options.data_dir, options.onnx, options.precision, options.shard_size)
        folder, then = release.export(run, options.out, *words), "generate"
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:,.1f} MB; try: compressive {then} {folder}")
    return 0


def _export_agent(options: Export) -> Path:
    from compressive.config.checks import require
    from compressive.rl import release
    from compressive.rl.run import AgentFolder

    require(not options.onnx, "onnx", options.onnx, "a model of text or audio; agents have no ONNX form")
    require(options.precision == "fp32", "precision", options.precision, "fp32 for agents, which are small")
    require(options.shard_size == 0, "shard_size", options.shard_size, "0 for agents, which are small")
    return release.export(AgentFolder.open(options.run), options.out)
