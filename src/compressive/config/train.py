"""A training run: its data, its protocol, and the model it trains."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from compressive.config.checks import check_values
from compressive.config.model import AnyModelConfig, ModelConfig, WaveNetConfig
from compressive.config.presets import load_preset, read_tables

Precision = Literal["fp32", "bf16"]
Parallel = Literal["ddp", "fsdp"]
Attention = Literal["auto", "reference", "fused"]


@dataclass(frozen=True)
class DataConfig:
    """Which text to train on."""

    corpus: str = "enwik8"
    """Name of a corpus that `compressive data prepare` has written."""
    data_dir: str = "data"
    """Folder that holds prepared corpora."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train: the paper's protocol by default, for characters."""

    steps: int = 104_000
    """How many steps to train for; one step reads `unroll` windows in every stream."""
    batch: int = 32
    """Streams: contiguous streams of the corpus that are read side by side, each with its memory."""
    unroll: int = 1
    """Windows per step through which gradients flow; 2 trains compression by BPTT."""
    learning_rate: float = 3e-4
    """Highest learning rate, reached when warm-up ends."""
    initial_learning_rate: float = 1e-6
    """Learning rate of the first step."""
    final_learning_rate: float = 1e-6
    """Learning rate when the cosine decay ends, and from then on."""
    warmup_steps: int = 4_000
    """Steps of linear warm-up."""
    decay_steps: int = 100_000
    """Steps of cosine decay after the warm-up."""
    clip: float = 0.1
    """Largest gradient norm, for the model and for its compressors apart."""
    update_every: int = 4
    """Average gradients over so many steps per update, once `update_every_from` is reached."""
    update_every_from: int = 60_000
    """Step from which `update_every` holds; before it every step is an update."""
    precision: Precision = "fp32"
    """Arithmetic of the matrix products: fp32, or bf16 by autocast, with memory in bf16 and weights in fp32."""
    attention: Attention = "auto"
    """Which form of attention runs: reference, plain torch; fused, the kernels; auto, kernels in bf16 on a GPU."""
    compile: bool = False
    """Compile the layers; takes half a minute or so at the start."""
    cuda_graph: bool = True
    """Capture steps as CUDA graphs, which one GPU that trains alone can: a step then costs the host one launch."""
    parallel: Parallel = "ddp"
    """What several processes, started by torchrun, share: ddp, the gradients; fsdp, weights and optimiser as well."""
    recompute: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, more time."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one."""
    seed: int = 0
    """Seed of the weights and of dropout."""
    log_every: int = 50
    """Steps between lines of metrics."""
    eval_every: int = 1_000
    """Steps between evaluations on the validation split; 0 for none."""
    eval_tokens: int = 500_000
    """How much of the validation split such an evaluation reads."""
    eval_test: bool = False
    """Read as much of the test split as well, for a curve; the best checkpoint is that of the validation split."""
    sample_every: int = 5_000
    """Steps between text samples; 0 for none."""
    sample_tokens: int = 400
    """Length of a sample in tokens."""
    checkpoint_every: int = 1_000
    """Steps between checkpoints."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard."""
    wandb: bool = False
    """Also send metrics to Weights & Biases."""

    def __post_init__(self) -> None:
        check_values(self, zero_allowed=("warmup_steps", "update_every_from", "seed", "eval_every", "sample_every"))


@dataclass(frozen=True)
class RunConfig:
    """A training run: model, data and training."""

    model: AnyModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if isinstance(self.model, WaveNetConfig):
            return
        trainable = self.model.compression not in ("max", "mean", "most_used") and any(self.model.compressed_sizes)
        if trainable and self.model.compression_loss == "none" and self.train.unroll == 1:
            raise ValueError(
                f"compression={self.model.compression!r} with compression_loss='none' and unroll=1: nothing would "
                "train the compressor; give it a loss (attention, autoencoding) or BPTT through unroll=2"
            )

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Return the run that a preset describes."""
        return cls.from_tables(load_preset(name))

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> Self:
        """Build a run from nested tables, such as a preset or a saved configuration holds."""
        wavenet = tables.get("model", {}).get("architecture") == "wavenet"
        model = WaveNetConfig if wavenet else ModelConfig
        return cls(**read_tables(tables, {"model": model, "data": DataConfig, "train": TrainConfig}))
