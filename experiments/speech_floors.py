"""Baselines without a neural network on prepared speech, and linear prediction that adapts faster.

    python experiments/speech_floors.py --data-dir data --corpus speech \
        --results experiments/results/speech-floors/DATE-cpu.json

The test split is also coded by linear prediction with several refit intervals, fit lengths and width decays.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from compressive.bench import write_results
from compressive.data.corpus import Corpus
from compressive.speech.floors import DECAY, FRAME, ORDER, REACH, floors, linear_prediction

FINER = [(120, 480, 0.99), (120, 480, 0.9), (60, 720, 0.99), (60, 720, 0.9), (30, 720, 0.9), (30, 720, 0.8)]
"""Samples between two fits, samples that each fit uses, decay of the error width."""


def main() -> int:
    """Compute, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--corpus", default="speech")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    corpus = Corpus.open(options.data_dir / options.corpus)
    test = np.asarray(corpus.split("test"))
    rows = [
        {"name": f"{split} split", "samples": len(corpus.split(split))} | floors(corpus, split)
        for split in ("valid", "test")
    ]
    for frame, reach, decay in FINER:
        bits = linear_prediction(test, ORDER, frame, reach, decay)
        rows.append({"name": f"test split, fit every {frame} to {reach}, decay {decay}", "linear_prediction": bits})
        print(json.dumps(rows[-1]), flush=True)
    about = {"corpus": corpus.manifest.sources, "floor_settings": {"frame": FRAME, "reach": REACH, "decay": DECAY}}
    write_results(options.results, "bits per mu-law sample", " ".join(["python", *sys.argv]), rows, **about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
