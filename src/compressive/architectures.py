"""From a configuration to its model."""

from compressive.config import AnyModelConfig, WaveNetConfig
from compressive.model.language_model import CompressiveLM


def build_model(config: AnyModelConfig) -> CompressiveLM:
    """Return the model that the configuration asks for; a baseline comes with the same interface."""
    if isinstance(config, WaveNetConfig):
        from compressive.speech.wavenet import WaveNetLM

        return WaveNetLM(config)
    return CompressiveLM(config)
