"""Compare rules for counting words with the word counts that the paper gives for PG-19.

    compressive data pg19 build ...                                 # writes the folder BUILT
    python experiments/pg19_words.py BUILT --results experiments/results/pg19-words/DATE-cpu.json

Only some books of each split are at hand, but the size in bytes of all of them is known. For each rule, words per byte
of the books at hand times the bytes of the whole split estimates the words of the split. The standard error is that of
this ratio estimate for books sampled at random without replacement.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from compressive.data.pg19.catalogue import official
from compressive.data.pg19.stats import books
from compressive.data.pg19.words import OFFICIAL, count_words

FloatArray = npt.NDArray[np.float64]


def runs(pattern: str) -> Callable[[str], int]:
    """Return the rule that counts the matches of a pattern."""
    return lambda text: len(re.findall(pattern, text))


LETTER = r"[^\W\d_]"
# The first is the one that this package counts words by.
RULES: dict[str, Callable[[str], int]] = {
    "between ASCII white space": lambda text: count_words(text.encode()),
    "between any white space": lambda text: len(text.split()),
    "between spaces only": lambda text: len(text.split(" ")),
    "between white space, with a letter or digit": lambda text: sum(bool(re.search(r"\w", w)) for w in text.split()),
    "between white space, with a letter": lambda text: sum(bool(re.search(LETTER, w)) for w in text.split()),
    "between white space, ends stripped, letters only": lambda text: sum(
        re.sub(r"^[\W_]+|[\W_]+$", "", word).isalpha() for word in text.split()
    ),
    "between white space or double hyphens": lambda text: len(text.replace("--", " ").split()),
    "between white space, and line ends": lambda text: len(text.split()) + text.count("\n"),
    "runs of letters": runs(f"{LETTER}+"),
    "runs of letters, inner apostrophes": runs(f"{LETTER}+(?:['’]{LETTER}+)*"),
    "runs of letters, inner apostrophes and hyphens": runs(f"{LETTER}+(?:['’-]{LETTER}+)*"),
    "runs of letters and digits": runs(r"\w+"),
    "runs of letters and digits, inner apostrophes": runs(r"\w+(?:['’]\w+)*"),
    "runs of letters and digits, inner apostrophes and hyphens": runs(r"\w+(?:['’-]\w+)*"),
    "runs of two or more letters and digits": runs(r"\b\w\w+\b"),
    "runs of letters and digits, runs of punctuation": runs(r"\w+|[^\w\s]+"),
    "runs of letters and digits, each punctuation mark": runs(r"\w+|[^\w\s]"),
}


def main() -> int:
    """Count by each rule and write the estimates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("built", type=Path, help="folder with train/, validation/ and test/")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()

    at_hand: dict[str, dict[str, float]] = {}
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in RULES}
    for split, whole in OFFICIAL.items():
        paths = books(options.built, split)
        counts = np.array([[rule(path.read_text("utf-8")) for rule in RULES.values()] for path in paths], float)
        sizes = np.array([official()[int(path.stem)].bytes for path in paths], float)
        at_hand[split] = {"books": len(paths), "of": whole.books, "share_of_bytes": sizes.sum() / whole.bytes}
        for name, words in zip(RULES, counts.T, strict=True):
            estimate, error = (whole.bytes * value for value in ratio(words, sizes, whole.books))
            found[name][split] = {
                "estimate": round(estimate),
                "standard_error": round(error),
                "official": whole.words,
                "ratio": round(estimate / whole.words, 4),
                "ratio_standard_error": round(error / whole.words, 4),
            }
            print(f"{split:<10} {estimate / whole.words:.4f} ± {error / whole.words:.4f}  {name}")
    result = {
        "what": "words of each PG-19 split by several rules, estimated from the books at hand, and as published",
        "command": f"python experiments/pg19_words.py BUILT --results {options.results}",
        "at_hand": at_hand,
        "note": "standard errors assume books sampled at random; these are the books that were available",
        "rules": {re.sub(r"\W+", "_", name.lower()): splits for name, splits in found.items()},
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


def ratio(words: FloatArray, sizes: FloatArray, population: int) -> tuple[float, float]:
    """Return words per byte of all books, estimated from some of them, and the standard error."""
    value = words.sum() / sizes.sum()
    spread = np.square(words - value * sizes).sum() / (len(words) - 1)
    return float(value), math.sqrt((1 - len(words) / population) * spread / len(words)) / sizes.mean()


if __name__ == "__main__":
    sys.exit(main())
