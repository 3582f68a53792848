"""`compressive data pg19 verify`: built books against the official ones, bit by bit."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from compressive.cli import run


@dataclass(frozen=True)
class Verify:
    """Compare built books with the official ones: exit code 0 if all that are there match, 1 if some do not."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """What `compressive data pg19 build` made: train/ID.txt, validation/, test/."""
    official: str = "official"
    """A list with other sizes and checksums than that of this package, with the same columns: plain, .xz or .gz."""
    json: bool = False
    """Print one JSON object and nothing else; it names every book."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words, then compare."""
    description = "Compare built books with the official ones by size and SHA-256."
    return run(verify, Verify, arguments, prog, description)


def verify(options: Verify) -> int:
    """Compare and print; the exit code says whether all is as it should be."""
    from compressive.data.pg19 import verify as room
    from compressive.data.pg19.catalogue import read_catalogue

    report = room.verify(options.folder, read_catalogue(options.official))
    print(json.dumps(asdict(report), indent=1) if options.json else report)
    return 0 if report.good else 1
