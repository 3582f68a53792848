"""Train an agent: from a preset, from a configuration file, or on from a run.

compressive rl train rooms-tiny
compressive rl train --config my.toml --out runs/mine
compressive rl train --resume runs/mine
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressive.cli import guarded, parse
from compressive.cli.start import starting_point
from compressive.config import preset_names
from compressive.config.agent import AgentRun

if TYPE_CHECKING:
    from compressive.rl.run import AgentFolder

SHOWN = "rooms"
"""The preset whose values `--help` shows if none is named."""


@dataclass(frozen=True)
class Train(AgentRun):
    """Train an agent from a preset; every value below may be overridden."""

    out: Path = Path("runs/PRESET")
    """Folder of the run: configuration, metrics, checkpoints."""
    resume: bool = False
    """Continue from the newest complete checkpoint in `out`; start from scratch if there is none.
    Without a preset, --resume RUN takes everything from the run."""
    config: Path | None = None
    """TOML file to start from in place of a preset, such as one printed by `compressive config PRESET`."""


def main(arguments: list[str], prog: str) -> int:
    """Parse a starting point and overrides, then train."""
    return guarded(lambda: _train(arguments, prog), prog)


def _train(arguments: list[str], prog: str) -> int:
    start = starting_point(arguments, AgentRun, _open, "task", SHOWN)
    default = start.config
    options = parse(
        Train,
        start.arguments,
        f"{prog} PRESET" if start.name == SHOWN else f"{prog} {start.name}",
        f"Train an agent. Presets: {', '.join(preset_names('task'))}. Defaults are those of {start.name}.",
        default=Train(default.model, default.task, default.agent, default.train, start.out, start.resume),
    )

    from compressive.console import note
    from compressive.rl.loop import train
    from compressive.rl.run import AgentFolder
    from compressive.runtime import pick_device
    from compressive.training.preflight import fit_device

    protocol, changes = fit_device(options.train, start.given, pick_device(options.train.device))
    for change in changes:
        note(change)
    config = AgentRun(options.model, options.task, options.agent, protocol)
    return train(AgentFolder.begin(options.out, config, options.resume))


def _open(folder: Path) -> "AgentFolder":
    from compressive.rl.run import AgentFolder

    return AgentFolder.open(folder)
