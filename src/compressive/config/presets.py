"""Presets: TOML files in `presets/`, one per experiment, and the conversion of their tables to dataclasses."""

import dataclasses
import tomllib
from importlib import resources
from typing import Any

from compressive.config.checks import require


def preset_names(holding: str | None = None) -> list[str]:
    """Return the names of all presets, or of those with a given table: `data` for text and audio, `task` for agents."""
    folder = resources.files("compressive") / "presets"
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return [name for name in names if holding is None or holding in load_preset(name)]


def load_preset(name: str) -> dict[str, Any]:
    """Read a preset's tables; `extends = "other"` starts from the other preset's values.

    Raises ValueError if there is no such preset.
    """
    if name not in preset_names():
        raise ValueError(f"preset={name!r} does not exist; choose one of {', '.join(preset_names())}")
    tables = tomllib.loads((resources.files("compressive") / "presets" / f"{name}.toml").read_text("utf-8"))
    if (parent := tables.pop("extends", None)) is None:
        return tables
    merged = load_preset(parent)
    for table, values in tables.items():
        merged[table] = merged.get(table, {}) | values
    return merged


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
