"""What training starts from: a preset, a configuration file, or a run that goes on. For `train` and `rl train`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from compressive.cli import given_fields, perhaps
from compressive.config import preset_names
from compressive.config.presets import field_names, load_file, load_preset

Config = TypeVar("Config")
OTHER = {"data": ("task", "an agent's", "compressive rl train"), "task": ("data", "a model's", "compressive train")}
"""For each kind of preset, by the table that it holds: the other kind, whose it is, and its command."""


@dataclass(frozen=True)
class Start(Generic[Config]):
    """A configuration, where its run lives, and the arguments that may still override it."""

    config: Config
    name: str  # of the preset, file or run
    out: Path
    resume: bool
    given: set[str]  # fields that the user set, in flags or in a file of their own
    arguments: list[str]


def starting_point(
    arguments: list[str], kind: Any, open_run: Callable[[Path], Any], holding: str, shown: str
) -> Start[Any]:
    """Take `PRESET`, `--config FILE` or `--resume RUN` from the arguments.

    `kind` is the class of the configuration, `holding` a table that its presets hold, `shown` the preset for --help
    alone. Raises ValueError if there is no starting point, or more than one.
    """
    words = list(arguments)
    preset = words.pop(0) if words and not words[0].startswith("-") else None
    file = _take(words, "--config")
    if preset is not None and file is not None:
        raise ValueError(f"preset {preset!r} and --config {file}: give one of them")
    if file is not None:
        tables, given = load_file(Path(file))
        name = Path(file).stem
        return Start(kind.from_tables(tables), name, Path("runs") / name, False, given | given_fields(words), words)
    if preset is None and (run := _take(words, "--resume")) is not None:
        folder = Path(run)
        config = open_run(folder).config
        if any(word.split("=")[0] == "--out" for word in words):
            raise ValueError(f"--resume {run} and --out: a run goes on in its own folder; copy it to go on elsewhere")
        return Start(config, run, folder, True, field_names(config), words)
    if preset is None and {"-h", "--help"} & set(words):
        preset = shown
    _check_preset(preset, holding)
    config = kind.from_tables(load_preset(str(preset)))
    return Start(config, str(preset), Path("runs") / str(preset), False, given_fields(words), words)


def _take(words: list[str], flag: str) -> str | None:
    """Remove a flag and its value from the words; return the value, None if either is missing."""
    for i, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return words.pop(i).partition("=")[2]
        if word == flag and i + 1 < len(words) and not words[i + 1].startswith("-"):
            del words[i]
            return words.pop(i)
    return None


def _check_preset(name: str | None, holding: str) -> None:
    names, (other, whose, command) = preset_names(holding), OTHER[holding]
    if name in names:
        return
    if name in preset_names(other):
        raise ValueError(f"preset={name!r} is {whose}: {command} {name}")
    meant = "" if name is None else perhaps(name, names)
    raise ValueError(
        f"preset={name!r}: expected a preset as the first argument, --config FILE or --resume RUN{meant}; "
        f"presets: {', '.join(names)}"
    )
