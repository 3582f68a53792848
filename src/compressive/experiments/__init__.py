"""The paper's tables and figures as experiments: `compressive experiment NAME --scale tiny|small|paper`.

One module per experiment; `experiment.py` says what one is, `runner.py` runs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compressive.experiments.experiment import Experiment

EXPERIMENTS = {
    "enwik8": "compressive.experiments.enwik8:Enwik8",
    "wikitext": "compressive.experiments.wikitext:WikiText",
    "words": "compressive.experiments.words:Words",
    "pg19": "compressive.experiments.pg19:PG19",
    "compression-functions": "compressive.experiments.compression_functions:CompressionFunctions",
    "memory-sizes": "compressive.experiments.memory_sizes:MemorySizes",
    "slots": "compressive.experiments.slots:Slots",
    "attention": "compressive.experiments.attention:Attention",
    "layers": "compressive.experiments.layers:Layers",
    "layers-words": "compressive.experiments.layers_words:LayersWords",
    "schedule": "compressive.experiments.schedule:Schedule",
    "samples": "compressive.experiments.samples:Samples",
    "speech": "compressive.experiments.speech:Speech",
    "recall": "compressive.experiments.recall:Recall",
    "temporal-range": "compressive.experiments.temporal_range:TemporalRange",
    "positions": "compressive.experiments.positions:Positions",
    "rates": "compressive.experiments.rates:Rates",
    "agent": "compressive.experiments.agent:Rooms",
    "agent-delays": "compressive.experiments.agent:Delays",
}
"""Name to `module:class`, in the order in which they are listed."""


def load(name: str) -> "Experiment":
    """Return the experiment of a name; `module:class` names one of your own, from a module that can be imported.

    Raises ValueError if there is none.
    """
    path = EXPERIMENTS.get(name, name)
    module, colon, kind = path.partition(":")
    if not colon:
        raise ValueError(
            f"experiment={name!r} does not exist; choose one of {', '.join(EXPERIMENTS)}, or give your own as "
            "module:class"
        )
    try:
        experiment: Experiment = getattr(import_module(module), kind)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"experiment={name!r} cannot be imported ({error}); expected module:class") from None
    return experiment
