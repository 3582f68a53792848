"""The command line, of which one process is killed at a known moment: `killed_worker.py STEP RANK WORDS...`.

The process of that rank kills itself as soon as the checkpoint of that step is whole. A test that watched from outside
would have to be quick enough to see it.
"""

import os
import signal
import sys
import time
from typing import Any

from compressive.cli import leave, main
from compressive.runs.checkpoint import Saver

fatal_step, victim = map(int, sys.argv[1:3])
save = Saver.save


def save_and_die(self: Saver, step: int, *rest: Any, **options: Any) -> None:
    save(self, step, *rest, **options)
    if step == fatal_step and int(os.environ.get("RANK", "0")) == victim:
        while not (self.folder / f"step-{step:08d}").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


Saver.save = save_and_die  # type: ignore[method-assign]
leave(main(sys.argv[3:]))
