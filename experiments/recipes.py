"""What each change of the training recipe is worth: one short run per change, against the same baseline.

    python experiments/recipes.py --preset enwik8-base --steps 7000 --rate 6e-4 --results FILE \
        --flags "--train.update-every 1 --model.dropout 0.05"
    python experiments/recipes.py --preset quickstart --steps 300 --only adam muon-1 muon-2 muon-4 --results FILE

Every run has the same number of steps, a tenth of which is warm-up, and is scored on the beginning of the validation
split at its last step. The table is written after each run. A run that is finished is not trained again.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from compressive.bench import write_results

Flags = dict[str, object]


def variants(rate: float, batch: int) -> dict[str, Flags]:
    """Return the changes by name, as flags of `compressive train`, around a peak rate and a batch size."""
    muon: Flags = {"--train.optimiser": "muon"}
    to_zero: Flags = {"--train.final-learning-rate": 0}
    return {
        "adam": {},
        "rate-half": {"--train.learning-rate": rate / 2},
        "rate-double": {"--train.learning-rate": rate * 2},
        **{f"muon-{scale}": muon | {"--train.muon-scale": scale} for scale in (1, 2, 4, 8)},
        "linear-to-zero": to_zero | {"--train.decay": "linear"},
        "muon-4-linear-to-zero": muon | to_zero | {"--train.muon-scale": 4, "--train.decay": "linear"},
        "muon-4-weight-decay-0.2": muon | {"--train.muon-scale": 4, "--train.weight-decay": 0.2},
        "average-0.999": {"--train.weight-average": 0.999},
        "clip-1": {"--train.clip": 1.0},
        "dropout-0": {"--model.dropout": 0.0},
        "dropout-0.1": {"--model.dropout": 0.1},
        "batch-double": {"--train.batch": 2 * batch},
        "pre-norm": {"--model.norm": "pre"},
        "reset-0.01": {"--train.reset-probability": 0.01},
        "reset-0.05": {"--train.reset-probability": 0.05},
    }


def main() -> None:
    """Train, print and write."""
    from compressive.config import RunConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="enwik8-base", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=7000, help="steps of each run (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="peak learning rate (default: the preset's)")
    parser.add_argument("--eval-tokens", type=int, default=2_000_000, help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these changes only (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(default: 0)")
    parser.add_argument("--flags", default="", help="flags of every run, for `compressive train`")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"), help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    options = parser.parse_args()
    preset = RunConfig.from_preset(options.preset).train
    options.rate = options.rate or preset.learning_rate
    changes = variants(options.rate, preset.batch)
    names = options.only or list(changes)
    if unknown := sorted(set(names) - set(changes)):
        parser.error(f"--only {' '.join(unknown)}: expected some of {', '.join(changes)}")
    rows: list[dict[str, Any]] = []
    for name in names:
        for seed in options.seeds:
            run = options.out / f"{name}-seed{seed}"
            if not finished(run, options.steps):
                words = ["train", options.preset, *command(options, changes[name], seed), "--out", run, "--resume"]
                subprocess.run([sys.executable, "-m", "compressive", *map(str, words)], check=True)
            rows.append({"name": name, "seed": seed, **figures(run)})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            if options.results:
                about = {key: getattr(options, key) for key in ("preset", "steps", "rate", "flags")}
                line = " ".join(["python", *sys.argv])
                write_results(options.results, "what changes of the training recipe are worth", line, rows, **about)


def command(options: argparse.Namespace, change: Flags, seed: int) -> list[object]:
    """Return the flags of one run; a change overrides those of every run, as the last flag of a name counts."""
    values: Flags = {
        "--train.steps": options.steps, "--train.learning-rate": options.rate,
        "--train.warmup-steps": options.steps // 10, "--train.decay-steps": 0,
        "--train.eval-every": options.steps, "--train.eval-tokens": options.eval_tokens,
        "--train.sample-every": 0, "--train.checkpoint-every": options.steps, "--train.seed": seed,
    } | change  # fmt: skip
    return [*shlex.split(options.flags), *(word for pair in values.items() for word in pair)]


def finished(run: Path, steps: int) -> bool:
    """Return whether a run was evaluated at its last step."""
    return any(line["kind"] == "eval" and line["step"] >= steps for line in metrics(run))


def figures(run: Path) -> dict[str, float]:
    """Return what one run gave: bits at its end, and what it cost."""
    lines = metrics(run)
    trained = [line for line in lines if line["kind"] == "train"]
    return {
        "validation_bits": round([line for line in lines if line["kind"] == "eval"][-1]["bits"], 4),
        "training_bits": round(trained[-1]["bits"], 4),
        "tokens_per_second": round(trained[-1]["tokens_per_second"]),
        "seconds": trained[-1]["seconds"],
    }


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, none if it has not begun."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
