"""How fast our models train and generate on this machine, and which kernels they run.

compressive bench
compressive bench enwik8-base pg19 --batch 8 16 32 --precision bf16 --compile --out bench.json
compressive bench --explain enwik8-base

How cost grows with memory and window is measured by benchmarks/growth.py, other people's models by benchmarks/peers.py.
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from compressive.cli import run as run_command
from compressive.config import Attention, Precision, RunConfig, preset_names


@dataclass(frozen=True)
class Bench:
    """What to measure, and how."""

    presets: Positional[tuple[str, ...]] = ("quickstart",)
    """Presets whose models to measure."""
    batch: tuple[int, ...] = ()
    """Batch sizes in training, a row for each; the preset's where none is given."""
    steps: int = 20
    """Steps of training to time, after a few to warm up."""
    precision: Precision | None = None
    """Arithmetic of the matrix products, if not the preset's; without an NVIDIA GPU, if not fp32."""
    compile: bool = False
    """Compile the model for training, even if the preset does not; without an NVIDIA GPU, only if this is given."""
    recompute: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again."""
    attention: Attention | None = None
    """Form of attention, if not the preset's: auto, reference or fused."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one."""
    json: bool = False
    """Print the figures as JSON in place of the table."""
    out: Path | None = None
    """JSON file to write the figures to, with command, commit and hardware."""
    explain: str | None = None
    """Do not measure: say for this preset which operations run as kernels on a GPU in bf16, and why others do not.
    With --json, as JSON."""


@dataclass(frozen=True)
class Explain:
    """Which operations of a preset run as kernels."""

    explain: str
    """The preset."""
    json: bool = False
    """Print JSON."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words and measure, or explain."""
    if any(word.split("=")[0] == "--explain" for word in arguments) and not {"-h", "--help"} & set(arguments):
        return run_command(explain, Explain, arguments, prog, "Say which operations of a preset run as kernels.")
    words, arguments = arguments, with_out(arguments)
    about = "Measure training and generation on this machine: speed, memory, utilisation, and where the time goes."
    return run_command(lambda options: bench(options, [prog, *words]), Bench, arguments, prog, about)


def with_out(arguments: list[str]) -> list[str]:
    """Return the arguments with `--json FILE.json`, as version 0.1 had it, replaced by `--out FILE.json`."""
    words = list(arguments)
    for i, (word, value) in enumerate(zip(arguments, [*arguments[1:], ""], strict=False)):
        if word == "--json" and value.endswith(".json") and not value.startswith("-"):
            words[i] = "--out"
        elif word.startswith("--json="):
            words[i] = word.replace("--json", "--out", 1)
    return words


def explain(options: Explain) -> int:
    """Print for each operation of a CUDA run in bf16 whether a kernel or the reference form runs, and why."""
    import json

    from rich.console import Console
    from rich.table import Table

    from compressive.config import AgentRun
    from compressive.kernels import dispatch

    if options.explain in preset_names("task"):
        choices = dispatch.explain(AgentRun.from_preset(options.explain).memory, agent=True, triton=True)
    else:
        config = RunConfig.from_preset(options.explain)
        with dispatch.using(config.train.attention):
            choices = dispatch.explain(config.model, parallel=config.train.parallel, triton=True)
    if options.json:
        print(json.dumps({"operations": {name: choice._asdict() for name, choice in choices.items()}}, indent=1))
        return 0
    title = f"{options.explain} on a GPU in bf16"
    table = Table("operation", "form", "why", title=title, title_justify="left", box=None)
    for name, choice in choices.items():
        table.add_row(name, choice.form, choice.why)
    Console(width=None if Console().is_terminal else 140).print(table)
    return 0


def bench(options: Bench, command: list[str]) -> int:
    """Print the table; exit code 1 where a row could not be measured."""
    import json

    from compressive import bench
    from compressive.console import note
    from compressive.runtime import autocast, pick_device

    autocast(pick_device(options.device), options.precision or "fp32")  # refuse what the device does not have
    for name, value in (("steps", options.steps), *(("batch", batch) for batch in options.batch)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    for preset in options.presets:
        if preset in preset_names("task"):
            raise ValueError(
                f"preset={preset!r} is an agent's; measure it with: python benchmarks/rooms.py --preset {preset}"
            )
        RunConfig.from_preset(preset)
    shared = (options.steps, options.precision, options.compile, options.recompute, options.attention, options.device)
    works = [bench.Work(preset, batch, *shared) for preset in options.presets for batch in options.batch or (None,)]
    rows = bench.bench(works, lambda name: note(f"measuring {name}"))
    what = "our models in training and generation"
    if options.json:
        print(json.dumps(bench.results(what, " ".join(command), rows), indent=1))
    else:
        bench.print_table(rows, "training, milliseconds of a step and its parts, and generation")
    if options.out is not None:
        bench.write_results(options.out, what, " ".join(command), rows)
    return int(any("error" in row for row in rows))
