"""One of the processes that tests/test_distributed.py starts: trains runs in worlds of several processes."""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from compressive import CompressiveLM
from compressive.cli import guarded, leave
from compressive.config import RunConfig
from compressive.distributed import World, join
from compressive.runs.run import Run
from compressive.training import loop, step
from compressive.training.schedule import is_update


class FaultyOnOne(CompressiveLM):
    """Gives a loss of NaN at its fifth call, in the second process alone."""

    calls = 0

    def forward(self, tokens, memory, targets=None, starts=None):
        out = super().forward(tokens, memory, targets, starts)
        if self.training:
            type(self).calls += 1
            if type(self).calls == 5 and os.environ["RANK"] == "1":
                assert out.nll is not None
                return dataclasses.replace(out, nll=out.nll * float("nan"))
        return out


def train(world: World, folder: str, config: dict, dtype: str = "float64", fault: str = "") -> None:
    """Train one run; `fault` says what is to go wrong."""
    torch.set_default_dtype(getattr(torch, dtype))
    if fault == "nan on one":
        mock.patch.object(loop, "build_model", FaultyOnOne).start()
    if fault == "signal to all" or (fault == "signal to one" and world.rank == 1):

        def interrupted(number, options):
            if number == 7:
                signal.raise_signal(signal.SIGTERM)
            return is_update(number, options)

        mock.patch.object(step, "is_update", interrupted).start()
    if fault == "one cannot load" and world.rank == 1:

        def fail(*_):
            raise OSError("disk on fire")

        mock.patch.object(HuggingFaceStorageReader, "read_data", fail).start()
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
