"""What a model, its training and an agent are made of: dataclasses, checked in one place, with presets as TOML files.

A field's doc line is its help on the command line. Nothing here imports torch, so `--help` is instant.
"""

from compressive.config.agent import AgentConfig, AgentRun, LearnConfig, TaskConfig
from compressive.config.model import (
    AnyModelConfig,
    CompressedPositions,
    Compression,
    CompressionLoss,
    EmptyMemory,
    Head,
    ModelConfig,
    Norm,
    PerLayer,
    WaveNetConfig,
    transformer,
)
from compressive.config.presets import load_preset, preset_names
from compressive.config.train import Attention, DataConfig, Parallel, Precision, RunConfig, TrainConfig

__all__ = [
    "AgentConfig",
    "AgentRun",
    "AnyModelConfig",
    "Attention",
    "CompressedPositions",
    "Compression",
    "CompressionLoss",
    "DataConfig",
    "EmptyMemory",
    "Head",
    "LearnConfig",
    "ModelConfig",
    "Norm",
    "Parallel",
    "PerLayer",
    "Precision",
    "RunConfig",
    "TaskConfig",
    "TrainConfig",
    "WaveNetConfig",
    "load_preset",
    "preset_names",
    "transformer",
]
