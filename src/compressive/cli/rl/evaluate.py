"""How well an agent plays, or chance, or an oracle that sees everything.

compressive rl evaluate runs/rooms --episodes 512
compressive rl evaluate random --episodes 4096
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from compressive.cli import run


@dataclass(frozen=True)
class Evaluate:
    """Let a player play whole episodes."""

    player: Positional[str]
    """Folder of a run; or random, or oracle."""
    of: Path | None = None
    """Folder of the run whose task random and oracle are to play; the full rooms if not given."""
    episodes: int = 512
    """How many episodes, at least."""
    lanes: int = 64
    """How many are played side by side."""
    greedy: bool = False
    """Take the likeliest action in place of drawing one."""
    delays: tuple[int, ...] | None = None
    """Steps in the corridor, if not those that the run was trained with."""
    seed: int = 1_000_000
    """Of the task and of what is drawn; far from those of training."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one."""
    json: bool = False
    """Print JSON in place of a table."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words and play."""
    return run(
        evaluate, Evaluate, arguments, prog, "Play whole episodes: returns, human-normalised score, right choices."
    )


def evaluate(options: Evaluate) -> int:
    """Play and print."""
    import json

    from compressive.rl.evaluate import evaluate
    from compressive.rl.open import open_player
    from compressive.runtime import pick_device

    device = pick_device(options.device)
    task, player, about, comparable = open_player(
        options.player, options.lanes, options.seed, device, options.greedy, options.delays, of=options.of
    )
    found = evaluate(task, player, options.episodes, options.seed, comparable)
    if options.json:
        print(json.dumps({"player": about} | found.as_dict(), indent=1))
        return 0
    from compressive.rl.env.rooms import HUMAN, RANDOM

    print(f"{about}: {len(found.returns)} episodes")
    beside = f"   (published: human {HUMAN}, random {RANDOM})" if comparable else ""
    print(f"  return            {found.mean:.3f} ± {found.margin:.3f}{beside}")
    if found.human_normalised is not None:
        print(f"  human-normalised  {found.human_normalised:.1%}")
    if found.accuracy is not None:
        share, low, high = found.accuracy
        print(f"  right choices     {share:.1%} of {found.choices}   ({low:.1%} to {high:.1%}; chance 50 %)")
    return 0
