"""`compressive config`: list presets, or print one in full."""

from dataclasses import asdict, dataclass

import tyro

from compressive.cli import run
from compressive.config import RunConfig, preset_names
from compressive.config.agent import AgentRun


@dataclass(frozen=True)
class Config:
    """List presets, or print one in full."""

    preset: tyro.conf.Positional[str | None] = None
    """Preset to print; if not given, all names are listed."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and print."""
    return run(show, Config, arguments, prog, "List presets, or print one in full, defaults included.")


def show(options: Config) -> int:
    """Print the names of all presets, or one preset's values as TOML."""
    if options.preset is None:
        print("\n".join(preset_names()))
        return 0
    kind = AgentRun if options.preset in preset_names("task") else RunConfig
    for table, values in asdict(kind.from_preset(options.preset)).items():
        print(f"[{table}]")
        for name, value in values.items():
            text = (
                str(value).lower()
                if isinstance(value, bool)
                else repr(list(value) if isinstance(value, tuple) else value)
            )
            print(f"{name} = {text}".replace("'", '"'))
        print()
    return 0
