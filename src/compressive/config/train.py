"""Configuration of a training run: data, training protocol, model."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from compressive.config.checks import check_values, is_int, require
from compressive.config.documented import documented
from compressive.config.model import AnyModelConfig, ModelConfig, WaveNetConfig
from compressive.config.presets import load_preset, read_tables

Precision = Literal["fp32", "bf16"]
Parallel = Literal["ddp", "fsdp"]
Attention = Literal["auto", "reference", "fused"]
Optimiser = Literal["adam", "muon"]
Decay = Literal["cosine", "linear"]
ZERO_ALLOWED = (
    "final_learning_rate", "warmup_steps", "hold_steps", "decay_steps", "weight_average", "update_every_from",
    "reset_probability", "seed", "eval_every", "sample_every", "weight_decay",
)  # fmt: skip
"""Fields of `TrainConfig` that may be 0."""


@documented
@dataclass(frozen=True)
class DataConfig:
    """The corpus to train on."""

    corpus: str = "enwik8"
    """Name of a corpus written by `compressive data prepare`."""
    data_dir: str = "data"
    """Folder of prepared corpora."""


@documented
@dataclass(frozen=True)
class TrainConfig:
    """Training protocol; the defaults are the paper's for character models."""

    steps: int = 104_000
    """Training steps; one step reads `unroll` windows of every stream."""
    batch: int = 32
    """Batch size: the corpus is cut into this many contiguous streams, each with its own memory."""
    micro_batch: Literal["auto"] | int = 0
    """Rows of a process that go through the model at a time: gradients are those of the whole batch, memory for
    activations that of these rows. 0: all at once; auto: as many as fit, by an estimate, which a run on one GPU tries
    out and halves until a step fits. Only the compressors' gradients differ where rows count unequally (documents or
    resets with masked empty memory or auto-encoding): each part then has a mean of its own."""
    unroll: int = 1
    """BPTT windows per step, through which gradients flow; 2 trains the compressor by BPTT."""
    learning_rate: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    optimiser: Optimiser = "adam"
    """adam, or (ours) muon: Muon for the matrices of the layers and compressors, Adam for everything else."""
    muon_scale: float = 1.0
    """Learning rate of Muon as a multiple of Adam's; at 1 its updates are as large as Adam's typically are."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices that Muon updates: a step takes away this share times Muon's learning rate
    (ours). For long training at a high rate, which can diverge without it (docs/log.md). 0: none, as in the paper."""
    initial_learning_rate: float = 1e-6
    """Learning rate of the first step."""
    final_learning_rate: float = 1e-6
    """Learning rate at the end of the decay and after it; may be 0."""
    warmup_steps: int = 4_000
    """Steps of linear warm-up."""
    hold_steps: int = 0
    """Steps at the peak between warm-up and decay (ours)."""
    decay_steps: int = 100_000
    """Steps of decay; 0: up to the last step."""
    decay: Decay = "cosine"
    """Shape of the decay: cosine or (ours) linear."""
    weight_average: float = 0.0
    """Decay per update of a moving average of the weights, such as 0.999; less at first, (1 + step) / (10 + step). The
    average is what is evaluated, sampled from and exported (ours). 0: none."""
    clip: float = 0.1
    """Gradient norm to clip at, separately for the model and for its compressors."""
    update_every: int = 4
    """Steps whose gradients are averaged into one update, from step `update_every_from` on."""
    update_every_from: int = 60_000
    """Step from which `update_every` applies; before it, every step is an update."""
    reset_probability: float = 0.0
    """Probability that a row's memory is emptied before a window, as at the beginning of a text (ours; in the paper it
    is only empty once, and short prompts are read badly)."""
    precision: Precision = "fp32"
    """Precision of matrix products: fp32, or bf16 by autocast (memory in bf16, weights in fp32)."""
    attention: Attention = "auto"
    """Attention implementation: reference (plain torch), fused (kernels) or auto (kernels in bf16 on a GPU)."""
    compile: bool = False
    """Compile the layers with torch.compile; adds about half a minute at the start."""
    cuda_graph: bool = True
    """Capture steps as CUDA graphs, so that a step is one launch; needs a single GPU process, ignored otherwise."""
    parallel: Parallel = "ddp"
    """With torchrun: ddp averages gradients; fsdp also shards weights and optimiser state."""
    recompute: bool = False
    """Activation checkpointing: keep only each layer's input and recompute the rest in the backward pass."""
    device: str = "auto"
    """Device, e.g. cpu or cuda:0; auto: a GPU if there is one."""
    seed: int = 0
    """Seed of the weights and of dropout."""
    log_every: int = 50
    """Steps between metric records."""
    eval_every: int = 1_000
    """Steps between evaluations on the validation split; 0 for none."""
    eval_tokens: int = 500_000
    """Tokens of the validation split that such an evaluation reads."""
    eval_test: bool = False
    """Also evaluate `eval_tokens` of the test split, for a curve; the best checkpoint is still chosen on validation."""
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
        check_values(self, zero_allowed=ZERO_ALLOWED)
        micro, chance = self.micro_batch, self.reset_probability
        require(micro == "auto" or (is_int(micro) and micro >= 0), "micro_batch", micro, "auto, 0 or a number of rows")
        sharded = self.optimiser == "muon" and self.parallel == "fsdp"
        require(
            not sharded, "optimiser", self.optimiser, "adam with parallel='fsdp': Muon needs whole matrices; or ddp"
        )
        decays = self.weight_decay > 0 and self.optimiser != "muon"
        require(not decays, "weight_decay", self.weight_decay, "0 with optimiser='adam'; only Muon's matrices decay")
        average = self.weight_average
        require(average < 1, "weight_average", average, "a number from 0 up to, but not including, 1")
        require(chance <= 1, "reset_probability", chance, "a number from 0 to 1")


@dataclass(frozen=True)
class RunConfig:
    """A training run: model, data and training."""

    model: AnyModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if isinstance(self.model, WaveNetConfig):
            chance = self.train.reset_probability
            require(not chance, "reset_probability", chance, "0: a WaveNet has no memory but its receptive field")
            return
        trainable = self.model.compression not in ("max", "mean", "most_used") and any(self.model.compressed_sizes)
        if trainable and self.model.compression_loss == "none" and self.train.unroll == 1:
            raise ValueError(
                f"compression={self.model.compression!r} with compression_loss='none' and unroll=1: nothing would "
                "train the compressor; set a compression_loss (attention, autoencoding), or BPTT with unroll=2"
            )

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Return the configuration of a preset."""
        return cls.from_tables(load_preset(name))

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> Self:
        """Build a configuration from the nested tables of a preset or of a saved config.json."""
        wavenet = tables.get("model", {}).get("architecture") == "wavenet"
        model = WaveNetConfig if wavenet else ModelConfig
        return cls(**read_tables(tables, {"model": model, "data": DataConfig, "train": TrainConfig}))
