"""Seconds from the command to the first and to the tenth step, with and without what earlier runs compiled.

    python benchmarks/startup.py --results benchmarks/results/startup/DATE-h200.json
    python benchmarks/startup.py --preset quickstart --layers 4 8 --repeats 2          # on a CPU: nothing is compiled

For each number of layers `compressive train` runs in processes of its own on random bytes: the first with empty caches
for the compiler and for Triton, the others with what it left there. A step counts once it is in metrics.jsonl, so the
next one has been launched. Layers share compiled code, so 36 should take little longer than 12.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from compressive.bench import write_results
from compressive.data.corpus import SPLITS, write_corpus
from compressive.data.tokenizer import ByteTokenizer

STEPS = 10


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="enwik8-base")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 36], help="layers (default: 12 36)")
    parser.add_argument("--repeats", type=int, default=1, help="runs after the first (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    parser.add_argument("options", nargs="*", help="more options of compressive train, after --")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        noise = np.random.default_rng(0).integers(0, 256, 2_000_000, np.uint8).tobytes()
        write_corpus(folder / "data" / "noise", "noise", ByteTokenizer(), {split: [noise] for split in SPLITS}, {})
        for layers in options.layers:
            for repeat in range(1 + options.repeats):
                words = [options.preset, "--model.n-layers", str(layers), *options.options]
                row = {"layers": layers, "caches": "filled" if repeat else "empty"}
                row |= start(folder, f"{layers}-{repeat}", words, folder / f"caches-{layers}", options.limit)
                rows.append(row)
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.results:
        what = f"seconds from the command to the first and the {STEPS}th step of {options.preset}"
        write_results(options.results, what, " ".join(["python", *sys.argv]), rows)


def start(folder: Path, name: str, words: list[str], caches: Path, limit: float) -> dict[str, float]:
    """Train for ten steps in a process of its own; return after how many seconds the first and the last were done."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    train = {"steps": STEPS, "log-every": 1, "eval-every": STEPS, "eval-tokens": 10_000, "sample-every": 0}
    command = [sys.executable, "-m", "compressive", "train", *words, "--data.corpus", "noise"]
    command += ["--data.data-dir", str(folder / "data"), "--out", str(folder / name), "--quiet"]
    command += [word for option, value in train.items() for word in (f"--train.{option}", str(value))]
    began, seen = time.monotonic(), dict[int, float]()
    with (folder / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while STEPS not in seen:
            if time.monotonic() - began > limit:
                process.kill()
                raise SystemExit(f"limit={limit:g}: expected {STEPS} steps within so many seconds; {command}")
            done = process.poll() is not None  # before the file is read, which may get its last lines in between
            for step in steps_done(folder / name / "metrics.jsonl"):
                seen.setdefault(step, round(time.monotonic() - began, 2))
            if done and STEPS not in seen:
                raise SystemExit(f"{' '.join(command)} ended without {STEPS} steps:\n{Path(log.name).read_text()}")
            time.sleep(0.02)
        process.wait()
    return {"first_step_seconds": seen[1], "tenth_step_seconds": seen[STEPS]}


def steps_done(metrics: Path) -> list[int]:
    """Return the steps that a run has written to its metrics."""
    if not metrics.is_file():
        return []
    lines = metrics.read_text("utf-8").splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record["step"] for record in records if record["kind"] == "train"]


if __name__ == "__main__":
    main()
