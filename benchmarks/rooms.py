"""How fast the agent acts and learns on this machine: environment alone, acting, learning, training as a whole.

    python benchmarks/rooms.py --lanes 512 1024 --batch 256 --results experiments/results/rooms-speed-h200.json
    python benchmarks/rooms.py --preset rooms-tiny --eager --fp32 --seconds 5

Needs neither Gymnasium nor Ray nor tyro. A step is an agent's step: four frames of the original. The published figure
that it stands beside, about 417 steps/s for an IMPALA with TransformerXL on the original level, was on 32 CPU cores and
two P100, in DeepMind Lab: other hardware, another simulator.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from compressive.bench import wait, write_results
from compressive.config.agent import AgentRun
from compressive.rl.acting import Actor
from compressive.rl.agent.agent import Agent
from compressive.rl.env.rooms import Rooms
from compressive.rl.learning import Learner
from compressive.runtime import peak_gib, pick_device

PUBLISHED = 417


def main() -> int:
    """Measure a row for each number of lanes and core, print it, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="rooms-fast")
    parser.add_argument("--lanes", type=int, nargs="+")
    parser.add_argument("--batch", type=int, help="lanes of an update; all of an unroll's if not given")
    parser.add_argument("--cores", nargs="+", default=["compressive"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each part is measured")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    preset, rows = AgentRun.from_preset(options.preset), []
    for core in options.cores:
        for lanes in options.lanes or [preset.task.lanes]:
            config = AgentRun(
                dataclasses.replace(preset.model, n_layers=options.layers or preset.model.n_layers),
                dataclasses.replace(preset.task, lanes=lanes),
                dataclasses.replace(preset.agent, core=core),
                dataclasses.replace(
                    preset.train,
                    batch=options.batch or lanes,
                    compile=preset.train.compile and not options.eager,
                    precision="fp32" if options.fp32 else preset.train.precision,
                    device=options.device,
                ),
            )
            row = {"core": core, "lanes": lanes, "batch": config.batch, "layers": config.model.n_layers}
            rows.append(row | measure(config, options.seconds))
            print(
                "  ".join(
                    f"{k} {v:,.0f}" if isinstance(v, float) and v > 99 else f"{k} {v}" for k, v in rows[-1].items()
                )
            )
    if options.results:
        command = " ".join(["python", "benchmarks/rooms.py", *sys.argv[1:]])
        write_results(
            options.results,
            "the agent's speed on the two rooms, in agent steps per second",
            command,
            rows,
            preset=options.preset,
            published={
                "steps_per_second": PUBLISHED,
                "of": "IMPALA with TransformerXL, 32 vCPU and two P100, DeepMind Lab",
            },
        )
    return 0


def measure(config: AgentRun, seconds: float) -> dict[str, object]:
    """Steps per second of each part; compilation and first allocations are not counted."""
    device, options = pick_device(config.train.device), config.train
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    task = Rooms(config.task, 0, device, options.compile)
    agent = Agent(config, task.observation_shape, task.n_actions).to(device)
    actor, learner = Actor(task, agent, options, device, 1), Learner(agent, options, device)
    parts = torch.arange(task.lanes, device=device).split(config.batch)
    actions = torch.zeros(task.lanes, dtype=torch.long, device=device)
    per_unroll = task.lanes * agent.window

    def play() -> None:
        for _ in range(agent.window):
            task.step(actions)

    def learn() -> None:
        for lanes in parts:
            learner.update(unroll.select(lanes))

    def both() -> None:
        nonlocal unroll
        unroll = actor.unroll()
        learn()

    began = time.perf_counter()
    unroll = actor.unroll()
    learn()
    wait(device)
    first = time.perf_counter() - began
    speeds = {
        name: per_unroll / _seconds(act, device, seconds)
        for name, act in (("task", play), ("acting", actor.unroll), ("learning", learn), ("training", both))
    }
    return {f"{name} steps/s": speed for name, speed in speeds.items()} | {
        "times the published figure": round(speeds["training"] / PUBLISHED, 1),
        "first unroll and update, s": round(first, 1),
        "peak GiB": round(peak_gib(device), 2),
        "precision": options.precision,
        "compile": options.compile,
    }


def _seconds(act: Callable[[], object], device: torch.device, least: float) -> float:
    """Mean seconds of one call, over at least so long."""
    act()
    wait(device)
    began, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - began < least:
        act()
        calls += 1
        wait(device)
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    sys.exit(main())
