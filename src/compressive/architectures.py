"""From a configuration to its model: the one place that knows both families."""

from typing import overload

from compressive.config import AnyModelConfig, ModelConfig
from compressive.model.language_model import CompressiveLM, LanguageModel


@overload
def build_model(config: ModelConfig) -> CompressiveLM: ...
@overload
def build_model(config: AnyModelConfig) -> LanguageModel: ...
def build_model(config: AnyModelConfig) -> LanguageModel:
    """Return the model that the configuration asks for; a baseline comes with the same interface."""
    if config.architecture == "wavenet":
        from compressive.speech.wavenet import WaveNetLM

        return WaveNetLM(config)
    return CompressiveLM(config)
