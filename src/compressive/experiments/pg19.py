"""Table 3: the Compressive Transformer against TransformerXL on books, in subwords, by perplexity per word.

Windows and memories have the sizes of the paper's PG-19 model, divided by 16 at `tiny` and by 2 at `small`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from compressive.experiments.enwik8 import AgainstTransformerXL, Tables, quiet, slots, transformer_xl
from compressive.experiments.experiment import Comparison, Measured, Row, Scale, cost, figure_of, markdown

SUBWORDS: Mapping[Scale, tuple[str, Tables]] = {
    "tiny": ("quickstart", {
        "model": {"vocab_size": 2_000, "n_layers": 3, "d_model": 96, "d_ff": 384, "window": 32, "memory_size": 32,
                  "compressed_size": 32, "compression_rate": 2},
        "data": {"corpus": "books-subwords"},
        "train": {"steps": 500, "warmup_steps": 100, "decay_steps": 400},
    }),
    "small": ("enwik8-base", {
        "model": {"vocab_size": 32_000, "n_layers": 8, "d_model": 256, "n_heads": 4, "d_ff": 1024, "dropout": 0.1,
                  "window": 256, "memory_size": 256, "compressed_size": 256, "compression_rate": 2},
        "data": {"corpus": "pg19"},
        "train": {"steps": 6_000, "warmup_steps": 500, "decay_steps": 0, "batch": 32, "learning_rate": 6e-4,
                  "optimiser": "muon", "muon_scale": 4, "update_every": 1, "checkpoint_every": 2_000},
    }),
    "paper": ("pg19", {}),
}  # fmt: skip
"""The Compressive Transformer on books: a preset, and values in place of the preset's.

`pg19` are the books that were built, all or some; `books-subwords` those of this repository in 2,000 subwords.
"""
PAPER = {"pg19-compressive": (43.4, 33.6), "pg19-txl": (45.5, 36.3)}
"""The paper's perplexity per word of each row, validation and test."""


def compressive_books(scale: Scale) -> Row:
    """The Compressive Transformer on books; `samples` are of its runs."""
    return Row("pg19-compressive", "Compressive Transformer", quiet(*SUBWORDS[scale]))


class PG19(AgainstTransformerXL):
    """At equal cost, as the paper set the sizes."""

    name = "pg19"
    source = "Table 3"
    claim = (
        "On PG-19 the Compressive Transformer has a lower test perplexity per word, 33.6, than a TransformerXL, 36.3."
    )
    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0, 1), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return the Compressive Transformer and the TransformerXL."""
        ours = compressive_books(scale)
        return [ours, transformer_xl(ours, "pg19-txl", "TransformerXL, equal cost")]

    def table(self, rows: Sequence[Measured]) -> str:
        """Return perplexities per word beside the paper's, and whether they may be compared with them."""
        heading = ["model", "memory slots", "parameters", "steps × tokens", "paper, validation / test"]
        lines = []
        for found in rows:
            of, (validation, test) = cost(found.row.config, "small"), PAPER[found.row.name]
            perplexities = [figure_of(found.values(split, "word_perplexity"), 1) for split in ("valid", "test")]
            lines.append([
                found.row.title, slots(found.row), f"{of.parameters:,}", f"{of.steps:,} × {of.tokens // of.steps:,}",
                f"{validation} / {test}", *perplexities, figure_of(found.values("test", "bits_per_byte")),
                _comparable(found),
            ])  # fmt: skip
        ours = ["validation, perplexity per word", "test, perplexity per word", "test, bits per byte"]
        return markdown([*heading, *ours, "comparable with the paper"], lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare perplexity per word on the test split."""
        found = Comparison.of(*(row.values("test", "word_perplexity") for row in rows))
        ours, txl = rows
        return [found.sentence(ours.row.title, txl.row.title, "of test perplexity per word", 1)]


def _comparable(found: Measured) -> str:
    if found.row.config.data.corpus != "pg19":
        return "no: not PG-19's test books"
    reasons = [reason for reason in found.values("test", "not_comparable") if reason is not None]
    return f"no: {reasons[0]}" if reasons else "yes"
