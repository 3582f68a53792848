"""The quickstart with several seeds: how far its figures spread.

    compressive data prepare text books --name books
    python experiments/quickstart.py --seeds 0 1 2 --results experiments/results/quickstart/DATE-cpu.json

Each seed trains, then measures as `make quickstart` does: bits per character of the test books, and how much the loss
rises if compressed memory is hidden. A seed whose report is there already is not trained again.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from compressive.bench import write_results


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each (default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="folder of prepared corpora (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-seeds"), help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        rows.append({"seed": seed, **one(options, seed)})
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    spread = {
        name: {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}
        for name in rows[0]
        if name != "seed" and (values := [row[name] for row in rows])
    }
    for name, figures in spread.items():
        print(f"{name}: {figures['mean']:.4f} ± {figures['deviation']:.4f} over {len(rows)} seeds")
    if options.results:
        what, command = "the quickstart with several seeds", " ".join(["python", *sys.argv])
        write_results(options.results, what, command, rows, preset="quickstart", steps=options.steps, spread=spread)


def one(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    run = options.out / f"seed-{seed}"
    if not (run / "report.json").exists():
        words = ["quickstart", "--train.steps", options.steps, "--train.seed", seed, "--out", run, "--resume"]
        compressive("train", *words, "--data.data-dir", options.data_dir)
        compressive("analyze", run, "report", "--tokens", 50_000, "--test-tokens", 0)
    report = json.loads((run / "report.json").read_text("utf-8"))
    worth = report["compressed_memory_is_worth"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "test_bits": report["test"]["bits"],
        "compressed_memory_worth": worth["mean"],
        "compressed_memory_worth_error": worth["error"],
        "training_seconds": metrics[-1]["seconds"],
    }


def compressive(*words: object) -> None:
    """Run a command of the package."""
    subprocess.run([sys.executable, "-m", "compressive", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
