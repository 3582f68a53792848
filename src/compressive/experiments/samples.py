"""Supplement E: continuations of the paper's prompts by the Compressive Transformer of `pg19`, nucleus 0.98.

The paper says that samples remember the names of characters. So the names of a prompt are counted in its own
continuations, and in those of the other prompt, where they occur by chance.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressive import api
from compressive.experiments.experiment import BOOKS, Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.experiments.pg19 import compressive_books
from compressive.plotting import COLOURS, INK, figure, save, tidy
from compressive.runs.run import Run

PROMPTS = BOOKS / "prompts"
"""The openings of two of the paper's three books; its third, Pepys's diary, is not at hand."""
TOP_P = 0.98
SAMPLES = 4
"""Continuations of each prompt."""
LENGTH: Mapping[Scale, int] = {"tiny": 400, "small": 800, "paper": 800}
"""Tokens of a continuation."""
SHOWN = 40
"""Words of a continuation that the table shows."""


class Samples(Experiment):
    """Texts to be read, and names that are counted."""

    name = "samples"
    source = "Supplement E"
    claim = "Samples go on in the style of the prompt, and remember the names of its characters over hundreds of words."

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the Compressive Transformer of `pg19`."""
        return [compressive_books(scale)]

    def prepare(self, scale: Scale, data_dir: Path) -> None:
        """Prepare the corpus; raise FileNotFoundError if the prompts are not there."""
        if not PROMPTS.is_dir():
            raise FileNotFoundError(f"{PROMPTS} does not exist: run this in the root of the repository, which has it")
        super().prepare(scale, data_dir)

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Continue every prompt, and find the names of all prompts in each continuation."""
        model = api.load(run.folder, which="last", device=run.config.train.device)
        prompts = {path.stem: path.read_text("utf-8") for path in sorted(PROMPTS.glob("*.txt"))}
        found: dict[str, Any] = {}
        for seed, (name, prompt) in enumerate(prompts.items()):  # with the same seed, poor models write the same twice
            texts = model.generate(prompt, LENGTH[scale], samples=SAMPLES, top_p=TOP_P, seed=seed)
            samples = [
                {
                    "text": text,
                    "words": len(text.split()),
                    "mentions": {other: mentions(text, names(prompts[other])) for other in prompts},
                }
                for text in texts
            ]
            found[name] = {"names": sorted(names(prompt)), "samples": samples}
        return found

    def table(self, rows: Sequence[Measured]) -> str:
        """Return how often names occur, and how the first sample of the first seed begins."""
        (row,) = rows
        lines = []
        for prompt in next(iter(row.runs.values())):
            first = next(iter(row.runs.values()))[prompt]
            text = " ".join(first["samples"][0]["text"].split()[:SHOWN]).replace("|", "\\|")
            rates = (figure_of([rate(run, prompt, own) for run in row.runs.values()], 1) for own in (True, False))
            lines.append([prompt, ", ".join(first["names"]), *rates, text])
        heading = ["prompt", "names", "per 1,000 words of its continuations", "of the other's", "a continuation begins"]
        return markdown(heading, lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare names in the continuations of their own prompt with those of the other, as a mean over prompts."""
        (row,) = rows
        own, others = (
            [statistics.mean(rate(run, prompt, own) for prompt in run) for run in row.runs.values()]
            for own in (True, False)
        )
        compared = Comparison.paired(own, others)
        return [compared.sentence("Names of the prompt", "names of another prompt", "per 1,000 words", 1)]

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot how often the names of either prompt have occurred after so many words, as a mean over samples."""
        (row,) = rows
        prompts = list(next(iter(row.runs.values())))
        fig = figure(10, 3.4)
        places = fig.subplots(1, len(prompts), sharey=True)
        for axes, prompt in zip(places, prompts, strict=True):
            samples = [sample for run in row.runs.values() for sample in run[prompt]["samples"]]
            last = min(sample["words"] for sample in samples)
            for other in sorted(prompts, key=prompt.__ne__):
                counts = [
                    sum(place < word for sample in samples for place in sample["mentions"][other]) / len(samples)
                    for word in range(last + 1)
                ]
                colour = COLOURS["compressed" if other == prompt else "window"]
                axes.plot(counts, color=colour, label="its own names" if other == prompt else "the other prompt's")
            axes.legend(fontsize=8.5, frameon=False, labelcolor=INK)
            tidy(axes, prompt, "words of the continuation", "names so far, mean over samples")
        places[0].set_ylim(bottom=0)
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


def names(text: str) -> set[str]:
    """Return the words with a capital in the middle of a sentence."""
    return set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", " ".join(text.split())))


def mentions(text: str, wanted: set[str]) -> list[int]:
    """Return the places, counted in words, where a text has one of these names."""
    return [place for place, word in enumerate(text.split()) if wanted.intersection(re.findall(r"[A-Za-z]+", word))]


def rate(run: Mapping[str, Any], prompt: str, own: bool) -> float:
    """Return how often the names of a prompt occur per 1,000 words of its own continuations, or of the others'."""
    samples = [sample for name in run if (name == prompt) is own for sample in run[name]["samples"]]
    found: int = sum(len(sample["mentions"][prompt]) for sample in samples)
    words: int = sum(sample["words"] for sample in samples)
    return 1000 * found / max(1, words)
