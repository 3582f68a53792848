"""Entry point of `python -m compressive` and of the script `compressive`."""

import io
import os
import sys
from typing import NoReturn


def command() -> NoReturn:
    """Run the command line and exit."""
    # OpenMP's waiting threads spin. With more work than cores they take the cores from threads that have work. A short
    # spin trains the quickstart about twice as fast then, and as fast on an idle machine (docs/log.md). OpenMP reads it
    # when torch is imported; what the user has set stays.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if isinstance(sys.stdout, io.TextIOWrapper):  # sampled text has characters that not every terminal has
        sys.stdout.reconfigure(errors="replace")
    try:
        from compressive.cli import leave, main
    except KeyboardInterrupt:
        sys.exit(130)
    leave(main())


if __name__ == "__main__":
    command()
