"""Evaluate an agent, the random policy, or an oracle that reads the environment's state.

compressive rl evaluate runs/rooms --episodes 512
compressive rl evaluate random --episodes 4096
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from compressive.cli import run

MOST_ENVS = 65_536
"""Largest number of environments: their observations alone take 1.4 GB."""


@dataclass(frozen=True)
class Evaluate:
    """Run a policy for whole episodes."""

    policy: Annotated[Positional[str], arg(metavar="RUN|random|oracle")]
    """Folder of a run, or random, or oracle."""
    of: Path | None = None
    """Folder of the run whose task random and oracle act in; the full rooms if not given."""
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
    json: bool = False
    """Print JSON instead of a table."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and evaluate."""
    description = "Run a policy for whole episodes: returns, human-normalised score, choice accuracy."
    return run(evaluate, Evaluate, arguments, prog, description, renamed={"--lanes": "--envs"})


def evaluate(options: Evaluate) -> int:
    """Evaluate and print."""
    import json

    from compressive.config.checks import require
    from compressive.console import progress_bar
    from compressive.rl.evaluate import evaluate
    from compressive.rl.policies import load_policy
    from compressive.runtime import describe_environment, pick_device, write_atomically

    require(options.episodes >= 2, "episodes", options.episodes, "at least 2, for an interval")
    require(1 <= options.envs <= MOST_ENVS, "envs", options.envs, f"1 to {MOST_ENVS}")
    device, envs = pick_device(options.device), min(options.envs, options.episodes)
    loaded = load_policy(options.policy, envs, options.seed, device, options.greedy, options.delays, of=options.of)
    with progress_bar() as bar:
        task = bar.add_task("episodes", total=None)

        def progress(ended: int, total: int) -> None:
            bar.update(task, completed=ended, total=total)

        found = evaluate(loaded.task, loaded.policy, options.episodes, options.seed, loaded.comparable, progress)
    result = {
        "policy": loaded.description,
        "seed": options.seed,
        "greedy": options.greedy,
        "delays": options.delays,
        **found.as_dict(),
        "environment": describe_environment(),
    }
    trained = options.policy not in ("random", "oracle")
    out = options.out or (Path(options.policy) / "evaluation.json" if trained else None)
    if out is not None:
        write_atomically(out, json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    from compressive.rl.env.rooms import HUMAN, RANDOM

    print(f"{loaded.description}: {len(found.returns)} episodes")
    published = f"   (published: human {HUMAN}, random {RANDOM})" if loaded.comparable else ""
    print(f"  return            {found.mean:.3f} ± {found.margin:.3f}{published}")
    if found.human_normalised is not None:
        print(f"  human-normalised  {found.human_normalised:.1%}")
    if found.accuracy is not None:
        share, low, high = found.accuracy
        print(f"  right choices     {share:.1%} of {found.choices}   ({low:.1%} to {high:.1%}; chance 50 %)")
    for side, (right, wrong) in (found.by_side or {}).items():
        if right + wrong:
            print(f"    shown {side:<5}     {right / (right + wrong):.1%} of {right + wrong}")
    if out is not None:
        print(f"  written to {out}")
    return 0
