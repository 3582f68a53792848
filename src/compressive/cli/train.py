"""Train a model: from a preset, from a configuration file, or on from a run; from random weights, or from trained ones.

compressive train enwik8-base --train.steps 20000
compressive train --config my.toml --out runs/mine
compressive train --resume runs/mine
compressive train quickstart --from runs/quickstart --data.corpus mine --out runs/tuned
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from compressive.cli import guarded, parse
from compressive.cli.start import starting_point
from compressive.config import RunConfig, preset_names

if TYPE_CHECKING:
    from compressive.runs.run import Run

SHOWN = "enwik8"
"""The preset whose values --help shows if none is named."""


@dataclass(frozen=True)
class Train(RunConfig):
    """Train a model from a preset; every value below may be overridden."""

    out: Path = Path("runs/PRESET")
    """Folder of the run: configuration, tokeniser, metrics, checkpoints, samples."""
    resume: bool = False
    """Continue from the newest whole checkpoint in `out`; starts from the beginning if there is none.
    Without a preset, --resume RUN takes everything from the run."""
    config: Path | None = None
    """TOML file to start from in place of a preset, such as one printed by `compressive config PRESET`."""
    from_: Annotated[Path | None, arg(name="from", metavar="RUN|RELEASE|NAME")] = None
    """Fine-tuning: start from the weights of this run, release or shipped model, with a fresh optimiser, from step 0.
    Corpus, training and memory sizes may differ; tokens and the model's shape must not."""


def main(arguments: list[str], prog: str) -> int:
    """Parse a starting point and overrides, then train."""
    return guarded(lambda: _train(arguments, prog), prog)


def _train(arguments: list[str], prog: str) -> int:
    import tyro

    start = starting_point(arguments, RunConfig, _open, "data", SHOWN)
    default = start.config
    # The preset fixes the model family; without AvoidSubcommands tyro would ask for it as a subcommand.
    options = parse(
        tyro.conf.AvoidSubcommands[Train],
        start.arguments,
        f"{prog} PRESET" if start.name == SHOWN else f"{prog} {start.name}",
        f"Train a model. Presets: {', '.join(preset_names('data'))}. Defaults shown are those of {start.name}.",
        default=Train(default.model, default.data, default.train, start.out, start.resume),
    )
    config = RunConfig(options.model, options.data, options.train)
    if start.resume and options.from_ is not None:
        raise ValueError(f"--resume {start.name} and --from {options.from_}: a run goes on from its own checkpoint")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"out={options.out} is a file: expected a folder, which is created")

    from compressive.distributed import join, restarts
    from compressive.training.loop import train
    from compressive.training.preflight import begin

    with join(config.train.device) as world:
        # torchrun restarts all processes when one dies: a restart resumes.
        resume = options.resume or restarts() > 0
        return train(begin(options.out, config, start.given, resume, world, options.from_), world)


def _open(folder: Path) -> "Run":
    from compressive.runs.run import Run

    return Run.open(folder)
