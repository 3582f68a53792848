"""Your own text in ten lines: prepare it, train a tiny model, score it, sample from it.

python examples/own_data.py
python examples/own_data.py notes.txt more/*.txt --steps 2000 --out my-run

Every line is a command: `main(["train", "quickstart", "--out", "runs/mine"])` in Python does what
`compressive train quickstart --out runs/mine` does in a shell. The default, 150 steps of a tiny model on one book of
this repository, takes seconds on a CPU; its sample is gibberish. Readable samples need some megabytes of text and a few
thousand steps of a larger model. Other texts need another --out: a corpus is not replaced unasked.
"""

import argparse
import json
from pathlib import Path

from compressive.cli import main

BOOKS = Path(__file__).parent.parent / "books" / "train"
TINY = ["--model.n-layers", "2", "--model.d-model", "64", "--model.d-ff", "128", "--train.batch", "8"]


def command(*words: object) -> None:
    """Run one command of `compressive`, and stop where it fails."""
    if code := main([str(word) for word in words]):
        raise SystemExit(code)


def own_data(texts: list[Path], steps: int, out: Path) -> float:
    """Prepare the texts, train, score and sample; return the test loss in bits per character."""
    data, run = out / "data", out / "run"
    command("data", "prepare", "text", *texts, "--name", "mine", "--data-dir", data)
    command(
        "train", "quickstart", "--data.corpus", "mine", "--data.data-dir", data, *TINY,
        "--train.steps", steps, "--train.eval-every", 0, "--train.sample-every", 0, "--out", run, "--resume",
    )  # fmt: skip
    command("evaluate", run, "--split", "test", "--which", "last", "--limit", 20_000)
    command("generate", run, "--which", "last", "--prompt", "It was a ", "--length", 200)
    (scores,) = (run / "evaluation").glob("test*.json")
    return float(json.loads(scores.read_text("utf-8"))["bits_per_character"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="*", default=sorted(BOOKS.glob("*.txt"))[:1])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/own-data"))
    options = parser.parse_args()
    bits = own_data(options.texts, options.steps, options.out)
    print(f"test: {bits:.3f} bits per character after {options.steps} steps; {options.out / 'run'} holds the model")
