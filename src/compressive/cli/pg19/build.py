"""`compressive data pg19 build`: build PG-19 from raw Project Gutenberg texts."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from compressive.cli import run

DESCRIPTION = """Build PG-19 from raw Project Gutenberg texts.

With --metadata official, or the release's metadata.csv, the listed books are built, with the official splits. Without
it, all English books are built that were published before 1919, judging by their own text, and are not very short;
they are split by a hash of their id. An interrupted build resumes, and unchanged books are not rebuilt."""


@dataclass(frozen=True)
class Build:
    """Build PG-19 from raw Project Gutenberg texts."""

    source: tyro.conf.UseAppendAction[tuple[Path, ...]]
    """Raw texts: a folder, a mirror, a .zip or a .tar (.xz, .gz, .bz2). May be repeated; earlier sources win."""
    out: Path
    """Folder for train/ID.txt, validation/ and test/, and for build.jsonl, with the outcome for each book."""
    metadata: str | None = None
    """Books to build: `official` for the list in this package, or a metadata.csv, plain, .xz or .gz."""
    workers: int = 0
    """Worker processes; 0: one per core."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and build."""
    return run(build, Build, arguments, prog, DESCRIPTION)


def build(options: Build) -> int:
    """Build and print a summary; after Ctrl-C the same command resumes."""
    from compressive.data.pg19 import build as pg19
    from compressive.data.workers import check_workers

    check_workers(options.workers)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"out={options.out}: is a file, expected a folder")
    try:
        print(pg19.build(options.source, options.out, options.metadata, options.workers))
    except KeyboardInterrupt:
        print("stopped: run the same command again to resume", file=sys.stderr)
        return 130
    return 0
