"""A run's folder: its configuration and its corpus; `trained.py` loads its model.

runs/NAME/config.json        the resolved configuration
         /tokenizer.json     the tokeniser of the corpus
         /corpus.json        name and fingerprint of the corpus
         /origin.json        the weights that it started from, if not random ones
         /environment.jsonl  versions, hardware, commit: one line per start or resume
         /metrics.jsonl      one record per logged step and per evaluation
         /samples/           text sampled during training
         /checkpoints/       the last two and the best
"""

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from compressive.config import RunConfig
from compressive.console import note, warn
from compressive.runs.shipped import EXCERPT, shipped, shipped_names, spelled
from compressive.runtime import describe_environment, write_atomically

if TYPE_CHECKING:
    from compressive.data.corpus import Corpus
    from compressive.data.tokenizer import Tokenizer


Config = TypeVar("Config")

CORPUS, ORIGIN, RELEASE = "corpus.json", "origin.json", "release.json"
"""A run's corpus, by name and fingerprint; the weights it started from; what a release has in place of checkpoints."""


@dataclass(frozen=True)
class Folder(Generic[Config]):
    """A training run on disk, with a configuration of any kind."""

    folder: Path
    config: Config
    fixed: ClassVar[tuple[str, ...]] = ()
    """Fields that a run keeps when it is resumed, or whole tables of them."""

    @classmethod
    def create(cls, folder: Path, config: Config) -> Self:
        """Create the folder of a run and write its configuration; a resumed run overwrites its configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = dataclasses.asdict(config)  # type: ignore[call-overload]
        write_atomically(folder / "config.json", json.dumps(tables, indent=1))
        return cls(folder, config)

    @classmethod
    def begin(cls, folder: Path, config: Config, resume: bool) -> Self:
        """Create the folder of a run, or open the one that is to go on; note the environment in environment.jsonl.

        Raises ValueError if it holds a run that is not to be resumed, one with other `fixed` values, or a release.
        """
        if (folder / RELEASE).exists():
            raise ValueError(
                f"{folder} is a release, which holds no state of training: resume the run it was made from"
            )
        metrics = folder / "metrics.jsonl"  # empty if the run failed before its first step
        started = (metrics.exists() and metrics.stat().st_size > 0) or any(folder.glob("checkpoints/step-*"))
        if started and not resume:
            raise ValueError(f"out={folder} holds a run already: continue it with --resume, or choose another --out")
        if resume and (folder / "config.json").exists():
            _refuse_changes(cls.open(folder).config, config, cls.fixed)
        if not resume:
            for name in (CORPUS, ORIGIN):  # of a start that failed
                (folder / name).unlink(missing_ok=True)
        run = cls.create(folder, config)
        environment = json.dumps(describe_environment())
        with (folder / "environment.jsonl").open("a", encoding="utf-8") as file:  # one line per start or resume
            file.write(environment + "\n")
        return run

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an existing run."""
        raise NotImplementedError

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"


def read_config(folder: Path, command: str) -> dict[str, Any]:
    """Read a run's config.json as tables.

    Raises FileNotFoundError, naming the training `command`, if there is none, and ValueError if it is no JSON object,
    or another program's.
    """
    path = folder / "config.json"
    try:
        tables = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        close = difflib.get_close_matches(str(folder), shipped_names(), n=1)
        raise FileNotFoundError(
            f"{folder} is not a run: it holds no config.json{f' (did you mean {close[0]}?)' if close else ''}; "
            f"train one: {command} PRESET --out {folder}; shipped models: {', '.join(shipped_names())}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {RESTORE}") from None
    if isinstance(tables, dict) and "model_type" in tables:  # a release; the other keys are Hugging Face's
        tables = {name: values for name, values in tables.items() if name in ("model", "data", "train")}
    if not isinstance(tables, dict) or not all(isinstance(values, dict) for values in tables.values()):
        raise ValueError(f"{path} is damaged (expected an object of tables); {RESTORE}")
    if tables.keys().isdisjoint(("model", "task")):
        raise ValueError(f"{folder} is not a run of ours: its config.json has no table `model`")
    return tables


def read_json(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Read an object with these keys from a file; raise ValueError, naming the file, if it is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
        return {key: found[key] for key in keys}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}): expected a JSON object with {', '.join(keys)}; restore it from a copy"
        ) from None


RESTORE = "restore it from a copy, or from the preset that the run was trained with: compressive config PRESET"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors about its values."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _flat(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return all values of nested tables as `table.field`, lists as tuples."""
    return {
        f"{table}.{name}": tuple(value) if isinstance(value, list) else value
        for table, values in tables.items()
        for name, value in values.items()
    }


def _refuse_changes(before: Any, now: Any, fixed: tuple[str, ...]) -> None:
    old, new = (_flat(dataclasses.asdict(config)) for config in (before, now))
    for name in new:
        if name.startswith(fixed) and old.get(name) != new[name]:
            raise ValueError(
                f"{name}={new[name]!r}: the run to be resumed has {old.get(name)!r}; give that, or begin another --out"
            )


class Run(Folder[RunConfig]):
    """A training run on text or audio, or a release."""

    fixed = (
        "model", "data.corpus", "train.batch", "train.unroll", "train.seed", "train.optimiser", "train.weight_average",
    )  # fmt: skip

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an existing run, or a shipped model by its name.

        Raises FileNotFoundError if there is none, ValueError if it is an agent's or damaged.
        """
        folder = shipped(folder)
        tables = read_config(folder, "compressive train")
        if "task" in tables:
            name = spelled(folder)
            raise ValueError(
                f"{name} is an agent's run: use compressive rl evaluate {name}, compressive rl watch {name} or "
                f"compressive rl train --resume {name}"
            )
        with naming(folder / "config.json"):
            return cls(folder, RunConfig.from_tables(tables))

    def keep_corpus(self, corpus: "Corpus") -> None:
        """Write the corpus's tokeniser and fingerprint into the run's folder, unless they are there."""
        if not (self.folder / CORPUS).exists():
            corpus.tokenizer.save(self.folder)
            about = {
                "name": corpus.name,
                "fingerprint": corpus.fingerprint,
                "tokenizer": corpus.manifest.tokenizer,
                "tokenizer_sha256": corpus.manifest.tokenizer_sha256,
            }
            write_atomically(self.folder / CORPUS, json.dumps(about, indent=1) + "\n")

    def configured_corpus(self, data_dir: Path | None = None) -> "Corpus":
        """Open the corpus that the configuration names, whatever the run was trained on: for a new run."""
        from compressive.data.corpus import Corpus

        return Corpus.open((data_dir or Path(self.config.data.data_dir)) / self.config.data.corpus)

    def corpus(self, data_dir: Path | None = None) -> "Corpus":
        """Open the run's corpus, from `data_dir` if given, else from the folder used in training.

        A release may hold an excerpt of its corpus, which is read where the corpus is not prepared. Raises ValueError
        if another corpus is there now. In a `data_dir` that was given, another text is allowed, with a warning, if its
        tokeniser is the run's.
        """
        from compressive.data.corpus import MANIFEST, Corpus

        excerpt, whole = self.folder / EXCERPT, Path(self.config.data.data_dir) / self.config.data.corpus
        if data_dir is None and excerpt.is_dir() and not (whole / MANIFEST).is_file():
            note(f"{whole} is not prepared: reading the excerpt that comes with {self.folder.name}")
            return Corpus.open(excerpt)
        corpus = self.configured_corpus(data_dir)
        if not (self.folder / CORPUS).exists():  # written by version 0.1, or not begun yet
            return corpus
        kept = read_json(self.folder / CORPUS, ("fingerprint", "tokenizer", "tokenizer_sha256"))
        if corpus.fingerprint == kept["fingerprint"]:
            return corpus
        remedy = (
            "prepare the run's own corpus in another data folder and name that, or train a new run; "
            f"compressive generate {self.folder} needs no corpus"
        )
        if corpus.manifest.tokenizer_sha256 != kept["tokenizer_sha256"]:
            raise ValueError(
                f"{corpus.folder} was prepared anew, with another tokeniser ({corpus.manifest.tokenizer}, "
                f"{corpus.vocab_size:,} tokens) than {self.folder} was trained with ({kept['tokenizer']}); {remedy}; "
                f"compressive data prepare --vocabulary {self.folder} keeps its tokeniser"
            )
        if kept["fingerprint"] is None:  # converted: any text in its vocabulary
            return corpus
        if data_dir is None:
            raise ValueError(
                f"{corpus.folder} was prepared anew: it holds other text than {self.folder} was trained on; {remedy}"
            )
        warn(f"{corpus.folder} holds other text than {self.folder} was trained on")
        return corpus

    def tokenizer(self, data_dir: Path | None = None) -> "Tokenizer":
        """Return the run's tokeniser, which its folder holds; runs of version 0.1 have it in their corpus."""
        from compressive.data.tokenizer import load_tokenizer, tokenizer_file

        kept = tokenizer_file(self.folder).is_file()
        return load_tokenizer(self.folder) if kept else self.corpus(data_dir).tokenizer
