"""Evaluate an agent, the random policy, or an oracle that reads the environment's state.

compressive rl evaluate rooms                                # the agent that comes with the package
compressive rl evaluate runs/rooms --episodes 512
compressive rl evaluate random --episodes 4096
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from compressive.cli import run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compressive.rl.evaluate import Evaluation
    from compressive.rl.policies import LoadedPolicy

MOST_ENVS = 65_536
"""Largest number of environments: their observations alone take 1.4 GB."""


@dataclass(frozen=True)
class Evaluate:
    """Run a policy for whole episodes."""

    policy: Annotated[Positional[str], arg(metavar="RUN|rooms|random|oracle")]
    """Folder of a run or release; rooms, the agent that comes with the package; random; or oracle."""
    of: Path | None = None
    """Run, release or shipped agent whose task random and oracle act in; the full rooms if not given."""
    episodes: int = 512
    """Number of episodes, at least 2, rounded up to a multiple of envs."""
    envs: int = 64
    """Number of environments that are stepped in parallel; no more than there are episodes."""
    greedy: bool = False
    """Take the most likely action instead of sampling."""
    delays: tuple[int, ...] | None = None
    """Steps in the corridor; those of the run's training if not given."""
    seed: int = 1_000_000
    """Seed of the environments and of sampled actions; the default is far from training seeds."""
    device: str = "auto"
    """Device: auto uses a GPU if there is one."""
    out: Path | None = None
    """File for the result as JSON; for a run, evaluation.json in its folder if not given."""
    plot: Path | None = None
    """File for the curve of training, with a random policy and the oracle, if not next to the JSON file."""
    json: bool = False
    """Print JSON instead of a table."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and evaluate."""
    description = "Run a policy for whole episodes: returns, human-normalised score, choice accuracy."
    return run(evaluate, Evaluate, arguments, prog, description, renamed={"--lanes": "--envs"})


def evaluate(options: Evaluate) -> int:
    """Evaluate, print, and write result and curve."""
    import json

    from compressive.config.checks import require
    from compressive.console import progress_bar
    from compressive.plotting import check_format, require_matplotlib
    from compressive.rl.evaluate import compare
    from compressive.runs.run import RELEASE
    from compressive.runs.shipped import shipped
    from compressive.runtime import describe_environment, pick_device, write_atomically

    require(options.episodes >= 2, "episodes", options.episodes, "at least 2, for an interval")
    require(1 <= options.envs <= MOST_ENVS, "envs", options.envs, f"1 to {MOST_ENVS}")
    trained = options.policy not in ("random", "oracle")
    if options.plot is not None:  # fail before the evaluation, not after it
        require(trained, "plot", str(options.plot), "an agent's run; other policies have no curve of training")
        check_format(options.plot)
        require_matplotlib()
    with progress_bar() as bar:
        task = bar.add_task("episodes", total=None)

        def progress(ended: int, total: int) -> None:
            bar.update(task, completed=ended, total=total)

        loaded, policies = compare(
            options.policy,
            options.episodes,
            options.envs,
            options.seed,
            pick_device(options.device),
            options.greedy,
            options.delays,
            options.of,
            progress,
        )
    found, *_ = policies.values()
    others = {name: evaluation.as_dict() for name, evaluation in policies.items() if evaluation is not found}
    result = {
        "policy": loaded.description,
        "seed": options.seed,
        "greedy": options.greedy,
        "delays": options.delays,
        **found.as_dict(),
        "others": others or None,
        "environment": describe_environment(),
    }
    out, folder = options.out, shipped(options.policy)
    if out is None and trained and not (folder / RELEASE).is_file():
        out = folder / "evaluation.json"
    if out is not None:
        write_atomically(out, json.dumps(result, indent=1) + "\n")
    plot = options.plot or (out.with_suffix(".png") if trained and out is not None else None)
    plotted = plot is not None and _plot(folder, {"agent": result, **others}, plot)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print(loaded, policies)
        for path in [out] * (out is not None) + [plot] * plotted:
            print(f"  written to {path}")
    return 0 if plotted or options.plot is None else 2


def _print(loaded: "LoadedPolicy", policies: "dict[str, Evaluation]") -> None:
    """Print the result of the first policy, then what it is measured by."""
    from compressive.rl.env.rooms import HUMAN, RANDOM, Rooms

    found, *_ = policies.values()
    print(f"{loaded.description}: {len(found.returns)} episodes")
    published = f"   (published: human {HUMAN}, random {RANDOM})" if loaded.comparable else ""
    print(f"  return            {found.mean:.3f} ± {found.margin:.3f}{published}")
    for name, other in policies.items():
        if other is not found:
            label = "random policy" if name == "random" else name
            print(f"    {label:<15} {other.mean:.3f} ± {other.margin:.3f}")
    if found.human_normalised is not None:
        print(f"  human-normalised  {found.human_normalised:.1%}")
    if found.accuracy is not None:
        share, low, high = found.accuracy
        print(f"  right choices     {share:.1%} of {found.choices}   ({low:.1%} to {high:.1%}; chance 50 %)")
    for side, (right, wrong) in (found.by_side or {}).items():
        if right + wrong:
            print(f"    shown {side:<5}     {right / (right + wrong):.1%} of {right + wrong}")
    if "agent" in policies and isinstance(loaded.task, Rooms) and (changes := loaded.task.config.changes):
        values = ", ".join(f"{name} {value}" for name, value in changes.items())
        verdict = "" if loaded.comparable else "; scores cannot be compared with published ones"
        print(f"  not the full task: {values}{verdict}")


def _plot(folder: Path, policies: "Mapping[str, Mapping[str, Any]]", path: Path) -> bool:
    """Plot the curve of training; say why if that is not possible."""
    from compressive.console import warn
    from compressive.plotting import PlotError
    from compressive.rl import curves
    from compressive.rl.loop import read_metrics

    try:
        rows = read_metrics(folder)
        curves.plot(rows, policies, path)
    except (PlotError, OSError) as error:
        warn(f"no curve: {error}")
        return False
    return True
