"""Compression by layer: long shallow and short deep memory, or the reverse, at equal cost. Ours.

The paper's last section leaves "adaptive compression rates by layer" and "long-range shallow memory layers together
with deep short-range memory" to the future. Memory is longer where the rate is higher, or where there are more
compressed slots. All variants have the same number of slots in all layers together, and so the same attention cost; the
same l × (n_m + c·n_cm), summed over layers; and the same number of parameters.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from compressive.config import ModelConfig, transformer
from compressive.experiments.experiment import Measured, figure_of, markdown
from compressive.experiments.positions import Variant, Variants, against_first
from compressive.plotting import figure, save

RATES = {3: (6, 2, 1), 4: (6, 3, 2, 1)}
"""Rates of the parts that the layers are cut into, the shallowest first, by the number of parts; 3 on average."""
SHARES = {3: (2, 0.5, 0.5), 4: (2, 1, 0.5, 0.5)}
"""Compressed slots of the same parts, as shares of the equal number; 1 on average."""


class Rates(Variants):
    """Rates and compressed slots that fall or rise with depth."""

    name = "rates"
    source = "section 6, left to the future"
    claim = "Long shallow and short deep memory may be better than equal memory in all layers."

    def variants(self, model: ModelConfig) -> Mapping[str, Variant]:
        """Return equal memory, then memory that is longer in shallow layers, then in deep ones."""
        parts = next(parts for parts in sorted(RATES, reverse=True) if model.n_layers % parts == 0)
        each = model.n_layers // parts
        rates = tuple(rate for rate in RATES[parts] for _ in range(each))
        slots = tuple(round(share * model.compressed_sizes[0]) for share in SHARES[parts] for _ in range(each))
        return {
            "equal": Variant("equal", {}),
            "rates-shallow": Variant("higher rates in shallow layers", {"compression_rate": rates}),
            "rates-deep": Variant("higher rates in deep layers", {"compression_rate": rates[::-1]}),
            "slots-shallow": Variant("more slots in shallow layers", {"compressed_size": slots}),
            "slots-deep": Variant("more slots in deep layers", {"compressed_size": slots[::-1]}),
        }

    def table(self, rows: Sequence[Measured]) -> str:
        """Return slots and rates by layer, the range, and bits."""
        heading = ["memory", "compressed slots by layer", "rate by layer", "range", "validation", "test, bits per byte"]
        verdicts, lines = ["–", *(one.verdict for one in against_first(rows, "test"))], []
        for row, verdict in zip(rows, verdicts, strict=True):
            model = transformer(row.row.config.model)
            bits = [figure_of(row.values(split, "bits_per_byte")) for split in ("valid", "test")]
            layers = [by_layer(model.compressed_sizes), by_layer(model.compression_rates)]
            lines.append([row.row.title, *layers, f"{model.temporal_range:,}", *bits, verdict])
        return markdown([*heading, f"against {rows[0].row.title}"], lines)

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot the test bits of every seed."""
        fig = figure(8, 3.4)
        self.dots(fig.subplots(), rows, "test", "Test, every seed and the mean")
        self.headline(fig, self.verdicts(rows)[0])
        save(fig, to)


def by_layer(values: Sequence[int]) -> str:
    """Write values by layer: `72`, `6, 2, 1`, or `6 × 2, 3 × 2` where neighbours are equal."""
    runs = [(value, len(list(equal))) for value, equal in itertools.groupby(values)]
    if len(runs) == 1:
        return f"{values[0]:,}"
    return ", ".join(f"{value:,} × {count}" if count > 1 else f"{value:,}" for value, count in runs)
