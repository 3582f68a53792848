"""Audio and runs for the tests of speech."""

from pathlib import Path
from typing import Any

import numpy as np

from compressive.config import DataConfig, ModelConfig, RunConfig, TrainConfig, WaveNetConfig
from compressive.data.corpus import Clip, Corpus, write_corpus
from compressive.data.speech.codes import MuLawTokenizer, PCMTokenizer


def tone(seconds: float, rate: int = 24_000, hertz: float = 440.0, loud: float = 0.3) -> np.ndarray:
    return loud * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write_audio(path: Path, samples: np.ndarray, rate: int = 24_000, **options: Any) -> Path:
    import soundfile  # an extra; most tests that use this module need no file

    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, **options)
    return path


def pcm(samples: np.ndarray) -> bytes:
    return np.round(samples * 32767).astype("<i2").tobytes()


def tiny_speech(data_dir: Path, kind: str = "mulaw") -> Corpus:
    """Write a corpus named `tiny` of short, noisy tones: eight clips in train, two each in valid and test."""
    generator = np.random.default_rng(0)
    clips: list[Clip] = []
    splits: dict[str, list[bytes]] = {}
    for split, count in (("train", 8), ("valid", 2), ("test", 2)):
        splits[split], at = [], 0
        for i in range(count):
            audio = tone(0.02 + 0.003 * i, hertz=300 + 100 * i) + 0.01 * generator.standard_normal(480 + 72 * i)
            splits[split].append(pcm(audio))
            clips.append(Clip(split, at, at + len(audio), f"{split}-{i}.wav"))
            at += len(audio)
    tokenizer = MuLawTokenizer() if kind == "mulaw" else PCMTokenizer()
    return write_corpus(data_dir / "tiny", "tiny", tokenizer, splits, {}, clips=lambda: clips)


def starts_of(corpus: Corpus, split: str) -> np.ndarray:
    """Where the clips of a split start; the corpus must have clips."""
    found = corpus.starts(split)
    assert found is not None
    return found


def tiny_wavenet(**values: Any) -> WaveNetConfig:
    sizes = {"vocab_size": 256, "n_layers": 6, "cycle": 3, "kernel": 3, "residual": 8, "skip": 6, "window": 40}
    return WaveNetConfig(**(sizes | values))


def tiny_speech_config(data_dir: Path, model: ModelConfig | WaveNetConfig | None = None, **train: Any) -> RunConfig:
    model = model or ModelConfig(
        vocab_size=256, n_layers=2, d_model=16, n_heads=2, d_ff=32, window=40, memory_size=40, compressed_size=20,
        empty_memory="masked",
    )  # fmt: skip
    values: dict[str, Any] = {
        "steps": 12, "batch": 4, "warmup_steps": 3, "decay_steps": 9, "learning_rate": 3e-3, "log_every": 4,
        "eval_every": 6, "eval_tokens": 500, "sample_every": 0, "checkpoint_every": 6, "device": "cpu",
        "update_every": 1,
    } | train  # fmt: skip
    return RunConfig(model, DataConfig("tiny", str(data_dir)), TrainConfig(**values))
