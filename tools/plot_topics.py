"""Plot a results file of PG-19's topics.

    python tools/plot_topics.py experiments/results/pg19-topics/2026-11-15-cpu.json docs/pg19-topics.png

`compressive data pg19 topics` writes the same JSON and the same figure when it learns topics.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from compressive.data.pg19.topics import Topic, Topics


def main() -> None:
    """Read the results file, write the PNG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="RESULTS", help="JSON with topics")
    parser.add_argument("png", type=Path, metavar="PNG", help="figure to write")
    options = parser.parse_args()
    found = json.loads(options.results.read_text("utf-8"))
    about = {field.name: found[field.name] for field in dataclasses.fields(Topics) if field.name != "topics"}
    Topics(**about, topics=[Topic(**topic) for topic in found["topics"]]).plot(options.png)


if __name__ == "__main__":
    main()
