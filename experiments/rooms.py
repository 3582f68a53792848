"""Train the agent on the rooms for some minutes, evaluate it, and write scores and training curve to one file.

    python experiments/rooms.py --minutes 8 --results experiments/results/rooms/DATE-DEVICE.json
    python experiments/rooms.py --minutes 16 --results experiments/results/rooms/DATE-DEVICE.json    # resumes the run
    python experiments/rooms.py --preset rooms-tiny --seeds 0 1 2 3 4 --results tiny.json
    python experiments/rooms.py --core lstm --delays 0 64 128 256 --out runs/lstm --results lstm.json
    python experiments/rooms.py --results experiments/results/rooms/2026-11-16-h200.json --figure docs/agent.png

Runs on one GPU. Needs neither Gymnasium nor Ray nor tyro. `--minutes` counts the whole run, including the time before
it was resumed. A run can only be resumed with the values it was started with. With `--seeds` the file has one run per
seed; it is written after each, and keeps the seeds that it has already.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from compressive.bench import processor
from compressive.config.agent import AgentRun
from compressive.rl.curves import plot
from compressive.rl.evaluate import compare
from compressive.rl.loop import read_metrics, train
from compressive.rl.run import AgentFolder
from compressive.runtime import describe_environment, pick_device, write_atomically

PER_RUN = (
    "seed", "steps", "seconds", "median_steps_per_second", "policies", "evaluation_seconds", "environment", "curve",
)  # fmt: skip
"""Values of a report that differ between seeds."""
CURVE = ("step", "seconds", "return", "choices", "choice_accuracy", "foresight", "entropy")
"""Values of a training curve that are kept if there are several."""


def main() -> int:
    """Train or resume, evaluate, and write everything to one file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="rooms-fast")
    parser.add_argument("--out", type=Path, help="folder of the run; runs/PRESET if not given")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--figure", type=Path, help="do not train; plot the results to this file")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall-clock limit of training")
    parser.add_argument("--steps", type=int, help="limit of agent steps")
    parser.add_argument("--core", choices=("compressive", "txl", "lstm", "none"))
    parser.add_argument("--rate", type=int, help="compression rate")
    parser.add_argument("--compression", help="compression function")
    parser.add_argument("--layers", type=int, help="layers of the core")
    parser.add_argument("--delays", type=int, nargs="+", help="steps between the rooms, mixed in training")
    parser.add_argument("--envs", type=int, help="number of environments")
    parser.add_argument("--lanes", type=int, dest="envs", help=argparse.SUPPRESS)  # its name in version 0.1
    parser.add_argument("--batch", type=int, help="environments per update")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--entropy-cost", type=float)
    parser.add_argument("--reward", choices=("scaled", "asymmetric"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", help="train and evaluate several seeds, one after the other")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--fp32", action="store_true", help="train in fp32 instead of bf16")
    parser.add_argument("--episodes", type=int, default=1024, help="episodes of the evaluation, for each delay")
    options = parser.parse_args()
    if options.figure is not None:
        results = json.loads(options.results.read_text("utf-8"))
        plot(
            results["curve"],
            {who.split("_delay_")[0]: found for who, found in results["policies"].items()},
            options.figure,
        )
        return 0

    if options.seeds:
        return train_seeds(options)
    config = configure(options)
    folder = AgentFolder.begin(options.out or Path("runs") / options.preset, config, True)
    code = train(folder)
    if code == 0:
        write_atomically(options.results, json.dumps(report(folder, options.episodes), indent=1) + "\n")
    return code


def train_seeds(options: argparse.Namespace) -> int:
    """Train and evaluate one run per seed, each in its own folder; return the first exit code that is not 0."""
    for seed in options.seeds:
        options.seed = seed
        out = (options.out or Path("runs") / options.preset) / f"seed{seed}"
        folder = AgentFolder.begin(out, configure(options), False)
        began = time.process_time()
        code = train(folder)
        if code:
            return code
        cpu_seconds = time.process_time() - began
        found = report(folder, options.episodes)
        run = {"cpu_seconds": cpu_seconds} | {name: found.pop(name) for name in PER_RUN}
        run["curve"] = [{name: row[name] for name in CURVE} for row in run["curve"]]
        found["config"]["train"].pop("seed")
        add_run(options.results, found, run)
    return 0


def add_run(path: Path, about: dict[str, Any], run: dict[str, Any]) -> None:
    """Write a run to a file that may have other seeds of the same configuration; raise ValueError for another one."""
    before = json.loads(path.read_text("utf-8")) if path.exists() else about
    if json.dumps(before["config"]) != json.dumps(about["config"]):
        raise ValueError(f"{path} has runs of another configuration; choose another file")
    runs = [one for one in before.get("runs", ()) if one["seed"] != run["seed"]] + [run]
    written = about | {"cpu": processor(), "runs": sorted(runs, key=lambda one: int(one["seed"]))}
    write_atomically(path, json.dumps(written, indent=1) + "\n")


def configure(options: argparse.Namespace) -> AgentRun:
    """Return the preset with the given options on top."""
    preset = AgentRun.from_preset(options.preset)

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    model = given(compression_rate=options.rate, compression=options.compression, n_layers=options.layers)
    task = given(envs=options.envs, delays=options.delays)
    learning = given(
        steps=options.steps,
        minutes=options.minutes,
        batch=options.batch,
        learning_rate=options.learning_rate,
        entropy_cost=options.entropy_cost,
        reward=options.reward,
        seed=options.seed,
        compile=False if options.eager else None,
        precision="fp32" if options.fp32 else None,
    )
    return AgentRun(
        dataclasses.replace(preset.model, **model),
        dataclasses.replace(preset.task, **task),
        dataclasses.replace(preset.agent, **given(core=options.core)),
        dataclasses.replace(preset.train, **learning),
    )


def report(run: AgentFolder, episodes: int) -> dict[str, Any]:
    """Evaluate the agent, the random policy and the oracle for each delay; return that with the curve and the speed."""
    device, policies, seconds = pick_device(run.config.train.device), dict[str, Any](), 0.0
    for delay in run.config.task.delays:
        began = time.monotonic()
        _, found = compare(str(run.folder), episodes, 256, 10**6, device, delays=(delay,))
        policies |= {f"{who}_delay_{delay}": evaluation.as_dict() for who, evaluation in found.items()}
        seconds += time.monotonic() - began
    rows = read_metrics(run.folder)
    speeds = sorted(row["steps_per_second"] for row in rows[1:] or rows)
    return {
        "what": "the agent on the two rooms: IMPALA with the chosen memory core, trained and then evaluated",
        "command": " ".join(["python", "experiments/rooms.py", *sys.argv[1:]]),
        "environment": describe_environment(),
        "seed": run.config.train.seed,
        "config": dataclasses.asdict(run.config),
        "temporal_range": run.config.memory.temporal_range,
        "steps": rows[-1]["step"],
        "seconds": rows[-1]["seconds"],
        "median_steps_per_second": speeds[len(speeds) // 2],
        "policies": policies,
        "evaluation_seconds": seconds,
        "curve": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
