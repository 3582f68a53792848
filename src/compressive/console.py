"""What commands print besides their results: progress, notes and warnings, all on stderr.

`--quiet` leaves only results and errors. Nothing here imports torch.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

SIGN_OF_LIFE = 60.0
"""Seconds between progress lines where stderr is no terminal."""

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Print results and errors only, in this process, or everything again."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Return whether only results and errors are to be printed."""
    return _quiet


def note(text: str) -> None:
    """Print a line on stderr, unless quiet; of torchrun's processes the first one speaks."""
    if not _quiet and _first():
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a line that begins with `warning:` on stderr, also if quiet; the first of torchrun's processes speaks."""
    if _first():
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def progress_bar(shown: bool = True) -> "Progress":
    """Return a progress bar that vanishes at the end, if `shown` and not quiet.

    Where stderr is no terminal, each task of it prints a line a minute.
    """
    from rich.console import Console
    from rich.progress import Progress, TaskID

    console = Console(stderr=True)
    said: dict[TaskID, float] = {}

    class Lines(Progress):
        """A bar that is not drawn."""

        def update(self, task_id: TaskID, **changes: Any) -> None:
            super().update(task_id, **changes)
            now = time.monotonic()
            if now - said.setdefault(task_id, now) >= SIGN_OF_LIFE:
                said[task_id] = now
                task = next(task for task in self.tasks if task.id == task_id)
                note(f"{task.description}: {task.completed:,.0f}{f' of {task.total:,.0f}' if task.total else ''}")

    if console.is_terminal or not shown:
        return Progress(console=console, transient=True, disable=not shown or _quiet)
    return Lines(console=console, disable=True)


@contextmanager
def bytes_read(label: str, total: int | None = None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show the progress of a long read; yields a function to call with each number of bytes read.

    A bar on a terminal. Elsewhere one line at the end, and one a minute before it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if console.is_terminal and not _quiet:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(label, total=total, completed=done)
            yield lambda size: bar.advance(task, size)
        return

    began = said = time.monotonic()
    whole = "" if total is None else f" of {total / 1e6:,.1f}"

    def advance(size: int) -> None:
        nonlocal done, said
        done += size
        if time.monotonic() - said >= SIGN_OF_LIFE:
            said = time.monotonic()
            note(f"{label}: {done / 1e6:,.1f}{whole} MB")

    yield advance
    note(f"{label}: {done / 1e6:,.1f} MB in {time.monotonic() - began:.1f} s")
