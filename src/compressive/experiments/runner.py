"""Runs experiments: trains and measures run by run, in processes of their own, and resumes what was cut off.

RUNS/SCALE/ROW-seedN/             a training run, as `compressive train` writes it
                    /row.json     the row and its configuration: another configuration is refused
                    /worker.log   what the run printed
                    /measured/NAME.json    what experiment NAME measured: never measured, nor trained, again
OUT/NAME/SCALE.json, .md, .png    the result, also of a part of the runs
"""

import dataclasses
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressive.bench import processor, write_results
from compressive.console import note, progress_bar, warn
from compressive.experiments import load
from compressive.experiments.experiment import Experiment, Measured, Row, Scale
from compressive.plotting import PlotError
from compressive.runtime import describe_environment, noted_signals, write_atomically
from compressive.training import loop

FINISHED, FAILED, TO_BE_CONTINUED = loop.FINISHED, 1, loop.INTERRUPTED
"""Exit codes: all runs measured; a run failed; stopped in time or by a signal, to be resumed by the same command."""
GRACE = 60.0
"""Seconds that a run has to save its state before it is killed."""
ROW = "row.json"
"""Where a run keeps its row and its configuration."""
TRAINED = ("commit", "torch", "gpu", "time")
"""What is kept of each start of a training run."""
MEASURED = ("commit", "time", "cpu", "gpu", "cpu_cores", "threads", "torch", "cuda", "python")
"""What is kept of where a run was measured."""
INTERPRETER = [sys.executable]
"""Starts a process for a run."""


@dataclass(frozen=True)
class Options:
    """Where an experiment runs, and for how long."""

    scale: Scale
    out: Path = Path("experiments/results")
    runs: Path = Path("runs/experiments")
    data_dir: Path = Path("data")
    seeds: tuple[int, ...] = ()  # empty: the experiment's own
    jobs: int = 1
    minutes: float | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise ValueError(f"jobs={self.jobs}: expected at least 1, or 0 to train nothing")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"minutes={self.minutes:g}: expected more than 0; leave it out to run to the end")
        if any(seed < 0 for seed in self.seeds) or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds}: expected different numbers of at least 0")

    def seeds_of(self, experiment: Experiment) -> tuple[int, ...]:
        """Return the seeds to run of an experiment."""
        return self.seeds or experiment.seeds[self.scale]

    def folder(self, row: Row, seed: int) -> Path:
        """Return the folder of a run."""
        return self.runs / self.scale / f"{row.name}-seed{seed}"


@dataclass(frozen=True)
class Task:
    """One run: a row with a seed, and the experiments that measure it."""

    row: Row
    seed: int
    folder: Path
    experiments: tuple[Experiment, ...]

    @property
    def name(self) -> str:
        """What progress lines call it."""
        return f"{self.row.name}, seed {self.seed}"

    @property
    def due(self) -> list[Experiment]:
        """The experiments that have not measured it yet."""
        return [experiment for experiment in self.experiments if not _measurement(self.folder, experiment).exists()]

    @property
    def step(self) -> int:
        """The last step that its metrics tell of."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes()[-2000:].splitlines()
        except FileNotFoundError:
            return 0
        return next((int(line.split(b'"step": ')[1].split(b",")[0]) for line in lines[::-1] if b'"step": ' in line), 0)


def tasks(experiments: Sequence[Experiment], options: Options) -> list[Task]:
    """Return all runs of some experiments, all rows with the first seed in front; a shared run is there once.

    Raises ValueError if two experiments give different rows the same name, or if a folder holds a run of another
    configuration.
    """
    found: dict[Path, Task] = {}
    for seed in sorted({seed for experiment in experiments for seed in options.seeds_of(experiment)}):
        for experiment in experiments:
            for row in experiment.rows(options.scale) if seed in options.seeds_of(experiment) else ():
                folder = options.folder(row, seed)
                before = found.get(folder, Task(row, seed, folder, ()))
                if before.row.config != row.config:
                    raise ValueError(f"row {row.name!r} of {experiment.name}: another one of this name is configured "
                                     "differently; give it another name")  # fmt: skip
                found[folder] = dataclasses.replace(before, experiments=(*before.experiments, experiment))
    for task in found.values():
        _check_folder(task)
    return list(found.values())


def _check_folder(task: Task) -> None:
    """Raise ValueError if the folder holds a run of another configuration; fields that it lacks have their defaults."""
    path = task.folder / ROW
    if (
        path.exists()
        and type(task.row.config).from_tables(json.loads(path.read_text("utf-8"))["config"]) != task.row.config
    ):
        raise ValueError(
            f"{task.folder} was trained with another configuration than {task.row.name!r} has now; move it away, or "
            "give another --runs"
        )


def _measurement(folder: Path, experiment: Experiment) -> Path:
    return folder / "measured" / f"{experiment.name}.json"


def work(words: dict[str, Any]) -> int:
    """Train one run to its end, or on from where it was, and measure it: what a run's process does."""
    options = Options(
        words["scale"], runs=Path(words["runs"]), data_dir=Path(words["data_dir"]), seeds=(words["seed"],)
    )
    planned = tasks([load(path) for path in words["experiments"]], options)
    (task,) = (task for task in planned if task.row.name == words["row"])
    identity = {"row": task.row.name, "seed": task.seed, "config": dataclasses.asdict(task.row.config)}
    write_atomically(task.folder / ROW, json.dumps(identity, indent=1))
    code = task.row.train(task.folder, task.seed, options.data_dir, words["device"])
    if code == loop.FINISHED:
        seconds = json.loads((task.folder / "metrics.jsonl").read_text("utf-8").splitlines()[-1])["seconds"]
        starts = [json.loads(line) for line in (task.folder / "environment.jsonl").read_text("utf-8").splitlines()]
        about = describe_environment() | {"cpu": processor()}
        for experiment in task.due:
            found = experiment.measure(task.row.open(task.folder), options.scale)
            kept = {
                "training_seconds": seconds,
                "trained": [{name: start[name] for name in TRAINED} for start in starts],  # once per start
                "measured": {name: about[name] for name in MEASURED},
                "found": found,
            }
            write_atomically(_measurement(task.folder, experiment), json.dumps(kept, indent=1) + "\n")
    return code


def run(experiments: Sequence[Experiment], options: Options, command: str) -> int:
    """Train and measure what is missing, then write the results of every experiment; returns an exit code.

    Stops after `options.minutes`, or at SIGINT or SIGTERM: runs save their state, and the same command goes on. With no
    jobs, only what was measured before is written, which needs no corpus and no weights.
    """
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    planned = tasks(experiments, options)
    todo = [task for task in planned if task.due]
    if len(todo) < len(planned):
        note(f"{len(planned) - len(todo)} of {len(planned)} runs are measured already")
    if todo and options.jobs:
        for experiment in experiments:
            experiment.prepare(options.scale, options.data_dir)
        failed = _run_all(todo, options, deadline)
    else:
        failed = []
    for experiment in experiments:
        write(experiment, options, command)
    left = [task for task in planned if task.due and task not in failed]
    if left:
        runs = "1 run is" if len(left) == 1 else f"{len(left)} runs are"
        note(f"to be continued: {runs} left; the same command goes on where it stopped: {command}")
    return FAILED if failed else TO_BE_CONTINUED if left else FINISHED


def _run_all(todo: Sequence[Task], options: Options, deadline: float | None) -> list[Task]:
    """Run the tasks, `options.jobs` at a time; return those that failed."""
    waiting, running, failed = deque(todo), dict[Task, subprocess.Popen[bytes]](), list[Task]()
    stopped: float | None = None
    with noted_signals() as signals, progress_bar() as bar:
        whole = bar.add_task(f"{len(todo)} runs", total=len(todo))
        bars = {}
        while running or (waiting and stopped is None):
            now = time.monotonic()
            if stopped is None and (signals or (deadline is not None and now >= deadline)):
                stopped = now
                note(f"stopping after {signals[0].name if signals else f'{options.minutes:g} minutes'}: runs save now")
                for process in running.values():
                    process.terminate()
            while waiting and stopped is None and len(running) < options.jobs:
                task = waiting.popleft()
                running[task] = _start(task, options)
                bars[task] = bar.add_task(task.name, total=task.row.config.train.steps)
                note(f"{task.name}: {'goes on from' if task.step else 'begins at'} step {task.step:,}")
            for task, process in list(running.items()):
                bar.update(bars[task], completed=task.step)
                if stopped is not None and now > stopped + GRACE:
                    process.kill()
                if (code := process.poll()) is None:
                    continue
                del running[task]
                bar.remove_task(bars.pop(task))
                if code == FINISHED:
                    bar.advance(whole)
                    done = len(todo) - len(waiting) - len(running) - len(failed)
                    note(f"{task.name}: measured ({done} of {len(todo)})")
                elif stopped is None:  # nobody asked it to stop
                    failed.append(task)
                    warn(f"{task.name}: failed ({_last_line(task)}); see {task.folder / 'worker.log'}")
            time.sleep(0.1)
    return failed


def _start(task: Task, options: Options) -> subprocess.Popen[bytes]:
    """Start the process of a run, in a process group of its own, so that Ctrl-C does not reach it twice."""
    words = {
        "experiments": [experiment.path for experiment in task.experiments], "scale": options.scale,
        "row": task.row.name, "seed": task.seed,
        "runs": str(options.runs), "data_dir": str(options.data_dir), "device": options.device,
    }  # fmt: skip
    task.folder.mkdir(parents=True, exist_ok=True)
    with (task.folder / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [*INTERPRETER, "-m", "compressive.experiments.runner", json.dumps(words)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
        )  # fmt: skip


def _last_line(task: Task) -> str:
    lines = (task.folder / "worker.log").read_text("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _provenance(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return commit, time and hardware of the measurements, not of whoever writes them to a file."""
    places = [row["measured"] for row in rows]
    commits = {place["commit"] for place in places} | {start["commit"] for row in rows for start in row["trained"]}
    hardware = {
        json.dumps({name: place[name] for name in MEASURED if name not in ("commit", "time")}) for place in places
    }
    machines = [json.loads(one) for one in sorted(hardware)]
    return {
        "commit": ", ".join(sorted(commit or "unknown" for commit in commits)),
        "time": max(place["time"] for place in places),
        "hardware": machines[0] if len(machines) == 1 else machines,
    }


def write(experiment: Experiment, options: Options, command: str) -> None:
    """Write an experiment's JSON, table and picture from what was measured so far; nothing if that is nothing."""
    seeds, rows, flat = options.seeds_of(experiment), [], []
    for row in experiment.rows(options.scale):
        paths = {seed: _measurement(options.folder(row, seed), experiment) for seed in seeds}
        kept = {seed: json.loads(path.read_text("utf-8")) for seed, path in paths.items() if path.exists()}
        rows.append(Measured(row, {seed: one["found"] for seed, one in kept.items()}))
        about = {"row": row.name, "title": row.title, **row.cost(options.scale)._asdict()}
        del about["seconds"]  # estimated
        flat += [{**about, "seed": seed, **one} for seed, one in kept.items()]
    if not flat:
        return
    path = options.out / experiment.name / f"{options.scale}.json"
    what = f"{experiment.source}: {experiment.claim}"
    table, verdicts = experiment.table(rows), list(experiment.verdicts(rows))
    missing = len(seeds) * len(rows) - len(flat)
    write_results(
        path, what, command, flat, experiment=experiment.name, scale=options.scale, seeds=seeds,
        complete=missing == 0, verdicts=verdicts, **_provenance(flat),
        configs={row.row.name: dataclasses.asdict(row.row.config) for row in rows},
    )  # fmt: skip
    unfinished = [f"**Not complete: {missing} of {len(seeds) * len(rows)} runs are missing.**"] * bool(missing)
    said = [
        f"# {experiment.name}, {options.scale}", what, *unfinished, table.rstrip(),
        "\n".join(f"- {verdict}" for verdict in verdicts),
        f"Mean of {len(seeds)} seeds, and the lowest and highest of them. [{path.name}]({path.name}) has every figure, "
        f"configuration, hardware and commit. The picture: [{path.stem}.png]({path.stem}.png).",
    ]  # fmt: skip
    write_atomically(path.with_suffix(".md"), "\n\n".join(said) + "\n")
    print("\n".join(["", f"{experiment.name}, {options.scale}", "", table, *verdicts]))
    try:
        experiment.plot(rows, path.with_suffix(".png"))
    except PlotError as error:
        warn(f"no picture: {error}")
    note(f"written to {path}, .md and .png")


if __name__ == "__main__":
    sys.exit(work(json.loads(sys.argv[1])))
