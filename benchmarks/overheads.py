"""What checkpoints, guards and logging cost in training, as shares of its time.

    python benchmarks/overheads.py --preset quickstart --results benchmarks/results/overheads/DATE-cpu.json
    python benchmarks/overheads.py --preset enwik8-base --results benchmarks/results/overheads/DATE-h200.json

The steps are those of the training loop, on random tokens. Three kinds of runs of `--steps` steps alternate, so that
slow moments of the machine affect all: without guards, with one checkpoint, and with guards (memory restored after a
bad step, losses read back to the host and checked). The cost of a checkpoint is its copy plus its background write; its
share is relative to the time between two checkpoints. The cost of guards is meaningful only where it exceeds the
spread of runs of the same kind, which is printed as `step_time_spread`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from compressive.bench import median_seconds
from compressive.config import ModelConfig, RunConfig
from compressive.distributed import World
from compressive.model.language_model import CompressiveLM
from compressive.model.memory import Memory
from compressive.runs import checkpoint
from compressive.runtime import describe_environment, pick_device, synchronise
from compressive.training.loop import AsyncReadback, StepStats
from compressive.training.recorder import Recorder
from compressive.training.step import Step, StepRecord, Windows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--steps", type=int, default=60, help="steps per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    parser.add_argument("--json", type=Path, dest="results", help=argparse.SUPPRESS)  # its old name
    options = parser.parse_args()
    config = RunConfig.from_preset(options.preset)
    world = World(device=pick_device("auto"))
    with tempfile.TemporaryDirectory() as folder:
        costs = measure(config, world, Path(folder), options.steps, options.rounds)
    found: dict[str, Any] = {"preset": options.preset, "device": describe(world.device), **costs}
    for name, value in found.items():
        print(f"{name:<42} {value:.5g}" if isinstance(value, float) else f"{name:<42} {value}")
    if options.results:
        environment = describe_environment()
        about = {
            "what": "cost of checkpoints, guards and logging in training",
            "command": " ".join(["python", *sys.argv]),
        }
        about |= {name: environment[name] for name in ("commit", "time")}
        hardware = {name: environment[name] for name in ("gpu", "cpu_cores", "torch", "python")}
        options.results.write_text(json.dumps(about | {"hardware": hardware} | found, indent=1) + "\n")


def describe(device: torch.device) -> str:
    """Return the device's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def measure(config: RunConfig, world: World, folder: Path, steps: int, rounds: int) -> dict[str, float]:
    """Time training steps with and without a checkpoint, and with and without guards."""
    device, options, window = world.device, config.train, config.model.window
    tokens = torch.randint(config.model.vocab_size, (1, options.batch, window), device=device)
    windows = Windows(tokens, tokens, None)

    def build() -> Step:
        assert isinstance(config.model, ModelConfig)
        model = CompressiveLM(config.model).to(device).train()
        return Step(model, options, world, options.batch)

    guarded, plain_step = build(), build()
    plain_step.keep = keep_always
    readback, stats = AsyncReadback(device), StepStats(config, world, 0)

    def report(record: StepRecord) -> None:
        stats.add(1, readback.exchange(torch.stack(record)))

    def stretch(step_fn: Step, save: bool = False) -> tuple[float, float]:
        """Return the seconds of `steps` steps, and those of a checkpoint's copy."""
        synchronise(device)
        began, copying = time.perf_counter(), 0.0
        for i in range(steps):
            record = step_fn(windows, 0)
            if step_fn is guarded:
                report(record)
            if save and i == 0:
                synchronise(device)
                before = time.perf_counter()
                saver.save(i, step_fn.state(), {})
                copying = time.perf_counter() - before
        synchronise(device)
        return time.perf_counter() - began, copying

    for _ in range(10):
        report(guarded(windows, 0))
        plain_step(windows, 0)
    plain, saving, copying, writing, guarding = [], [], [], [], []
    with checkpoint.Saver(folder / "checkpoints", world) as saver:
        stretch(plain_step, save=True)  # the first checkpoint allocates host buffers
        for _ in range(rounds):
            saver.wait()
            plain.append(stretch(plain_step)[0])
            guarding.append(stretch(guarded)[0])
            plain.append(stretch(plain_step)[0])
            took, copied = stretch(plain_step, save=True)
            before = time.perf_counter()
            saver.wait()
            writing.append(time.perf_counter() - before)
            saving.append(took)
            copying.append(copied)
    per_step = statistics.median(plain) / steps
    added = statistics.median(saving) - statistics.median(plain)
    guards = (statistics.median(guarding) - statistics.median(plain)) / steps
    interval, line = options.checkpoint_every * per_step, time_logging(config, world, folder)
    return {
        "seconds_per_step": per_step,
        "step_time_spread": (max(plain) - min(plain)) / statistics.median(plain),
        "checkpoint_seconds": added,
        "checkpoint_copy_seconds": statistics.median(copying),
        "checkpoint_write_seconds_after_run": statistics.median(writing),
        "checkpoint_interval_seconds": interval,
        "checkpoint_share": added / interval,
        "metrics_line_seconds": line,
        "guard_seconds_per_step": guards,
        "guard_and_logging_share": (guards + line / options.log_every) / per_step,
    }


def keep_always(parts: list[Memory], finite: torch.Tensor, before: Memory) -> Memory:
    """Carry memory as a step without guards would. On a GPU it is copied in place, as CUDA graphs need."""
    (memory,) = parts  # one micro-batch
    if finite.device.type == "cpu":
        return memory
    before.copy_(memory)
    return before


def time_logging(config: RunConfig, world: World, folder: Path) -> float:
    """Return the seconds that one line of metrics takes, on the screen and in the file."""
    with Recorder(folder, config, 0, 0.0, "bpc") as recorder:
        recorder.console.file = (folder / "screen").open("w")
        stats = StepStats(config, world, 0)
        stats.records = [StepRecord(*[1.0] * len(StepRecord._fields))] * config.train.log_every
        return median_seconds(lambda: recorder.train(1, stats.summary(1, 1e-4, 1)), world.device, repeats=50)


if __name__ == "__main__":
    main()
