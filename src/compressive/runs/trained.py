"""The trained weights of a run or a release, and models with any memory sizes built from them."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, Self, overload

import torch
from torch import Tensor

from compressive.architectures import build_model
from compressive.config import AnyModelConfig, EmptyMemory, ModelConfig, PerLayer, WaveNetConfig
from compressive.model.language_model import CompressiveLM, LanguageModel
from compressive.runs import checkpoint
from compressive.runs.run import RELEASE, Run, read_json
from compressive.runs.weights import read_weights


@dataclass(frozen=True)
class EvalConfig:
    """The model configuration to evaluate with, memory sizes included."""

    model: AnyModelConfig
    reason: str  # why `model.empty_memory` has its value


@dataclass(frozen=True)
class Trained:
    """The weights of one checkpoint and the configuration they were trained with."""

    config: AnyModelConfig
    step: int
    weights: dict[str, Tensor]
    resets: bool = False
    """Whether memories were emptied now and then in training, so that the model knows an empty memory."""

    @classmethod
    def load(cls, run: Run, which: Literal["best", "last"] = "best") -> Self:
        """Read the best checkpoint (lowest validation loss) or the last one; a release has only one set of weights.

        Raises CheckpointError if the run has no usable checkpoint.
        """
        resets = run.config.train.reset_probability > 0
        if (run.folder / RELEASE).is_file():
            about = read_json(run.folder / RELEASE, ("step",))
            return cls(run.config.model, about["step"], read_weights(run.folder), resets)
        found = checkpoint.best(run.checkpoints) if which == "best" else checkpoint.latest(run.checkpoints)
        if found is None:
            raise checkpoint.CheckpointError(
                f"{run.folder} holds no checkpoint yet: compressive train --resume {run.folder}"
            )
        part = "average" if run.config.train.weight_average else "model"
        return cls(run.config.model, found.step, found.tensors(part), resets)

    def eval_config(
        self,
        memory_size: PerLayer | None = None,
        compressed_size: PerLayer | None = None,
        empty_memory: EmptyMemory | Literal["auto"] = "auto",
    ) -> EvalConfig:
        """Return the configuration to evaluate with; a size of None is the size in training.

        A memory larger than in training starts with more empty slots than the model has seen. With
        `empty_memory="auto"` those slots are masked, unless training emptied memories now and then: such a model reads
        zeros well, however many, and a masked memory badly. Raises ValueError if a layer would compress but has no
        trained compressor, or if a WaveNet is given memory sizes.
        """
        sizes = {"memory_size": memory_size, "compressed_size": compressed_size}
        if isinstance(self.config, WaveNetConfig):
            for name, value in (*sizes.items(), ("empty_memory", None if empty_memory == "auto" else empty_memory)):
                if value is not None:
                    raise ValueError(f"{name}={value!r}: a WaveNet remembers its receptive field only; leave it out")
            return EvalConfig(self.config, "as in training")
        config = dataclasses.replace(self.config, **{k: v for k, v in sizes.items() if v is not None})  # type: ignore[arg-type]
        self._check_compressors(config)
        if empty_memory != "auto":
            return EvalConfig(dataclasses.replace(config, empty_memory=empty_memory), "asked for")
        if config.empty_memory == "zeros" and _is_larger(config, self.config) and not self.resets:
            return EvalConfig(dataclasses.replace(config, empty_memory="masked"), "memory is larger than in training")
        return EvalConfig(config, "as in training")

    @overload
    def model(self, config: ModelConfig, device: torch.device | str = "cpu") -> CompressiveLM: ...
    @overload
    def model(self, config: AnyModelConfig, device: torch.device | str = "cpu") -> LanguageModel: ...
    def model(self, config: AnyModelConfig, device: torch.device | str = "cpu") -> LanguageModel:
        """Build the model in evaluation mode; weights of compressors that it does not use are dropped."""
        model = build_model(config)
        model.load_state_dict(self._used_by(model.state_dict()))
        return model.to(device).eval()

    def copy_into(self, model: LanguageModel) -> bool:
        """Copy the weights into a model of the same shape, to train it further; memory sizes may differ.

        Compressors that these weights lack stay as they are. Returns whether there are such.
        """
        own = model.state_dict()
        fresh = {name: w for name, w in own.items() if "compress" in name and name not in self.weights}
        model.load_state_dict(self._used_by(own) | fresh)
        return bool(fresh)

    def _used_by(self, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights without those of compressors that a model does not have."""
        return {name: w for name, w in self.weights.items() if name in wanted or "compress" not in name}

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


def _is_larger(config: ModelConfig, trained: ModelConfig) -> bool:
    """Whether any layer has more recent or compressed slots than in training."""
    now, then = ((*c.memory_sizes, *c.compressed_sizes) for c in (config, trained))
    return any(a > b for a, b in zip(now, then, strict=True))
