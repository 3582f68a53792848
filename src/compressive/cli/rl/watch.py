"""Run one episode and write a video: the agent's observations with a map beside them.

compressive rl watch rooms                                   # the agent that comes with the package
compressive rl watch runs/rooms --out episode.gif
compressive rl watch oracle --out frames
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from compressive.cli import run


@dataclass(frozen=True)
class Watch:
    """Run one episode and write a video."""

    policy: Annotated[Positional[str], arg(metavar="RUN|rooms|random|oracle")]
    """Folder of a run or release; rooms, the agent that comes with the package; random; or oracle."""
    of: Path | None = None
    """Run, release or shipped agent whose task random and oracle act in; the full rooms if not given."""
    out: Path = Path("episode.gif")
    """A GIF, which is replaced, or, if the name does not end in .gif, a new or empty folder for PNG files."""
    greedy: bool = False
    """Take the most likely action instead of sampling."""
    delays: tuple[int, ...] | None = None
    """Steps in the corridor; those of the run's training if not given."""
    seed: int = 0
    """Seed of the environment and of sampled actions; other seeds give other episodes."""
    device: str = "auto"
    """Device: auto uses a GPU if there is one."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and run the episode."""
    return run(watch, Watch, arguments, prog, "Run one episode and write it as a GIF or as a folder of PNG files.")


def watch(options: Watch) -> int:
    """Run the episode, write the video and print its path."""
    from compressive.rl.policies import load_policy
    from compressive.rl.video import check_out, frame_time, watch, write
    from compressive.runtime import pick_device

    check_out(options.out)
    device = pick_device(options.device)
    loaded = load_policy(
        options.policy, 1, options.seed, device, options.greedy, options.delays, watched=True, of=options.of
    )
    frames, total = watch(loaded.task, loaded.policy, options.seed)
    write(frames, options.out, frame_time(loaded.task))
    print(f"{loaded.description}: {len(frames)} steps, return {total:g}, written to {options.out}")
    return 0
