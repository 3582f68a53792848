"""What each compression function costs: time of a training step beside a TransformerXL with as many slots.

    python benchmarks/compressors.py --preset quickstart --results benchmarks/results/compressors/DATE-cpu.json
    python benchmarks/compressors.py --compile --results benchmarks/results/compressors/DATE-h200.json

The steps are those of the training loop, on random tokens; the functions are the rows of `compressive experiment
compression-functions`. Rounds go through all rows in turn, so that slow moments of the machine affect all. On a CPU a
step's time is that of the process, which other work disturbs less than the clock; on a GPU it is the clock's. BPTT
has two windows a step and half the batch.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from compressive.bench import write_results
from compressive.config import ModelConfig, RunConfig
from compressive.distributed import World
from compressive.experiments.compression_functions import FUNCTIONS
from compressive.model.language_model import CompressiveLM
from compressive.runtime import pick_device, synchronise
from compressive.training.preflight import fit_device
from compressive.training.step import WARM_UP, Step, Windows

NONE = "none"
"""The row without compression."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="enwik8-base")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="if not the preset's; on a CPU, if not fp32")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--steps", type=int, default=5, help="steps per row and round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    options = parser.parse_args()
    device = pick_device("auto")
    config = RunConfig.from_preset(options.preset)
    changes = {"precision": options.precision} if options.precision else {}
    changes |= {"compile": True} if options.compile else {}
    train, _ = fit_device(dataclasses.replace(config.train, **changes), [f"train.{name}" for name in changes], device)
    rows = measure(dataclasses.replace(config, train=train), device, options.steps, options.rounds)
    for row in rows:
        print(
            f"{row['function']:<42} {row['parameters']:>11,} parameters  {row['step_ms']:8.1f} ms "
            f"({row['lowest_ms']:.1f} to {row['highest_ms']:.1f})  {row['against_none']:.3f}"
        )
    if options.results:
        what = f"time of a training step of {options.preset} by compression function"
        write_results(options.results, what, " ".join(["python", *sys.argv]), rows)


def measure(config: RunConfig, device: torch.device, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Time every row in every round; `against_none` is the ratio of medians."""
    built = {name: build(config, name, device) for name in (NONE, *FUNCTIONS)}
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    found: dict[str, list[float]] = {name: [] for name in built}
    for turn in range(rounds + 1):
        for name, (step_fn, windows, _) in built.items():
            synchronise(device)
            began = clock()
            for _ in range(steps if turn else WARM_UP + 2):  # the first round compiles, captures and warms up
                step_fn(windows, 0)
            synchronise(device)
            if turn:
                found[name].append(1000 * (clock() - began) / steps)
    plain = statistics.median(found[NONE])
    return [
        {
            "function": FUNCTIONS[name].title if name in FUNCTIONS else "no compression, as many slots",
            "parameters": parameters,
            "step_ms": statistics.median(times),
            "lowest_ms": min(times),
            "highest_ms": max(times),
            "against_none": statistics.median(times) / plain,
        }
        for (name, times), (_, _, parameters) in zip(found.items(), built.values(), strict=True)
    ]


def build(config: RunConfig, name: str, device: torch.device) -> tuple[Step, Windows, int]:
    """Return a step, what it reads, and the number of the model's parameters."""
    model, train = config.model, config.train
    assert isinstance(model, ModelConfig)
    if name == NONE:
        slots = model.memory_sizes[0] + model.compressed_sizes[0]
        model = dataclasses.replace(model, memory_size=slots, compressed_size=0)
    else:
        function = FUNCTIONS[name]
        model = dataclasses.replace(model, **function.model)
        train = dataclasses.replace(train, unroll=function.unroll, batch=train.batch // function.unroll)
    torch.manual_seed(0)
    lm = CompressiveLM(model).to(device).train()
    shape = (train.unroll, train.batch, model.window)
    tokens = torch.randint(model.vocab_size, shape, device=device)
    step_fn = Step(lm, train, World(device=device), train.batch)
    return step_fn, Windows(tokens, tokens, None), sum(p.numel() for p in lm.parameters())


if __name__ == "__main__":
    main()
