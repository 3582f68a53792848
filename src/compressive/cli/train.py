"""`compressive train PRESET`: every value of the preset can be overridden."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressive.cli import guarded, preset_first, with_new_flags
from compressive.config import RunConfig, preset_names

SHOWN = "enwik8"
"""The preset whose values --help shows if none is named."""
FIXED = ("model", "data.corpus", "train.batch", "train.unroll", "train.seed")
"""What a run cannot change when it is resumed."""


@dataclass(frozen=True)
class Train(RunConfig):
    """Train a model from a preset; every value below may be overridden."""

    out: Path = Path("runs/PRESET")
    """Folder of the run: configuration, metrics, checkpoints, samples."""
    resume: bool = False
    """Continue from the newest whole checkpoint in `out`; starts from the beginning if there is none."""


def main(arguments: list[str], prog: str) -> int:
    """Parse a preset's name and overrides, then train."""
    return guarded(lambda: _train(*preset_first(arguments, preset_names("data"), SHOWN), prog), prog)


def _train(preset: str, arguments: list[str], prog: str) -> int:
    import tyro

    default = RunConfig.from_preset(preset)
    # The preset fixes the model family; without AvoidSubcommands tyro would ask for it as a subcommand.
    options = tyro.cli(
        tyro.conf.AvoidSubcommands[Train],
        default=Train(default.model, default.data, default.train, Path("runs") / preset, False),
        args=with_new_flags(arguments),
        prog=f"{prog} PRESET" if preset == SHOWN else f"{prog} {preset}",
        description=f"Train a model. Presets: {', '.join(preset_names('data'))}. Defaults shown are those of {preset}.",
    )
    config = RunConfig(options.model, options.data, options.train)

    from compressive.distributed import join, restarts
    from compressive.runs.run import Run
    from compressive.training.loop import train

    with join(config.train.device) as world:
        # torchrun restarts all processes when one dies: a restart resumes.
        resume = options.resume or restarts() > 0
        return train(world.first(lambda: begin(Run, options.out, config, resume, FIXED)), world)


def begin(kind: Any, folder: Path, config: Any, resume: bool, fixed: tuple[str, ...]) -> Any:
    """Create the folder of a run, or check that it can be resumed; raises ValueError if a `fixed` value changed."""
    from compressive.runtime import describe_environment

    if (folder / "metrics.jsonl").exists() and not resume:
        raise ValueError(f"out={folder} holds a run already: continue it with --resume, or choose another --out")
    if (folder / "config.json").exists() and resume:
        _refuse_changes(kind.open(folder).config, config, fixed)
    run = kind.create(folder, config)
    environment = json.dumps(describe_environment())
    with (folder / "environment.jsonl").open("a", encoding="utf-8") as file:  # one line per start or resume
        file.write(environment + "\n")
    return run


def _refuse_changes(before: Any, now: Any, fixed: tuple[str, ...]) -> None:
    """A resumed run keeps its model, its data and its streams."""
    old, new = (_flat(dataclasses.asdict(config)) for config in (before, now))
    for name in new:
        if name.startswith(fixed) and old.get(name) != new[name]:
            raise ValueError(
                f"{name}={new[name]!r}: the run to be resumed has {old.get(name)!r}; give that, or begin another --out"
            )


def _flat(tables: dict[str, dict[str, object]]) -> dict[str, object]:
    return {
        f"{table}.{name}": tuple(value) if isinstance(value, list) else value
        for table, values in tables.items()
        for name, value in values.items()
    }
