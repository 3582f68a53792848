"""One of the processes that tests/test_parallel.py starts: trains runs in worlds of several processes."""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import torch

from compressive import CompressiveLM
from compressive.cli import guarded, leave
from compressive.config import RunConfig
from compressive.distributed import World, join
from compressive.runs import checkpoint
from compressive.runs.run import Run
from compressive.training import loop, step


class FaultyOnOne(CompressiveLM):
    """Gives a loss of NaN at its fifth call, in the second process alone."""

    calls = 0

    def forward(self, tokens, memory, targets=None, starts=None):
        out = super().forward(tokens, memory, targets, starts)
        if self.training:
            type(self).calls += 1
            if type(self).calls == 5 and os.environ["RANK"] == "1":
                return dataclasses.replace(out, nll=out.nll * float("nan"))
        return out


def train(world: World, folder: str, config: dict, dtype: str = "float64", fault: str = "") -> None:
    """Train one run; `fault` says what is to go wrong."""
    torch.set_default_dtype(getattr(torch, dtype))
    if fault == "nan on one":
        loop.build_model = FaultyOnOne
    if fault == "signal to all" or (fault == "signal to one" and world.rank == 1):
        real = step.is_update

        def interrupted(number, options):
            if number == 7:
                signal.raise_signal(signal.SIGTERM)
            return real(number, options)

        step.is_update = interrupted
    if fault == "one cannot load" and world.rank == 1:

        def fail(*_):
            raise OSError("disk on fire")

        checkpoint.HuggingFaceStorageReader.read_data = fail
    run = world.first(lambda: Run.create(Path(folder), RunConfig.from_tables(config)))
    code = loop.train(run, world)
    (Path(folder) / f"code-{world.rank}").write_text(str(code))


def work() -> int:
    """Do the jobs of the file that is named, as a command would."""
    with join("cpu") as world:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            train(world, **job)
    return 0


if __name__ == "__main__":
    leave(guarded(work, "parallel_worker"))
