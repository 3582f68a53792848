"""`compressive config`: list presets, or print one in full."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import tyro

from compressive.cli import perhaps, run
from compressive.config import RunConfig, preset_names
from compressive.config.agent import AgentRun
from compressive.config.presets import describe_preset


@dataclass(frozen=True)
class Config:
    """List presets, or print one in full."""

    preset: tyro.conf.Positional[str | None] = None
    """Preset to print; if not given, all are listed."""
    json: bool = False
    """Print JSON instead of TOML, or instead of the list."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and print."""
    description = (
        "List presets, or print one in full, defaults included. `compressive train --config FILE` takes what it prints."
    )
    return run(show, Config, arguments, prog, description)


def show(options: Config) -> int:
    """Print all presets with a line about each, or one preset's values."""
    names = preset_names()
    if options.preset is None:
        about = {name: describe_preset(name) for name in names}
        width = max(map(len, names))
        print(json.dumps(about, indent=1) if options.json else "\n".join(f"{n:<{width}}  {about[n]}" for n in names))
        return 0
    if options.preset not in names:
        raise ValueError(
            f"preset={options.preset!r} does not exist{perhaps(options.preset, names)}; compressive config lists all"
        )
    kind = AgentRun if options.preset in preset_names("task") else RunConfig
    tables = asdict(kind.from_preset(options.preset))
    print(json.dumps(tables, indent=1) if options.json else to_toml(tables))
    return 0


def to_toml(tables: dict[str, dict[str, Any]]) -> str:
    """Write tables of strings, numbers, booleans and lists of them as TOML, whose values JSON has too.

    TOML has no null: a value that is not set is written as a comment.
    """

    def line(name: str, value: Any) -> str:
        return f"# {name} is not set\n" if value is None else f"{name} = {json.dumps(value)}\n"

    parts = [f"[{table}]\n" + "".join(line(*item) for item in values.items()) for table, values in tables.items()]
    return "\n".join(parts)
