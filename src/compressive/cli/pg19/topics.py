"""`compressive data pg19 topics`: learn topics of the built books."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from compressive.cli import run
from compressive.console import note, warn


@dataclass(frozen=True)
class Topics:
    """Learn topics of the built books by latent Dirichlet allocation, as in the paper's supplement."""

    built: Positional[Path]
    """Folder written by `compressive data pg19 build`."""
    topics: int = 20
    """Number of topics."""
    split: Literal["train", "validation", "test"] = "train"
    """Split to read."""
    seed: int = 0
    """Random seed; the same seed gives the same topics."""
    out: Path | None = None
    """Folder for topics.json and topics.png, if not BUILT/topics."""
    json: bool = False
    """Print JSON instead of tables."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and learn."""
    return run(topics, Topics, arguments, prog, "Learn topics of the built books by latent Dirichlet allocation.")


def topics(options: Topics) -> int:
    """Learn, print, and write the figure; the JSON file is written even if the figure cannot be plotted."""
    import dataclasses
    import json

    from rich.console import Console

    from compressive.data.pg19.topics import learn_topics
    from compressive.plotting import PlotError

    folder = options.out or options.built / "topics"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out={folder}: is a file, expected a folder")
    found = learn_topics(options.built, options.split, options.topics, options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(found), indent=1, ensure_ascii=False)
    (folder / "topics.json").write_text(text + "\n", "utf-8")
    if options.json:
        print(text)
    else:
        console = Console()
        console.print(*found.tables(console.width), sep="\n")
    try:
        found.plot(folder / "topics.png")
    except PlotError as error:
        warn(f"no plot: {error}")
    else:
        note(f"written to {folder / 'topics'}.json and .png")
    return 0
