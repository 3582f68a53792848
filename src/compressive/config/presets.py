"""Presets: TOML files in `presets/`, one per experiment, and the conversion of their tables to dataclasses."""

import dataclasses
import itertools
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from compressive.config.checks import require


def preset_names(holding: str | None = None) -> list[str]:
    """Return the names of all presets, or of those with a given table: `data` for text and audio, `task` for agents."""
    folder = resources.files("compressive") / "presets"
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return [name for name in names if holding is None or holding in load_preset(name)]


def load_preset(name: str) -> dict[str, Any]:
    """Read a preset's tables; raise ValueError if there is no such preset."""
    if name not in preset_names():
        raise ValueError(f"preset={name!r} does not exist; choose one of {', '.join(preset_names())}")
    return _resolve(tomllib.loads(_read(name)))


def load_file(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Read the tables of a TOML file, such as one printed by `compressive config`, laid over those that it extends.

    Also returns which fields the file itself has, as `table.field`. Raises ValueError if it is no such file.
    """
    try:
        own = tomllib.loads(path.read_text("utf-8"))
        for name, values in own.items():
            expected = str if name == "extends" else dict
            if not isinstance(values, expected):
                raise ValueError(f"{path}: {name}={values!r}: expected a table, [{name}], or a preset to extend")
        fields = {f"{table}.{field}" for table, values in own.items() if table != "extends" for field in values}
        return _resolve(own), fields
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; compressive config PRESET > {path} writes one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file ({error}); compressive config PRESET prints one") from error


def describe_preset(name: str) -> str:
    """Return the first sentence of a preset's leading comment: what it is."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), _read(name).splitlines())
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(line.lstrip("# ") for line in lines))[0]


def _read(name: str) -> str:
    return (resources.files("compressive") / "presets" / f"{name}.toml").read_text("utf-8")


def _resolve(tables: dict[str, Any]) -> dict[str, Any]:
    """Lay tables over those of the preset that they extend: `extends = "other"`."""
    if (parent := tables.pop("extends", None)) is None:
        return tables
    merged = load_preset(parent)
    for table, values in tables.items():
        merged[table] = merged.get(table, {}) | values
    return merged


def field_names(config: Any) -> set[str]:
    """Return all fields of a configuration of tables, as `table.field`."""
    return {f"{table}.{name}" for table, values in dataclasses.asdict(config).items() for name in values}


RENAMED: dict[str, str] = {"task.lanes": "task.envs"}
"""Fields renamed since version 0.1, old to new, as `table.field`. Files and flags may still use the old names."""
RENAMED_VALUES = {("train.attention", "readable"): "reference"}
"""Renamed values: (`table.field`, old value) to new value."""


def with_new_names(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables with old names and values replaced by the current ones."""
    return {
        table: {
            (key := RENAMED.get(f"{table}.{name}", f"{table}.{name}")).split(".")[1]: _new_value(key, value)
            for name, value in values.items()
        }
        for table, values in tables.items()
    }


def _new_value(key: str, value: Any) -> Any:
    return RENAMED_VALUES.get((key, value), value) if isinstance(value, str) else value


def read_tables(tables: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """Build one dataclass per table; raise ValueError for an unknown table or field."""
    tables = with_new_names(tables)
    for table, values in tables.items():
        require(table in kinds, "table", table, f"one of {', '.join(kinds)}")
        known = [field.name for field in dataclasses.fields(kinds[table])]
        for name in values:
            require(name in known, f"{table} field", name, f"one of {', '.join(known)}")
    return {table: kinds[table](**tables.get(table, {})) for table in kinds}
