"""Work shared out among processes: few jobs under way at a time, results in the order of the jobs.

A script that has work shared out must be importable without doing anything, as multiprocessing wants it.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

AHEAD = 4  # jobs under way for each process: some wait for one that takes longer


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int, begin: Callable[[], None] | None = None
) -> Iterator[Result]:
    """Do every job in one of so many processes, each of which calls `begin` first; give the results in order."""
    # Not forked: a process that has threads, as tokenizers leaves them, must not be.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (begin,))
    under_way: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            under_way.append(pool.submit(work, job))
            if len(under_way) == AHEAD * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"one of {workers} processes came to a sudden end, perhaps for want of memory: use fewer, as --workers 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(begin: Callable[[], None] | None) -> None:
    """Leave Ctrl-C to the parent, and end with it, even if it is killed: nobody else would end this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
