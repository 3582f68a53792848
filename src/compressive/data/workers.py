"""A process pool with a bounded queue; results come in the order of the jobs.

Processes are spawned, so a script that uses them needs an `if __name__ == "__main__"` guard.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

AHEAD = 4  # jobs in flight per process, so that a slow job does not idle the others
PER_CORE = 16
"""Most processes per core: more would only take memory."""


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(workers: int) -> None:
    """Raise ValueError unless this many processes can work; 0 stands for one per core."""
    most = PER_CORE * cores()
    if not 0 <= workers <= most:
        raise ValueError(f"workers={workers}: expected at least 1, at most {most} here, or 0 for one per core")


def in_order(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int, begin: Callable[[], None] | None = None
) -> Generator[Result, None, None]:
    """Run every job in one of `workers` processes and yield results in order; each process calls `begin` first.

    Raises ChildProcessError if a process dies.
    """
    # Spawned, not forked: forking is unsafe with threads, which tokenizers may have started.
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
            f"one of {workers} processes died, perhaps out of memory: use fewer, e.g. --workers 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(begin: Callable[[], None] | None) -> None:
    """Ignore Ctrl-C, which the parent handles, and exit when the parent exits, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
