"""Entry point of `python -m compressive` and of the script `compressive`."""

import ctypes
import io
import os
import sys
from typing import NoReturn

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""
MOST, MOST_ONCE = 2**31 - 1, 2**25
"""The largest thresholds that mallopt takes: today, and for mmap in glibc before 2.35, which refuses larger ones."""


def command() -> NoReturn:
    """Run the command line and exit."""
    # OpenMP's waiting threads spin. With more work than cores they take the cores from threads that have work. A short
    # spin trains the quickstart about twice as fast then, and as fast on an idle machine (docs/log.md). OpenMP reads it
    # when torch is imported; what the user has set stays.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):  # sampled text has characters that not every terminal has
        sys.stdout.reconfigure(errors="replace")
    try:
        from compressive.cli import leave, main
    except KeyboardInterrupt:
        sys.exit(130)
    leave(main())


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next tensors, unless the user has set its malloc otherwise.

    It hands large blocks back to the kernel, which then has to clear every page again: more than half of the time that
    a CPU takes to score text with a model of 54 million parameters (docs/log.md). Child processes do the same, by the
    environment. Other C libraries have no mallopt. Where the threshold of mmap cannot be set that of trim is left alone
    too: setting it alone would keep the other one at 128 KiB for good.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for most in (MOST, MOST_ONCE):
            if libc.mallopt(M_MMAP_THRESHOLD, most):
                libc.mallopt(M_TRIM_THRESHOLD, MOST)
                os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(most), "MALLOC_TRIM_THRESHOLD_": str(MOST)}
                return


if __name__ == "__main__":
    command()
