"""What saving, guards and logging cost in training, as shares of its time.

    python benchmarks/overheads.py --preset quickstart
    python benchmarks/overheads.py --preset enwik8-base --json overheads.json

The steps are those of the real loop on random tokens. Stretches of them as they are, with a checkpoint, and with the
guards take turns, so that a machine's moods fall on all. What a checkpoint adds, copying and the writing behind it, is
set against the time between two of them. Guards are also timed by themselves: on a CPU that is what they cost, on a GPU
more than that, as it is idle before and after. A stretch shows them only where stretches are alike.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from compressive.bench import median_seconds, wait
from compressive.config import RunConfig
from compressive.model.language_model import CompressiveLM
from compressive.model.memory import Memory
from compressive.parallel import World
from compressive.run import pick_device
from compressive.training import checkpoint, loop
from compressive.training.metrics import Recorder


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--steps", type=int, default=60, help="of one stretch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = RunConfig.from_preset(options.preset)
    world = World(device=pick_device("auto"))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(config, world, Path(folder), options.steps, options.rounds)
    found = {"preset": options.preset, "device": describe(world.device), **found}
    for name, value in found.items():
        print(f"{name:<42} {value:.5g}" if isinstance(value, float) else f"{name:<42} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def describe(device: torch.device) -> str:
    """The hardware in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def measure(config: RunConfig, world: World, folder: Path, steps: int, rounds: int) -> dict[str, float]:
    """Time stretches of training with and without a checkpoint, and the guards."""
    device, options, window = world.device, config.train, config.model.window
    model = CompressiveLM(config.model).to(device).train()
    forward = world.wrap(model, options)
    named = dict(model.named_parameters())
    optimiser = loop._optimiser(list(named.values()), options.learning_rate)
    x = torch.randint(config.model.vocab_size, (options.batch, window), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16")
    memory, counted = model.initial_memory(options.batch), torch.zeros((), device=device)

    def step() -> None:
        nonlocal memory
        with autocast:
            out = forward(x, memory, targets=x)
        (out.nll.mean() + out.compression_loss).backward()
        memory = out.memory.detach()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    def stretch(save: bool = False, guarded: bool = False) -> tuple[float, float]:
        wait(device)
        began, copying = time.perf_counter(), 0.0
        for i in range(steps):
            step()
            if guarded:
                guard(memory)
            if save and i == 0:
                wait(device)
                before = time.perf_counter()
                saver.save(i, loop._parts(world, named, optimiser, memory, [], counted), {})
                copying = time.perf_counter() - before
        wait(device)
        return time.perf_counter() - began, copying

    guard = guards(config, world)
    for _ in range(10):
        step()
        guard(memory)
    plain, saving, copying, writing, guarding = [], [], [], [], []
    with checkpoint.Saver(folder / "checkpoints", world) as saver:
        stretch(save=True)  # the first one gets the memory that the others keep
        for _ in range(rounds):
            saver.wait()
            plain.append(stretch()[0])
            guarding.append(stretch(guarded=True)[0])
            plain.append(stretch()[0])
            took, copied = stretch(save=True)
            before = time.perf_counter()
            saver.wait()
            writing.append(time.perf_counter() - before)
            saving.append(took)
            copying.append(copied)
    per_step = statistics.median(plain) / steps
    added = statistics.median(saving) - statistics.median(plain)
    in_stretch = (statistics.median(guarding) - statistics.median(plain)) / steps
    by_itself = median_seconds(lambda: guard(memory), device, repeats=50)
    interval, line = options.checkpoint_every * per_step, time_logging(config, world, folder)
    return {
        "seconds per step": per_step,
        "steps alike within": (max(plain) - min(plain)) / statistics.median(plain),
        "seconds a checkpoint adds": added,
        "of these for the copy": statistics.median(copying),
        "seconds it still writes after a stretch": statistics.median(writing),
        "seconds between two checkpoints": interval,
        "share of time, saving": added / interval,
        "seconds of a line of metrics": line,
        "seconds of guards, by themselves": by_itself,
        "share of time, guards and logging": (by_itself + line / options.log_every) / per_step,
        "seconds of guards, in a stretch": in_stretch,
        "share of time, guards in a stretch": in_stretch / per_step,
    }


def guards(config: RunConfig, world: World) -> Callable[[Memory], None]:
    """What the loop does on every step to skip a bad one: flags, memory kept or put back, numbers to the host."""
    late, tally, keep = loop.Late(world.device), loop.Tally(config, world, 0), loop.settle(config.train, world.device)
    task = torch.ones((), device=world.device)

    def guard(memory: Memory) -> None:
        asked = torch.full_like(task, False)
        first, second, third = world.mean(torch.stack([task, task, asked])).unbind()
        finite = (first + second).isfinite() & task.isfinite() & task.isfinite()
        keep(memory, finite, memory)
        tally.add(1, late.exchange(torch.stack([first, second, task, task, finite.float(), third])))

    return guard


def time_logging(config: RunConfig, world: World, folder: Path) -> float:
    """What one line of metrics takes, on the screen and in the file."""
    with Recorder(folder, config, 0, 0.0, "bpc") as recorder:
        recorder.console.file = (folder / "screen").open("w")
        tally = loop.Tally(config, world, 0)
        tally.rows = np.ones((config.train.log_every, 4)).tolist()
        return median_seconds(lambda: recorder.train(1, tally.take(1, 1e-4, 1)), world.device, repeats=50)


if __name__ == "__main__":
    main()
