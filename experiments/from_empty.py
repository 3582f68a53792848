"""Fine-tune a run with memory emptied now and then, and measure bits by the number of tokens since an empty memory.

    python experiments/from_empty.py --source runs/quickstart --probabilities 0 0.02 0.1 --results FILE

Each probability is one run of `steps` steps from the same weights, on the same text in the same order; 0 is the
control. Measured on the validation split: bits of the first window after an empty memory, zeros or masked, at random
places, the same for all runs; and the difference to the control, paired by place. Measured with memory carried
through: bits per token of the test split, and of the validation split once memories are full, which resets could cost.
A run that is there already is not trained again.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from compressive.analysis.memory import measure_memory
from compressive.analysis.reading import Floats
from compressive.bench import write_results
from compressive.cli import main as compressive
from compressive.config.model import transformer
from compressive.data.tokenizer import Tokens
from compressive.evaluation.score import score
from compressive.model.language_model import CompressiveLM
from compressive.runs.run import ORIGIN, Run
from compressive.runs.trained import Trained

FORMS: tuple[Literal["zeros"], Literal["masked"]] = "zeros", "masked"


def main() -> None:
    """Train, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--also", type=Path, nargs="*", default=[], metavar="RUN", help="other runs to measure")
    parser.add_argument("--preset", default="quickstart", help="(default: %(default)s)")
    parser.add_argument("--source", type=Path, default=Path("runs/quickstart"), help="(default: %(default)s)")
    parser.add_argument("--probabilities", type=float, nargs="+", default=[0, 0.02, 0.1], help="(default: 0 0.02 0.1)")
    parser.add_argument("--steps", type=int, default=500, help="steps of each run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens to measure on (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=2000, help="windows from empty (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="streams of the test split (default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="folder of prepared corpora (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/from-empty"), help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    control: dict[str, Floats] = {}
    tuned = {probability: options.out / f"reset-{probability:g}" for probability in options.probabilities}
    for probability, run in tuned.items():
        if not (run / "checkpoints").exists():
            train(run, probability, options)
    for run in [options.source, *tuned.values(), *options.also]:
        row, found = measure(run, options)
        control = found if run == tuned.get(0) else control
        row["first_window"] = {empty: ranges(bits, control.get(empty)) for empty, bits in found.items()}
        rows.append(row)
        show(row)
    if options.results:
        what, command = "bits since an empty memory, with and without resets", " ".join(["python", *sys.argv])
        about = {name: getattr(options, name) for name in ("preset", "steps", "rate", "tokens", "starts", "streams")}
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


def measure(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Floats]]:
    """Return figures with memory carried through, and bits of the first window for both forms of an empty memory."""
    run = Run.open(folder)
    trained, corpus = Trained.load(run, "last"), run.corpus(Path(options.data_dir))
    models = {empty: trained.model(transformer(trained.eval_config(empty_memory=empty).model)) for empty in FORMS}
    own = models[transformer(run.config.model).empty_memory]
    used = measure_memory(own, corpus.split("valid"), tokens=options.tokens)
    row = {
        "run": folder.name,
        "fine_tuned": (folder / ORIGIN).exists(),
        "reset_probability": run.config.train.reset_probability,
        "training_steps": trained.step,
        "test_bits": float(score(own, corpus.split("test"), streams=options.streams).mean()) / math.log(2),
        "full_memory_bits": used.conditions["everything"].mean,
        "compressed_memory_worth": None if used.compressed_worth is None else used.compressed_worth.mean,
    }
    return row, {empty: first_window(model, corpus.split("valid"), options.starts) for empty, model in models.items()}


@torch.no_grad()
def first_window(model: CompressiveLM, text: Tokens, starts: int, batch: int = 50) -> Floats:
    """Read one window from an empty memory at random places of a text (n,); bits of every token, (starts, window)."""
    window = model.config.window
    places = np.random.default_rng(0).integers(len(text) - window, size=starts)
    rows = torch.from_numpy(np.stack([text[place : place + window + 1] for place in places]).astype(np.int64))
    nats = [model(x[:, :-1], model.initial_memory(len(x)), targets=x[:, 1:]).nll for x in rows.split(batch)]
    return torch.cat(nats).double().numpy() / math.log(2)


def ranges(bits: Floats, control: Floats | None) -> list[dict[str, float]]:
    """Return bits by tokens read since the start, in ranges up to powers of two, and by how much they are below."""
    lasts = [2**i for i in range(64) if 2**i < bits.shape[1]] + [bits.shape[1]]
    found: list[dict[str, float]] = []
    for first, last in itertools.pairwise([0, *lasts]):
        found.append({"first": first + 1, "last": last, "bits": float(bits[:, first:last].mean())})
        if control is not None:
            below = (control - bits)[:, first:last].mean(axis=1)
            found[-1] |= {"below_control": float(below.mean())}
            found[-1] |= {"error": float(below.std(ddof=1)) / math.sqrt(len(below))}
    return found


def show(row: dict[str, Any]) -> None:
    """Print the figures of one run."""
    print(f"{row['run']}, reset probability {row['reset_probability']}: test bits {row['test_bits']:.4f}")
    for empty, parts in row["first_window"].items():
        figures = [f"{part['last']}: {part['bits']:.3f} ({part.get('below_control', 0):.3f})" for part in parts]
        print(f"  {empty}, bits up to token (below the control): {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
