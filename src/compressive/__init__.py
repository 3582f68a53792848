"""The Compressive Transformer (Rae et al. 2019), complete: model, training, evaluation and experiments.

from compressive import CompressiveLM, ModelConfig

model = CompressiveLM(ModelConfig())
memory = model.initial_memory(batch_size=8)
out = model(tokens, memory)

A trained model, see `help(compressive.load)`:

import compressive

print(compressive.load("runs/quickstart").generate("The old house", length=200))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressive.api import Score, TextModel, TextState, load, train
    from compressive.config import ModelConfig
    from compressive.model.decoding import DecodingState
    from compressive.model.language_model import CompressiveLM
    from compressive.model.memory import Memory
    from compressive.model.transformer import CompressiveTransformer

_HOMES = {
    "Score": "compressive.api",
    "TextModel": "compressive.api",
    "TextState": "compressive.api",
    "load": "compressive.api",
    "train": "compressive.api",
    "CompressiveLM": "compressive.model.language_model",
    "CompressiveTransformer": "compressive.model.transformer",
    "DecodingState": "compressive.model.decoding",
    "Memory": "compressive.model.memory",
    "ModelConfig": "compressive.config",
}

__version__ = "0.2.0"
__all__ = [
    "CompressiveLM",
    "CompressiveTransformer",
    "DecodingState",
    "Memory",
    "ModelConfig",
    "Score",
    "TextModel",
    "TextState",
    "__version__",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'compressive' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted(__all__)
