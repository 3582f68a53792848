"""`compressive data pg19 topics`: topics of the built books."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from compressive.cli import run


@dataclass(frozen=True)
class Topics:
    """Topics of the built books, by latent Dirichlet allocation, as in the paper's supplement."""

    built: Positional[Path]
    """Folder that `compressive data pg19 build` wrote."""
    topics: int = 20
    """How many topics."""
    split: Literal["train", "validation", "test"] = "train"
    """Books to read."""
    seed: int = 0
    """Of all that is random: the same seed gives the same topics."""
    out: Path | None = None
    """Folder for topics.json and topics.png; BUILT/topics if not given."""
    json: bool = False
    """Print JSON in place of tables."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words, then learn."""
    return run(topics, Topics, arguments, prog, "Topics of the built books, by latent Dirichlet allocation.")


def topics(options: Topics) -> int:
    """Learn, print, and write the figure; what was learnt is kept even where nothing can be drawn."""
    import dataclasses
    import json

    from rich.console import Console

    from compressive.data.pg19.topics import learn_topics

    found = learn_topics(options.built, options.split, options.topics, options.seed)
    folder = options.out or options.built / "topics"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(found), indent=1, ensure_ascii=False)
    (folder / "topics.json").write_text(text + "\n", "utf-8")
    if options.json:
        print(text)
    else:
        console = Console()
        console.print(*found.tables(console.width), sep="\n")
    from compressive.plotting import PlotError  # only now, as torch comes with it

    try:
        found.plot(folder / "topics.png")
    except PlotError as error:
        print(f"no plot: {error}", file=sys.stderr)
    else:
        print(f"written to {folder / 'topics'}.json and .png", file=sys.stderr)
    return 0
