"""Progress of long reads: a bar on a terminal, two plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int | None = None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr; yields a function to call with each number of bytes read."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(label, total=total, completed=done)
            yield lambda size: bar.advance(task, size)
        return

    whole = "" if total is None else f" {total / 1e6:,.1f} MB"
    print(
        f"{label}:{whole} from {done / 1e6:,.1f} MB on" if done else f"{label}:{whole or ' started'}", file=sys.stderr
    )
    begin = time.monotonic()

    def advance(size: int) -> None:
        nonlocal done
        done += size

    yield advance
    print(f"{label}: {done / 1e6:,.1f} MB in {time.monotonic() - begin:.1f} s", file=sys.stderr)
