"""The Compressive Transformer (Rae et al. 2019), complete: model, training, evaluation and experiments.

from compressive import CompressiveLM, ModelConfig

model = CompressiveLM(ModelConfig())
memory = model.initial_memory(batch_size=8)
out = model(tokens, memory)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressive.config import ModelConfig
    from compressive.model.decoding import DecodingState
    from compressive.model.language_model import CompressiveLM
    from compressive.model.memory import Memory
    from compressive.model.transformer import CompressiveTransformer

_HOMES = {
    "CompressiveLM": "compressive.model.language_model",
    "CompressiveTransformer": "compressive.model.transformer",
    "DecodingState": "compressive.model.decoding",
    "Memory": "compressive.model.memory",
    "ModelConfig": "compressive.config",
}

__version__ = "0.1.0"
__all__ = ["CompressiveLM", "CompressiveTransformer", "DecodingState", "Memory", "ModelConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'compressive' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
