"""`compressive rl train PRESET`: every value of the preset can be overridden."""

from dataclasses import dataclass
from pathlib import Path

from compressive.cli import guarded, preset_first, with_new_flags
from compressive.config import preset_names
from compressive.config.agent import AgentRun

SHOWN = "rooms"
"""The preset whose values `--help` shows if none is named."""
FIXED = ("model", "task", "agent", "train.seed", "train.optimiser")
"""Fields that must not change when a run is resumed."""


@dataclass(frozen=True)
class Train(AgentRun):
    """Train an agent from a preset; every value below may be overridden."""

    out: Path = Path("runs/PRESET")
    """Folder of the run: configuration, metrics, checkpoints."""
    resume: bool = False
    """Continue from the newest complete checkpoint in `out`; start from scratch if there is none."""


def main(arguments: list[str], prog: str) -> int:
    """Parse a preset's name and overrides, then train."""
    return guarded(lambda: _train(*preset_first(arguments, preset_names("task"), SHOWN), prog), prog)


def _train(preset: str, arguments: list[str], prog: str) -> int:
    import tyro

    default = AgentRun.from_preset(preset)
    options = tyro.cli(
        Train,
        default=Train(default.model, default.task, default.agent, default.train, Path("runs") / preset, False),
        args=with_new_flags(arguments),
        prog=f"{prog} PRESET" if preset == SHOWN else f"{prog} {preset}",
        description=f"Train an agent. Presets: {', '.join(preset_names('task'))}. Defaults are those of {preset}.",
    )
    config = AgentRun(options.model, options.task, options.agent, options.train)

    from compressive.cli.train import begin
    from compressive.rl.loop import train
    from compressive.rl.run import AgentFolder

    return train(begin(AgentFolder, options.out, config, options.resume, FIXED))
