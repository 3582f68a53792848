"""Speed of the agent on this machine: environments alone, acting, learning, and training as a whole.

    python benchmarks/rooms.py --envs 512 1024 --batch 256 --results benchmarks/results/rooms-speed/DATE-DEVICE.json
    python benchmarks/rooms.py --preset rooms-tiny --eager --fp32 --seconds 5

Needs neither Gymnasium nor Ray nor tyro. A step is an agent's step, which is four frames of the original. The published
figure to compare with is about 417 steps/s, for an IMPALA with TransformerXL on the original level, on 32 CPU cores and
two P100, in DeepMind Lab: other hardware, another simulator. Results are written after each row; one that fails holds
its error.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from compressive.bench import Row, row_or_error, write_results
from compressive.config.agent import AgentRun
from compressive.rl.acting import Actor
from compressive.rl.agent.agent import Agent
from compressive.rl.env.rooms import Rooms
from compressive.rl.learning import Learner
from compressive.runtime import peak_gib, pick_device, synchronise

PUBLISHED = 417


def main() -> int:
    """Measure one row for each core and number of environments, print it, and write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="rooms-fast")
    parser.add_argument("--envs", type=int, nargs="+", help="numbers of environments")
    parser.add_argument("--lanes", type=int, nargs="+", dest="envs", help=argparse.SUPPRESS)  # its name in version 0.1
    parser.add_argument("--batch", type=int, help="environments per update; all of a rollout if not given")
    parser.add_argument("--cores", nargs="+", default=["compressive"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time of each part")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    preset, rows = AgentRun.from_preset(options.preset), list[Row]()
    for core in options.cores:
        for envs in options.envs or [preset.task.envs]:
            config = AgentRun(
                dataclasses.replace(preset.model, n_layers=options.layers or preset.model.n_layers),
                dataclasses.replace(preset.task, envs=envs),
                dataclasses.replace(preset.agent, core=core),
                dataclasses.replace(
                    preset.train,
                    batch=options.batch or envs,
                    compile=preset.train.compile and not options.eager,
                    precision="fp32" if options.fp32 else preset.train.precision,
                    device=options.device,
                ),
            )
            row = {"core": core, "envs": envs, "batch": config.batch, "layers": config.model.n_layers}
            rows.append(row | row_or_error(functools.partial(measure, config, options.seconds)))
            print(
                "  ".join(
                    f"{k} {v:,.0f}" if isinstance(v, float) and v > 99 else f"{k} {v}" for k, v in rows[-1].items()
                ),
                flush=True,
            )
            if options.results:
                write(rows, options.preset, options.results)
    return 0


def write(rows: list[Row], preset: str, path: Path) -> None:
    """Write rows to a results file."""
    write_results(
        path,
        "the agent's speed on the two rooms, in agent steps per second",
        " ".join(["python", "benchmarks/rooms.py", *sys.argv[1:]]),
        rows,
        preset=preset,
        published={
            "steps_per_second": PUBLISHED,
            "of": "IMPALA with TransformerXL, 32 vCPU and two P100, DeepMind Lab",
        },
    )


def measure(config: AgentRun, seconds: float) -> Row:
    """Return the steps per second of each part, without compilation and first allocations."""
    device, options = pick_device(config.train.device), config.train
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    task = Rooms(config.task, 0, device, options.compile)
    agent = Agent(config, task.observation_shape, task.n_actions).to(device)
    actor, learner = Actor(task, agent, options, device, 1), Learner(agent, options, device)
    minibatches = torch.arange(task.n_envs, device=device).split(config.batch)
    actions = torch.zeros(task.n_envs, dtype=torch.long, device=device)
    steps_per_rollout = task.n_envs * agent.window
    began = time.perf_counter()
    rollout = actor.rollout()

    def step_envs() -> None:
        for _ in range(agent.window):
            task.step(actions)

    def learn() -> None:
        for envs in minibatches:
            learner.update(rollout.select(envs))

    def both() -> None:
        nonlocal rollout
        rollout = actor.rollout()
        learn()

    learn()
    synchronise(device)
    first = time.perf_counter() - began
    speeds = {
        name: steps_per_rollout / _seconds(act, device, seconds)
        for name, act in (("task", step_envs), ("acting", actor.rollout), ("learning", learn), ("training", both))
    }
    return {f"{name}_steps_per_second": speed for name, speed in speeds.items()} | {
        "ratio_to_published": round(speeds["training"] / PUBLISHED, 1),
        "first_rollout_and_update_seconds": round(first, 1),
        "peak_gib": round(peak_gib(device), 2),
        "precision": options.precision,
        "compile": options.compile,
    }


def _seconds(act: Callable[[], object], device: torch.device, least: float) -> float:
    """Return the mean seconds per call, over calls of at least `least` seconds in total."""
    act()
    synchronise(device)
    began, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - began < least:
        act()
        calls += 1
        synchronise(device)
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    sys.exit(main())
