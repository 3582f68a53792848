"""Fine-tune a run with memory emptied now and then, and measure bits by the number of tokens since an empty memory.

    python experiments/from_empty.py --source runs/quickstart --probabilities 0 0.02 0.1 --results FILE

Each probability is one run of `steps` steps from the same weights, on the same text in the same order; 0 is the
control. Measured on the validation split: bits from an empty memory, zeros and masked, as memories fill. Measured on
the test split, with memory carried through: bits per token, which resets could cost. A run that is there already is not
trained again.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from compressive.analysis.memory import measure_memory
from compressive.bench import write_results
from compressive.cli import main as compressive
from compressive.config.model import transformer
from compressive.evaluation.score import score
from compressive.runs.run import Run
from compressive.runs.trained import Trained


def main() -> None:
    """Train, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart", help="(default: %(default)s)")
    parser.add_argument("--source", type=Path, default=Path("runs/quickstart"), help="(default: %(default)s)")
    parser.add_argument("--probabilities", type=float, nargs="+", default=[0, 0.02, 0.1], help="(default: 0 0.02 0.1)")
    parser.add_argument("--steps", type=int, default=500, help="steps of each run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens to measure on (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="streams of the test split (default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="folder of prepared corpora (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/from-empty"), help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    options = parser.parse_args()
    rows = [{"name": "source", **measure(options.source, options)}]
    show(rows[-1])
    for probability in options.probabilities:
        run = options.out / f"reset-{probability:g}"
        if not (run / "checkpoints").exists():
            train(run, probability, options)
        rows.append({"name": "fine-tuned", "reset_probability": probability, **measure(run, options)})
        show(rows[-1])
    if options.results:
        what, command = "bits since an empty memory, with and without resets", " ".join(["python", *sys.argv])
        about = {name: getattr(options, name) for name in ("preset", "steps", "rate", "tokens", "streams")}
        write_results(options.results, what, command, rows, **about)


def train(run: Path, probability: float, options: argparse.Namespace) -> None:
    """Fine-tune, by the command."""
    warm_up = options.steps // 20
    values = {
        "--train.steps": options.steps, "--train.learning-rate": options.rate, "--train.warmup-steps": warm_up,
        "--train.decay-steps": options.steps - warm_up, "--train.eval-every": options.steps, "--train.sample-every": 0,
        "--train.reset-probability": probability, "--train.seed": 1, "--data.data-dir": options.data_dir,
        "--from": options.source, "--out": run,
    }  # fmt: skip
    words = [str(word) for pair in values.items() for word in pair]
    if code := compressive(["train", options.preset, *words]):
        sys.exit(code)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return bits since an empty memory, both forms of it, and bits of the test split."""
    run = Run.open(folder)
    trained, corpus = Trained.load(run, "last"), run.corpus(Path(options.data_dir))
    row: dict[str, Any] = {}
    for empty in ("zeros", "masked"):
        model = trained.model(transformer(trained.eval_config(empty_memory=empty).model))
        found = measure_memory(model, corpus.split("valid"), tokens=options.tokens)
        row[f"since_empty_{empty}"] = [
            {"first": since.first, "last": since.last, "bits": since.bits} for since in found.since_empty
        ]
        if empty == run.config.model.empty_memory:  # type: ignore[union-attr]
            row["full_memory_bits"] = found.conditions["everything"].mean
            row["compressed_memory_worth"] = found.compressed_worth and found.compressed_worth.mean
            row["test_bits"] = float(score(model, corpus.split("test"), streams=options.streams).mean()) / math.log(2)
    return row


def show(row: dict[str, Any]) -> None:
    """Print the figures of one run."""
    print(f"{row['name']} {row.get('reset_probability', '')}: test bits {row['test_bits']:.4f}")
    for form in ("zeros", "masked"):
        parts = [f"{at['last']}: {at['bits']:.3f}" for at in row[f"since_empty_{form}"]]
        print(f"  {form}, bits up to token {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
