"""Small models behind Hugging Face's interface."""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers import build, tiny_config
from torch import Tensor

from compressive import CompressiveLM, ModelConfig
from compressive.config import DataConfig, RunConfig
from compressive.data.tokenizer import Tokenizer
from compressive.hf import CompressiveConfig, CompressiveForCausalLM
from compressive.inference.generate import generate
from compressive.runs.export import write_release


def behind_hf(lm: CompressiveLM) -> CompressiveForCausalLM:
    """The same weights behind their interface, in evaluation mode."""
    model: CompressiveForCausalLM = CompressiveForCausalLM(CompressiveConfig(lm.config))
    model = model.to(next(lm.parameters()).dtype).eval()
    model.load_state_dict(lm.state_dict())
    return model


def tiny(**values: Any) -> CompressiveForCausalLM:
    return behind_hf(build(tiny_config(**values)))


def greedy(lm: CompressiveLM, prompt: list[int], length: int) -> list[int]:
    """What our own `generate` continues a prompt with, always taking the most likely token."""
    return [int(token) for token in generate(lm, torch.tensor(prompt), length, temperature=0)]


def left_padded(model: CompressiveForCausalLM, prompts: list[list[int]]) -> dict[str, Tensor]:
    """Prompts in one batch, as a tokeniser with padding_side="left" pads them."""
    width, pad = max(map(len, prompts)), model.config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (ids != pad).long()}


def write_tiny_release(folder: Path, tokenizer: Tokenizer, **values: Any) -> Path:
    """A release with random weights, as `compressive export` writes it."""
    config = ModelConfig(**{
        "vocab_size": tokenizer.vocab_size, "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "window": 8,
        "memory_size": 8, "compressed_size": 4, "compression_rate": 2,
    } | values)  # fmt: skip
    folder.mkdir(parents=True)
    weights = build(config, dtype=torch.float32).state_dict()
    about = {"corpus": "tiny", "step": 3, "checkpoint": "best"}
    write_release(folder, RunConfig(config, DataConfig("tiny")), weights, tokenizer, about)
    return folder


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Keep their progress bars out of what a test prints, and collect their warnings."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield warnings
    finally:
        logger.removeHandler(handler)
