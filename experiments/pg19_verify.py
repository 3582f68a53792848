"""Build PG-19 from raw texts, compare it with the official texts, and compare inferred years with the official ones.

    python experiments/pg19_verify.py SOURCE... --results experiments/results/pg19-verify/DATE-cpu.json

SOURCE is a folder or an archive with raw texts of Project Gutenberg.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from compressive.data.pg19.build import LATEST, build
from compressive.data.pg19.catalogue import official
from compressive.data.pg19.verify import verify


def main() -> None:
    """Build with and without the official list, compare, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        listed = build(options.sources, Path(folder, "listed"), "official", workers=0)
        report = verify(Path(folder, "listed"), official())
        unlisted = build(options.sources, Path(folder, "unlisted"), None, workers=0)
    print(listed, report, unlisted, sep="\n")

    told = {entry.id: entry.year for entry in unlisted.entries if entry.year is not None}
    off = [told[book_id] - year for book_id in told if (year := official()[book_id].year) is not None]
    names = " ".join(path.name for path in options.sources)
    results = {
        "what": "PG-19 built from raw Project Gutenberg texts: how many come out as the official texts, bit by bit, "
        "and how far the years that are inferred without a list are from the official ones",
        "command": f"python experiments/pg19_verify.py {names} --results {options.results}",
        "verify": {
            "command": "compressive data pg19 verify OUT --json",
            "built": report.built,
            "matched": len(report.matched),
            "share": round(len(report.matched) / report.built, 4),
            "different_bytes_ours_minus_official": report.different,
            "wrong_split": len(report.wrong_split),
            "unknown": len(report.unknown),
            "missing": {split: len(ids) for split, ids in report.missing.items()},
        },
        "inferred_years": {
            "books": len(unlisted.entries),
            "inferred": len(off),
            **{f"within_{years}": sum(abs(difference) <= years for difference in off) for years in (0, 1, 5, 10)},
            f"inferred_{LATEST}_or_before": sum(year <= LATEST for year in told.values()),
            "by_sign": counts(entry.year_from for entry in unlisted.entries),
            "dropped": counts(entry.reason for entry in unlisted.entries if entry.reason),
        },
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def counts(words: Iterable[str]) -> dict[str, int]:
    """Return how often each occurs, the most frequent first; keys have no spaces."""
    return {word.replace(" ", "_"): count for word, count in Counter(words).most_common()}


if __name__ == "__main__":
    main()
