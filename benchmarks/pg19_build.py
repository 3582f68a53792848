"""Speed of building PG-19 from raw texts, in one process, from reading to writing the log.

    python benchmarks/pg19_build.py SOURCE...     # folders or archives with raw texts of Project Gutenberg

The build runs twice: from the sources as given, and from the same texts in a plain folder, which excludes
decompression. Both wall-clock time and CPU time are printed; CPU time depends less on other load of the machine.
"""

import argparse
import contextlib
import io
import tempfile
import time
from pathlib import Path

from compressive.data.pg19.build import build
from compressive.data.pg19.raw import find_books, read, stream


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    sources = parser.parse_args().sources
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "plain")
        plain.mkdir()
        unpack(sources, plain)
        for label, given in (("as they are", sources), ("in a folder", [plain])):
            wall, cpu = time.perf_counter(), time.process_time()
            with contextlib.redirect_stderr(io.StringIO()):
                summary = build(given, Path(folder, label), "official", workers=1)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            size = sum(entry.raw_bytes or 0 for entry in summary.entries) / 1e6
            print(f"{label}: {len(summary.entries):,} books, {size:.1f} MB of raw text")
            print(f"  {size / wall:.1f} MB/s by wall clock, {size / cpu:.1f} MB/s by CPU time")


def unpack(sources: list[Path], folder: Path) -> None:
    """Write the raw text of each book that would be built to a folder."""
    found = find_books(sources)
    for raw, content in stream(found, lambda size: None):
        (folder / f"{raw.id}.txt").write_bytes(content)
    tars = {tar.path for tar in found.tars}
    for book_id in found.books:
        raw = found.ranked(book_id)[0]
        if raw.path not in tars:
            (folder / f"{raw.id}.txt").write_bytes(read(raw))


if __name__ == "__main__":
    main()
