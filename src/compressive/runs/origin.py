"""The weights that a run starts from in place of random ones: origin.json in its folder.

It is written when the run is created. Until the run has a checkpoint of its own, every start reads these weights; from
then on it only says where they came from.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from compressive.runs.run import ORIGIN, Run, read_json
from compressive.runs.shipped import spelled
from compressive.runs.trained import Trained
from compressive.runtime import write_atomically


@dataclass(frozen=True)
class Origin:
    """Where a run's first weights came from."""

    source: str
    """Folder of the run or release, or the name of a shipped model."""
    step: int
    """Training steps of the weights."""
    corpus: str
    """Corpus that they were trained on."""
    sha256: str
    """Checksum of the weights."""

    @classmethod
    def of(cls, source: Run) -> Self:
        """Describe the best weights of a run or release; raise CheckpointError if it has none."""
        trained = Trained.load(source)
        return cls(spelled(source.folder), trained.step, source.config.data.corpus, _checksum(trained))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read origin.json from a run's folder; None for a run that started from random weights."""
        if not (folder / ORIGIN).is_file():
            return None
        return cls(**read_json(folder / ORIGIN, tuple(field.name for field in dataclasses.fields(cls))))

    def write(self, folder: Path) -> None:
        """Write origin.json."""
        write_atomically(folder / ORIGIN, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def load(self) -> Trained:
        """Read the weights; raise ValueError if others are there now."""
        trained = Trained.load(Run.open(Path(self.source)))
        if _checksum(trained) != self.sha256:
            raise ValueError(
                f"{self.source} holds other weights (step {trained.step}) than this run was to start from "
                f"(step {self.step}): begin another --out with --from {self.source}"
            )
        return trained


def _checksum(trained: Trained) -> str:
    sums = hashlib.sha256()
    for name, tensor in sorted(trained.weights.items()):
        sums.update(name.encode())
        sums.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return sums.hexdigest()
