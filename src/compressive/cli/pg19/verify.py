"""`compressive data pg19 verify`: compare built books with the official ones by SHA-256."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from compressive.cli import run


@dataclass(frozen=True)
class Verify:
    """Compare built books with the official ones: exit code 0 if every built book matches, else 1."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder written by `compressive data pg19 build`: train/ID.txt, validation/, test/."""
    official: str = "official"
    """List of sizes and checksums: `official` for the one in this package, or a file with its columns."""
    json: bool = False
    """Print one JSON object, which lists every book, instead of text."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and compare."""
    description = "Compare built books with the official ones by size and SHA-256."
    return run(verify, Verify, arguments, prog, description)


def verify(options: Verify) -> int:
    """Compare and print; return 0 if every built book matches, else 1."""
    from compressive.data.pg19 import verify as pg19
    from compressive.data.pg19.catalogue import read_catalogue

    report = pg19.verify(options.folder, read_catalogue(options.official))
    print(json.dumps(asdict(report), indent=1) if options.json else report)
    return 0 if report.good else 1
