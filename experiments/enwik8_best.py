"""The best Compressive Transformer on enwik8 that minutes of one GPU give: trained, scored and packed.

    compressive data prepare enwik8
    python experiments/enwik8_best.py --results experiments/results/enwik8-best/DATE-h200.json

Two runs of the preset `enwik8-best`, by `compressive train`. The first has short memories and no dropout, which make a
step cheaper, and a constant rate. The second starts from its weights, and its rate falls to zero. Then
`tools/ship.py` writes the weights in 8 bits to `--weights`, and scores them: memory sizes and the rate of dynamic
evaluation are chosen on validation, for the whole test split. A run that is finished is not trained again, one that was
cut off goes on; `--retries` does so by itself after a crash.
"""

import argparse
import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from compressive.console import note, warn
from compressive.training.loop import INTERRUPTED

PRESET = "enwik8-best"


def main() -> None:
    """Train, then score and pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-steps", type=int, default=21_000, help="steps of the first run (default: %(default)s)")
    parser.add_argument("--first-memory", type=int, default=256, help="its recent slots (default: %(default)s)")
    parser.add_argument("--first-compressed", type=int, default=128, help="its compressed slots (default: %(default)s)")
    parser.add_argument("--flags", default="", help="more flags of both runs, for `compressive train`")
    parser.add_argument("--retries", type=int, default=0, help="how often a run that crashed goes on (default: 0)")
    parser.add_argument("--scoring", default="", help="more flags of tools/ship.py")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of both runs (default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="folder to write (default: enwik8-best-release beside the runs)")
    parser.add_argument("--results", type=Path, required=True, help="results file to write")
    options = parser.parse_args()
    weights = options.weights or options.out / f"{PRESET}-release"
    if (weights / "README.md").exists():
        parser.error(f"--weights {weights}: holds a model already; name another folder")
    first, best, flags = options.out / f"{PRESET}-first", options.out / PRESET, shlex.split(options.flags)
    cheaper = ["--model.memory-size", options.first_memory, "--model.compressed-size", options.first_compressed]
    cheaper += ["--model.dropout", 0]
    constant = ["--train.steps", options.first_steps, "--train.hold-steps", options.first_steps]
    train([*flags, *cheaper, *constant, "--out", first], options.retries)
    train([*flags, "--from", first, "--out", best], options.retries)
    ship = [Path(__file__).parents[1] / "tools" / "ship.py", best, "--results", options.results]
    how = ["--out", weights, "--precision", "int8", "--shard-size", 15, "--arithmetic", "bf16"]
    subprocess.run(words([sys.executable, *ship, *how, *shlex.split(options.scoring)]), check=True)


def train(flags: list[object], retries: int) -> None:
    """Train to the end, going on from the last checkpoint after each crash, but not after a signal."""
    command = words([sys.executable, "-m", "compressive", "train", PRESET, *flags, "--resume"])
    note(shlex.join(command[1:]))
    while code := finished(command):
        if code == INTERRUPTED or retries <= 0:
            raise SystemExit(code)
        retries -= 1
        warn(f"training ended with code {code}; it goes on from its last checkpoint")


def finished(command: list[str]) -> int:
    """Run a command to its end and return its code; Ctrl-C reaches it as well, and it saves before it ends."""
    process = subprocess.Popen(command)
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def words(command: Iterable[object]) -> list[str]:
    """The words of a command."""
    return [str(word) for word in command]


if __name__ == "__main__":
    main()
