"""A run's folder: its configuration and its corpus; `trained.py` loads its model.

runs/NAME/config.json        the resolved configuration
         /environment.jsonl  versions, hardware, commit: one line per start or resume
         /metrics.jsonl      one record per logged step and per evaluation
         /samples/           text sampled during training
         /checkpoints/       the last two and the best
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from compressive.config import RunConfig

if TYPE_CHECKING:
    from compressive.data.corpus import Corpus
    from compressive.data.tokenizer import Tokenizer


Config = TypeVar("Config")


@dataclass(frozen=True)
class Folder(Generic[Config]):
    """A training run on disk, with a configuration of any kind."""

    folder: Path
    config: Config

    @classmethod
    def create(cls, folder: Path, config: Config) -> Self:
        """Create the folder of a run and write its configuration; a resumed run overwrites its configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = dataclasses.asdict(config)  # type: ignore[call-overload]
        (folder / "config.json").write_text(json.dumps(tables, indent=1), "utf-8")
        return cls(folder, config)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"


def read_config(folder: Path, command: str) -> dict[str, Any]:
    """Read a run's config.json as tables; raise FileNotFoundError, naming the training `command`, if it is missing."""
    try:
        tables: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} is not a run: it holds no config.json; train one: {command} PRESET --out {folder}"
        ) from None
    return tables


class Run(Folder[RunConfig]):
    """A training run on text or audio."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an existing run."""
        return cls(folder, RunConfig.from_tables(read_config(folder, "compressive train")))

    def corpus(self, data_dir: Path | None = None) -> "Corpus":
        """Open the run's corpus, from `data_dir` if given, else from the folder used in training."""
        from compressive.data.corpus import Corpus

        return Corpus.open((data_dir or Path(self.config.data.data_dir)) / self.config.data.corpus)

    def tokenizer(self, data_dir: Path | None = None) -> "Tokenizer":
        """Return the run's tokeniser; a release holds it itself."""
        from compressive.data.tokenizer import FILE, load_tokenizer

        return load_tokenizer(self.folder) if (self.folder / FILE).is_file() else self.corpus(data_dir).tokenizer
