"""A run's folder: its configuration, and the way from there to its corpus; `trained.py` has the way to its model.

runs/NAME/config.json        the resolved configuration
         /environment.json   versions, hardware, commit
         /metrics.jsonl      one line per logged step and per evaluation
         /samples/           text sampled while training
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
    """A training run on disk, of whatever kind."""

    folder: Path
    config: Config

    @classmethod
    def create(cls, folder: Path, config: Config) -> Self:
        """Begin a run in a folder that holds none yet, or write down what a resumed one is told."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = dataclasses.asdict(config)  # type: ignore[call-overload]
        (folder / "config.json").write_text(json.dumps(tables, indent=1), "utf-8")
        return cls(folder, config)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are kept."""
        return self.folder / "checkpoints"


def read_config(folder: Path, command: str) -> dict[str, Any]:
    """Read a run's configuration, as tables; `command` is what trains one."""
    try:
        tables: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} is not a run: it holds no config.json; train one: {command} PRESET --out {folder}"
        ) from None
    return tables


class Run(Folder[RunConfig]):
    """A training run on text or sound."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an existing run."""
        return cls(folder, RunConfig.from_tables(read_config(folder, "compressive train")))

    def corpus(self, data_dir: Path | None = None) -> "Corpus":
        """Open the corpus that the run was trained on."""
        from compressive.data.corpus import Corpus

        return Corpus.open((data_dir or Path(self.config.data.data_dir)) / self.config.data.corpus)

    def tokenizer(self, data_dir: Path | None = None) -> "Tokenizer":
        """Return the tokeniser of the run's corpus; a release has it beside its weights."""
        from compressive.data.tokenizer import FILE, load_tokenizer

        return load_tokenizer(self.folder) if (self.folder / FILE).is_file() else self.corpus(data_dir).tokenizer
