"""The weights of a run or a release, read once, and models of any memory sizes made of them."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from compressive.architectures import build_model
from compressive.config import AnyModelConfig, EmptyMemory, ModelConfig, PerLayer, WaveNetConfig
from compressive.model.language_model import CompressiveLM
from compressive.runs import checkpoint
from compressive.runs.run import Run

WEIGHTS, ABOUT = "model.safetensors", "release.json"
"""What a release holds instead of checkpoints; see release.py."""


@dataclass(frozen=True)
class Setting:
    """A model with the memory to evaluate it with."""

    config: AnyModelConfig
    reason: str  # for its `empty_memory`


@dataclass(frozen=True)
class Trained:
    """One checkpoint's weights, with the model that they were trained as."""

    config: AnyModelConfig
    step: int
    weights: dict[str, Tensor]

    @classmethod
    def load(cls, run: Run, which: Literal["best", "last"] = "best") -> Self:
        """Read the checkpoint that did best on the validation split, or the last; of a release, its only weights."""
        if (run.folder / ABOUT).is_file():
            about = json.loads((run.folder / ABOUT).read_text("utf-8"))
            return cls(run.config.model, about["step"], _read_weights(run.folder / WEIGHTS))
        found = checkpoint.best(run.checkpoints) if which == "best" else checkpoint.latest(run.checkpoints)
        if found is None:
            raise checkpoint.CheckpointError(f"{run.folder} holds no whole checkpoint; train it with --resume first")
        return cls(run.config.model, found.step, found.tensors("model"))

    def setting(
        self,
        memory_size: PerLayer | None = None,
        compressed_size: PerLayer | None = None,
        empty_memory: EmptyMemory | Literal["auto"] = "auto",
    ) -> Setting:
        """Choose the memory, what is not given as in training, and check that the weights can do it.

        With a memory larger than in training a text begins with more empty slots than the model ever saw; if
        nobody says otherwise, they are masked then.
        """
        sizes = {"memory_size": memory_size, "compressed_size": compressed_size}
        if isinstance(self.config, WaveNetConfig):
            for name, value in (*sizes.items(), ("empty_memory", None if empty_memory == "auto" else empty_memory)):
                if value is not None:
                    raise ValueError(f"{name}={value!r}: a WaveNet remembers its receptive field; leave it out")
            return Setting(self.config, "as in training")
        config = dataclasses.replace(self.config, **{k: v for k, v in sizes.items() if v is not None})  # type: ignore[arg-type]
        self._check_compressors(config)
        if empty_memory != "auto":
            return Setting(dataclasses.replace(config, empty_memory=empty_memory), "asked for")
        if config.empty_memory == "zeros" and _is_larger(config, self.config):
            return Setting(dataclasses.replace(config, empty_memory="masked"), "memory is larger than in training")
        return Setting(config, "as in training")

    def model(self, config: AnyModelConfig, device: torch.device | str = "cpu") -> CompressiveLM:
        """Build a model, in evaluation mode; compressors of layers that no longer compress are left out."""
        model = build_model(config)
        wanted = model.state_dict()
        weights = {name: w for name, w in self.weights.items() if name in wanted or "compress" not in name}
        model.load_state_dict(weights)
        return model.to(device).eval()

    def _check_compressors(self, config: ModelConfig) -> None:
        with torch.device("meta"):
            wanted = CompressiveLM(config).trunk.named_parameters(prefix="trunk")
        lacking = {int(name.split(".")[2]) for name, _ in wanted if "compress" in name and name not in self.weights}
        if lacking:
            layers = ", ".join(map(str, sorted(lacking)))
            raise ValueError(
                f"compressed_size={config.compressed_size}: expected 0 in layers {layers}, "
                f"trained without compressed memory and so without a {config.compression!r} compressor; "
                "train with a compressed_size above 0 to change it later"
            )


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read safetensors and nothing else: a pickle runs whatever code is in it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: expected the weights as safetensors; nothing else is loaded")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file, or a damaged one ({error}): a pickle is never loaded; export it again"
        ) from error


def _is_larger(config: ModelConfig, trained: ModelConfig) -> bool:
    """Whether any layer has more slots of either kind."""
    now, then = ((*c.memory_sizes, *c.compressed_sizes) for c in (config, trained))
    return any(a > b for a, b in zip(now, then, strict=True))
