"""Tiny runs for the tests of training and of the commands."""

import dataclasses
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import warm_python

from compressive.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from compressive.config.agent import AgentRun
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import ByteTokenizer
from compressive.runs import checkpoint
from compressive.runs.checkpoint import Checkpoint
from compressive.runs.run import Run

SHARD = "shard-00001-model-00001-of-00002.safetensors"
"""The weights in a checkpoint that one process wrote."""
WORDS = ("the cat sat on a mat and then the dog ran to a red hat in an old inn by the sea").split()  # noqa: SIM905


def text(n_words: int, seed: int) -> bytes:
    """Sentences of simple words: something that a tiny model learns in a few steps."""
    generator = random.Random(seed)
    lines = [" ".join(generator.choices(WORDS, k=9)) + "." for _ in range(n_words // 9)]
    return "\n".join(lines).encode()


def tiny_corpus(data_dir: Path) -> Path:
    """A corpus named `tiny`, in bytes."""
    splits = {name: [text(n, i)] for i, (name, n) in enumerate({"train": 4000, "valid": 300, "test": 300}.items())}
    return write_corpus(data_dir / "tiny", "tiny", ByteTokenizer(), splits, {}).folder


def tiny_run_config(data_dir: Path, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """A run of a few milliseconds per step."""
    model_values: dict[str, Any] = {
        "vocab_size": 256, "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "window": 16, "memory_size": 16,
        "compressed_size": 8, "compression_rate": 4,
    } | (model or {})  # fmt: skip
    train_values: dict[str, Any] = {
        "steps": 20, "batch": 4, "warmup_steps": 5, "decay_steps": 15, "learning_rate": 3e-3, "log_every": 5,
        "eval_every": 10, "eval_tokens": 500, "sample_every": 0, "checkpoint_every": 10, "device": "cpu",
    } | train  # fmt: skip
    return RunConfig(ModelConfig(**model_values), DataConfig("tiny", str(data_dir)), TrainConfig(**train_values))


def model_config(config: RunConfig) -> ModelConfig:
    """The run's model configuration, which must be a Compressive Transformer's."""
    assert isinstance(config.model, ModelConfig)
    return config.model


def latest(folder: Path) -> Checkpoint:
    """The newest undamaged checkpoint, which must exist."""
    found = checkpoint.latest(folder)
    assert found is not None
    return found


def flags(config: RunConfig | AgentRun) -> list[str]:
    """A configuration as words of the command line."""
    words = []
    for table, values in dataclasses.asdict(config).items():
        for name, value in values.items():
            option = f"--{table}.{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(option if value else f"--{table}.no-{name.replace('_', '-')}")
            elif isinstance(value, tuple):
                words += [option, *map(str, value)] if value else []
            else:
                words += [option, str(value)]
    return words


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the real command line in a process of its own, which has torch already (see `warm_python`)."""
    return subprocess.run(
        [*warm_python.interpreter(), "-m", "compressive", *map(str, words)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, **options,
    )  # fmt: skip


def make_run(folder: Path, config: RunConfig) -> Run:
    return Run.create(folder, config)
