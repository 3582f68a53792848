"""How fast our models train and generate on this machine.

compressive bench
compressive bench enwik8-base pg19 --batch 8 16 32 --precision bf16 --compile --json bench.json

How cost grows with memory and window is measured by benchmarks/growth.py, other people's models by benchmarks/peers.py.
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from compressive.cli import run as run_command
from compressive.config import Precision, load_preset


@dataclass(frozen=True)
class Bench:
    """What to measure, and how."""

    presets: Positional[tuple[str, ...]] = ("quickstart",)
    """Presets whose models to measure."""
    batch: tuple[int, ...] = ()
    """Lanes in training: as many rows as numbers; as the preset has it where none is given."""
    steps: int = 20
    """Steps of training to time, after a few to warm up."""
    precision: Precision | None = None
    """Arithmetic of the matrix products, if not the preset's."""
    compile: bool = False
    """Compile the model for training, even if the preset does not."""
    recompute: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one."""
    json: Path | None = None
    """File to write the figures to."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words and measure."""
    about = "Measure training and generation on this machine: speed, memory, utilisation, and where the time goes."
    return run_command(lambda options: bench(options, [prog, *arguments]), Bench, arguments, prog, about)


def bench(options: Bench, command: list[str]) -> int:
    """Print the table; exit code 1 where a row could not be measured."""
    import sys

    from compressive import bench
    from compressive.runtime import pick_device

    pick_device(options.device)
    for name, value in (("steps", options.steps), *(("batch", batch) for batch in options.batch)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    for preset in options.presets:
        load_preset(preset)
    shared = (options.steps, options.precision, options.compile, options.recompute, options.device)
    works = [bench.Work(preset, batch, *shared) for preset in options.presets for batch in options.batch or (None,)]
    rows = bench.bench(works, lambda name: print(f"measuring {name}", file=sys.stderr))
    bench.print_table(rows, "training, milliseconds of a step and its parts, and generation")
    if options.json is not None:
        bench.write_results(options.json, "our models in training and generation", " ".join(command), rows)
    return int(any("error" in row for row in rows))
