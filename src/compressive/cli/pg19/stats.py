"""`compressive data pg19 stats`: print the paper's PG-19 tables for the built books."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from compressive.cli import run


@dataclass(frozen=True)
class Stats:
    """Print the paper's PG-19 tables for the built books."""

    built: Positional[Path]
    """Folder written by `compressive data pg19 build`."""
    json: bool = False
    """Print JSON instead of tables."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and count."""
    return run(stats, Stats, arguments, prog, "Print the paper's PG-19 tables for the built books.")


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
