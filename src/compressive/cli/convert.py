"""Make a release of a TransformerXL in Hugging Face's layout.

compressive convert transfo-xl-wt103 --out release/transfo-xl
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from compressive.cli import run as run_command


@dataclass(frozen=True)
class Convert:
    """What to convert, and where to."""

    source: Annotated[Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Folder with config.json, model.safetensors or pytorch_model.bin, and vocab.txt or vocab.bin."""
    out: Path
    """Folder to create, a release."""
    window: int | None = None
    """Tokens read at once, if other than tgt_len in config.json; memory has mem_len slots."""
    corpus: str = "wikitext103"
    """Name of the corpus that `compressive evaluate` is to score, prepared with the vocabulary of the release."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and convert."""
    description = (
        "Make a release of a TransformerXL in the layout of Hugging Face's TransfoXLLMHeadModel, as transfo-xl-wt103."
    )
    return run_command(convert, Convert, arguments, prog, description)


def convert(options: Convert) -> int:
    """Write the release, and say how it differs and what can be done with it."""
    from compressive.console import note
    from compressive.runs import transfo_xl

    made = transfo_xl.convert(options.source, options.out, window=options.window, corpus=options.corpus)
    for difference in made.notes:
        note(difference)
    size = sum(file.stat().st_size for file in made.folder.iterdir())
    print(f"{made.folder}: {size / 1e6:,.1f} MB; try: compressive generate {made.folder}")
    return 0
