"""One episode to look at: the player's view with the map beside it.

compressive rl watch runs/rooms --out episode.gif
compressive rl watch oracle --out pictures
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from compressive.cli import run


@dataclass(frozen=True)
class Watch:
    """Play one episode and write it."""

    player: Positional[str]
    """Folder of a run; or random, or oracle."""
    of: Path | None = None
    """Folder of the run whose task random and oracle are to play; the full rooms if not given."""
    out: Path = Path("episode.gif")
    """A GIF or, where the name does not end in .gif, a folder for PNGs."""
    greedy: bool = False
    """Take the likeliest action in place of drawing one."""
    delays: tuple[int, ...] | None = None
    """Steps in the corridor, if not those that the run was trained with."""
    seed: int = 0
    """Of the task and of what is drawn: another seed, another episode."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words and play."""
    return run(watch, Watch, arguments, prog, "Play one episode and write it as a GIF or as a folder of PNGs.")


def watch(options: Watch) -> int:
    """Play, write, and say where."""
    from compressive.rl.open import open_player
    from compressive.rl.video import watch, write
    from compressive.runtime import pick_device

    device = pick_device(options.device)
    task, player, about, _ = open_player(
        options.player, 1, options.seed, device, options.greedy, options.delays, shown=True, of=options.of
    )
    frames, total = watch(task, player, options.seed)
    write(frames, options.out)
    print(f"{about}: {len(frames)} steps, return {total:g}, written to {options.out}")
    return 0
