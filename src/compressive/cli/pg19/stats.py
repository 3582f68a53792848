"""`compressive data pg19 stats`: the paper's tables of PG-19, from the built books."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from compressive.cli import run


@dataclass(frozen=True)
class Stats:
    """The paper's tables of PG-19, from the built books."""

    built: Positional[Path]
    """Folder that `compressive data pg19 build` wrote."""
    json: bool = False
    """Print JSON in place of tables."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words, then count."""
    return run(stats, Stats, arguments, prog, "The paper's tables of PG-19, from the built books.")


def stats(options: Stats) -> int:
    """Count and print."""
    import json

    from rich.console import Console

    from compressive.data.pg19.stats import measure, tables

    splits = measure(options.built)
    if options.json:
        print(json.dumps({name: split.as_dict() for name, split in splits.items()}, indent=1))
    else:
        Console().print(*tables(splits), sep="\n")
    return 0
