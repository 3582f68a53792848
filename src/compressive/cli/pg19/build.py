"""`compressive data pg19 build`: PG-19 from raw Project Gutenberg texts."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from compressive.cli import run

DESCRIPTION = """Build PG-19 from raw Project Gutenberg texts.

With --metadata official, or the release's metadata.csv, the books of that list are built, with the official splits.
Without, all English books that were published before 1919, as far as their own text tells, and are not very short,
split by a hash of their id. Killed and run again, it goes on from where it was; what has not changed is left alone."""


@dataclass(frozen=True)
class Build:
    """Build PG-19 from raw Project Gutenberg texts."""

    source: tyro.conf.UseAppendAction[tuple[Path, ...]]
    """Raw texts: a folder, a mirror, a .zip or a .tar (.xz, .gz, .bz2). Repeat it for several: the first goes first."""
    out: Path
    """Folder for train/ID.txt, validation/ and test/, and for build.jsonl, which says what became of each book."""
    metadata: str | None = None
    """Which books to build: official, for the list in this package, or a metadata.csv, plain, .xz or .gz."""
    workers: int = 0
    """Processes that build; 0: one per core."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words, then build."""
    return run(build, Build, arguments, prog, DESCRIPTION)


def build(options: Build) -> int:
    """Build; after Ctrl-C the same command goes on from there."""
    from compressive.data.pg19 import build as room

    try:
        print(room.build(options.source, options.out, options.metadata, options.workers))
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130
    return 0
