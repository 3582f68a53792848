"""`help()` of a class has every field with its type and its meaning."""

import dataclasses

import pytest

from compressive import DecodingState, Memory, ModelConfig, Score, TextState
from compressive.config import AgentConfig, DataConfig, LearnConfig, TaskConfig, TrainConfig, WaveNetConfig
from compressive.config.documented import documented
from compressive.model.decoding import LayerCache
from compressive.model.language_model import LMOutput
from compressive.model.memory import LayerMemory
from compressive.model.transformer import TrunkOutput

CONFIGS = [ModelConfig, WaveNetConfig, DataConfig, TrainConfig, TaskConfig, AgentConfig, LearnConfig]
RECORDS = [LMOutput, TrunkOutput, Memory, LayerMemory, LayerCache, DecodingState, TextState, Score]


@pytest.mark.parametrize("kind", CONFIGS + RECORDS)
def test_every_field_is_explained(kind):
    assert kind.__doc__ is not None
    _, section = kind.__doc__.split("\nAttributes:\n")
    shown = {line.split()[0]: line.split("): ", 1)[1] for line in section.splitlines()}
    own = [field.name for field in dataclasses.fields(kind) if field.name != "owns_buffers"]
    assert list(shown) == own
    assert all(len(text) > 3 for text in shown.values())


def test_a_comment_and_a_string_are_read_and_what_has_neither_is_left_out():
    assert "vocab_size (int): Vocabulary size; 256 for bytes." in (ModelConfig.__doc__ or "")
    assert "nll (Tensor | None): -log p of each target in nats, (B, T)" in (LMOutput.__doc__ or "")

    @documented
    class Local:
        """No module has it at its top."""

        field: int = 0

    assert Local.__doc__ == "No module has it at its top."
