"""`compressive train PRESET`: every value of the preset can be overridden."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressive.cli import guarded
from compressive.config import RunConfig, preset_names

if TYPE_CHECKING:
    from compressive.run import Run

FIXED = ("model", "data.corpus", "train.batch", "train.unroll", "train.seed")
"""What a run cannot change when it is resumed."""


@dataclass(frozen=True)
class Train(RunConfig):
    """Train a model from a preset; every value below may be overridden."""

    out: Path = Path("runs/PRESET")
    """Folder of the run: configuration, metrics, checkpoints, samples."""
    resume: bool = False
    """Continue from the newest whole checkpoint in `out`; begins anew where there is none."""


def main(arguments: list[str], prog: str) -> int:
    """Parse a preset's name and overrides, then train."""
    names = preset_names()
    if not arguments or arguments[0].startswith("-"):
        preset, rest = "enwik8", arguments
        if not set(arguments) & {"-h", "--help"}:
            return guarded(lambda: _no_preset(None), prog)
    else:
        preset, rest = arguments[0], arguments[1:]
    if preset not in names:
        return guarded(lambda: _no_preset(preset), prog)
    return guarded(lambda: _train(preset, rest, prog), prog)


def _no_preset(name: str | None) -> int:
    raise ValueError(f"preset={name!r}: expected the name of one first, of {', '.join(preset_names())}")


def _train(preset: str, arguments: list[str], prog: str) -> int:
    import tyro

    default = RunConfig.from_preset(preset)
    # A preset says which kind of model it is; tyro would else ask for it as a command of its own.
    options = tyro.cli(
        tyro.conf.AvoidSubcommands[Train],
        default=Train(default.model, default.data, default.train, Path("runs") / preset, False),
        args=arguments,
        prog=f"{prog} PRESET" if preset == "enwik8" else f"{prog} {preset}",
        description=f"Train a model. Presets: {', '.join(preset_names())}. Defaults shown are those of {preset}.",
    )
    config = RunConfig(options.model, options.data, options.train)

    from compressive.parallel import join, restarts
    from compressive.training.loop import train

    with join(config.train.device) as world:
        # torchrun starts everything again when one process dies; what it then finds is the run to go on with.
        resume = options.resume or restarts() > 0
        return train(world.first(lambda: _begin(options.out, config, resume)), world)


def _begin(folder: Path, config: RunConfig, resume: bool) -> "Run":
    """Make the run's folder, or check that it can be resumed."""
    from compressive.run import Run
    from compressive.training.loop import describe_environment

    if (folder / "metrics.jsonl").exists() and not resume:
        raise ValueError(f"out={folder} holds a run already: continue it with --resume, or choose another --out")
    if (folder / "config.json").exists() and resume:
        _refuse_changes(Run.open(folder).config, config)
    run = Run.create(folder, config)
    environment = json.dumps(describe_environment())
    with (folder / "environment.jsonl").open("a", encoding="utf-8") as file:  # one line per sitting
        file.write(environment + "\n")
    return run


def _refuse_changes(before: RunConfig, now: RunConfig) -> None:
    """A resumed run keeps its model, its data and its lanes."""
    old, new = (_flat(dataclasses.asdict(config)) for config in (before, now))
    for name in new:
        if name.startswith(FIXED) and old.get(name) != new[name]:
            raise ValueError(
                f"{name}={new[name]!r}: the run to be resumed has {old.get(name)!r}; give that, or begin another --out"
            )


def _flat(tables: dict[str, dict[str, object]]) -> dict[str, object]:
    return {
        f"{table}.{name}": tuple(value) if isinstance(value, list) else value
        for table, values in tables.items()
        for name, value in values.items()
    }
