"""How fast training is on a CPU, by how long OpenMP's waiting threads spin, on an idle and on a busy machine.

    python benchmarks/wait_policy.py --results benchmarks/results/wait-policy/DATE-cpu.json

Trains a preset for some steps, in processes of their own, with each setting in turn, so that slow moments of the
machine affect all: alone, and beside as many busy processes as there are cores. `compressive` sets GOMP_SPINCOUNT=10000
unless the user has a setting.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compressive.bench import write_results

SETTINGS: dict[str, dict[str, str]] = {
    "libgomp's default": {"OMP_WAIT_POLICY": ""},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
"""By name. An empty OMP_WAIT_POLICY keeps the command from choosing, and means nothing to libgomp."""

LOADS = (0, os.cpu_count() or 1)
"""Busy processes beside the run."""
PYTHON = [sys.executable]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart", help="what to train (default: %(default)s)")
    parser.add_argument("--corpus", default="books", help="corpus to train on (default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="folder of prepared corpora (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds after which a run is stopped (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, help="results file to write")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for load in LOADS:
        speeds: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for _ in range(options.rounds):
            for name, setting in SETTINGS.items():
                speeds[name].append(speed(options, setting, load))
        for name, found in speeds.items():
            row = {
                "setting": name,
                "busy_processes": load,
                "tokens_per_second": statistics.median(found),
                "runs": found,
            }
            rows.append(row)
            print(f"{load} busy  {name:<24} {row['tokens_per_second']:>8,.0f} tokens/s  {[round(x) for x in found]}")
    if options.results:
        about = {"preset": options.preset, "steps": options.steps, "limit_seconds": options.limit}
        what, command = "training on a CPU by OpenMP's wait policy", " ".join(["python", *sys.argv])
        write_results(options.results, what, command, rows, **about)


def speed(options: argparse.Namespace, setting: dict[str, str], load: int) -> float:
    """Tokens per second of one run, of its second half; if it is stopped at the limit, of what it had logged."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    } | setting
    every = max(1, options.steps // 6)
    busy = [subprocess.Popen([*PYTHON, "-c", "while True: pass"]) for _ in range(load)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", options.preset, "--data.data-dir", options.data_dir, "--data.corpus", options.corpus]
            words += ["--out", f"{folder}/run"]
            words += ["--train.steps", str(options.steps), "--train.log-every", str(every), "--train.eval-every", "0"]
            words += ["--train.sample-every", "0", "--train.device", "cpu", "--quiet"]
            began = time.monotonic()
            process = subprocess.Popen(
                [*PYTHON, "-m", "compressive", *words], env=environment, stderr=subprocess.DEVNULL
            )
            try:
                process.wait(options.limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            path = Path(folder) / "run" / "metrics.jsonl"
            lines = path.read_text("utf-8").splitlines() if path.exists() else []
            found = [float(json.loads(line)["tokens_per_second"]) for line in lines]
            if not found:
                raise RuntimeError(f"nothing was logged within {time.monotonic() - began:.0f} s: give a higher --limit")
            return statistics.median(found[len(found) // 2 :])
    finally:
        for other in busy:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
