"""What a model and its training are made of: dataclasses, checked in one place, with presets as TOML files.

A field's doc line is its help on the command line.

Nothing here imports torch, so that a command line can show its help at once.
"""

import dataclasses
import functools
import tomllib
import warnings
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, Self, get_args

PerLayer = int | tuple[int, ...]
Compression = Literal["max", "mean", "conv", "dilated", "most_used", "gru", "attention"]
CompressionLoss = Literal["attention", "autoencoding", "none"]
CompressedPositions = Literal["shared", "separate"]
EmptyMemory = Literal["zeros", "masked"]
Norm = Literal["post", "pre"]
Precision = Literal["fp32", "bf16"]
Parallel = Literal["ddp", "fsdp"]
Attention = Literal["auto", "readable", "fused"]
Head = Literal["softmax", "logistics"]


@dataclass(frozen=True)
class ModelConfig:
    """The Compressive Transformer; with `compressed_size=0` everywhere it is a TransformerXL."""

    vocab_size: int = 256
    """Number of different tokens; 256 for bytes."""
    n_layers: int = 12
    """Number of layers, l in the paper."""
    d_model: int = 512
    """Width of the activations, d in the paper."""
    n_heads: int = 8
    """Attention heads per layer; each is d_model / n_heads wide."""
    d_ff: int = 2048
    """Hidden width of each layer's MLP."""
    dropout: float = 0.0
    """Dropout on the input, the position code, both branches of a layer, the MLP's hidden units and the output."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    window: int = 512
    """Longest stretch of tokens read at once, n_s in the paper."""
    memory_size: PerLayer = 512
    """Slots of recent memory, n_m: one number, or one per layer."""
    compressed_size: PerLayer = 512
    """Slots of compressed memory, n_cm: one number, or one per layer; 0 everywhere is a TransformerXL."""
    compression_rate: PerLayer = 4
    """How many old memories become one compressed memory, c: one number, or one per layer."""
    compression: Compression = "conv"
    """The compression function f_c."""
    compression_loss: CompressionLoss = "attention"
    """What trains f_c: attention reconstruction, auto-encoding, or none (then only BPTT can)."""
    compressed_positions: CompressedPositions = "shared"
    """Whether compressed slots share the position code of the others, or have a W_r and bias of their own."""
    empty_memory: EmptyMemory = "zeros"
    """Slots not yet written: zeros that take part in attention (Algorithm 1), or masked from it."""
    norm: Norm = "post"
    """Layer norm after each residual sum (Algorithm 1), or before each branch."""
    adaptive_cutoffs: tuple[int, ...] = ()
    """Where the vocabulary, most frequent first, is cut into bands for adaptive input and softmax; empty: plain."""
    adaptive_factor: int = 4
    """By how much each further band of the adaptive embedding is narrower than the one before."""
    head: Head = "softmax"
    """Distribution of the next token: a softmax, or a mixture of logistics over ordered codes, as of 16-bit sound."""
    mixtures: int = 10
    """Logistics in that mixture."""
    architecture: Literal["compressive"] = "compressive"
    """Which kind of model this is, in files."""

    def __post_init__(self) -> None:
        for name in ("memory_size", "compressed_size", "compression_rate", "adaptive_cutoffs"):
            if isinstance(value := getattr(self, name), list):  # TOML and JSON have no tuples
                object.__setattr__(self, name, tuple(value))
        _check(self)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Return the model of a preset, some of its values replaced."""
        values = load_preset(name)["model"] | overrides
        if (kind := values.get("architecture", "compressive")) != "compressive":
            raise ValueError(
                f"preset={name!r} is a {kind}: build_model(RunConfig.from_preset({name!r}).model) builds it"
            )
        return cls(**values)

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def memory_sizes(self) -> tuple[int, ...]:
        """Slots of recent memory in each layer."""
        return self._per_layer(self.memory_size)

    @property
    def compressed_sizes(self) -> tuple[int, ...]:
        """Slots of compressed memory in each layer."""
        return self._per_layer(self.compressed_size)

    @property
    def compression_rates(self) -> tuple[int, ...]:
        """The compression rate of each layer."""
        return self._per_layer(self.compression_rate)

    @property
    def temporal_range(self) -> int:
        """How many tokens back, before its window, a token can matter: l × (n_m + c·n_cm) for equal layers."""
        layers = zip(self.memory_sizes, self.compression_rates, self.compressed_sizes, strict=True)
        return sum(recent + rate * compressed for recent, rate, compressed in layers)

    def _per_layer(self, value: PerLayer) -> tuple[int, ...]:
        return (value,) * self.n_layers if isinstance(value, int) else value


@dataclass(frozen=True)
class WaveNetConfig:
    """WaveNet (van den Oord et al. 2016), the baseline on speech: gated, dilated, causal convolutions."""

    vocab_size: int = 256
    """Number of different samples; 256 for 8-bit mu-law codes."""
    n_layers: int = 30
    """Number of layers; dilations double from layer to layer and begin again at 1 after each cycle."""
    cycle: int = 10
    """Layers in a cycle: 10 for dilations from 1 to 512."""
    kernel: int = 3
    """Samples that one convolution joins."""
    residual: int = 416
    """Width of the activations, and of each of the two halves of a gate."""
    skip: int = 256
    """Width of the sum of all layers' contributions to the output."""
    dropout: float = 0.0
    """Dropout on the input of every convolution."""
    window: int = 3840
    """Samples read at once; what came before is carried as memory, the whole receptive field of it."""
    head: Head = "softmax"
    """Distribution of the next sample: a softmax, or a mixture of logistics over ordered codes, as of 16-bit sound."""
    mixtures: int = 10
    """Logistics in that mixture."""
    architecture: Literal["wavenet"] = "wavenet"
    """Which kind of model this is, in files."""

    def __post_init__(self) -> None:
        _check_values(self)
        _check_head(self)

    @property
    def dilations(self) -> tuple[int, ...]:
        """The dilation of each layer."""
        return tuple(2 ** (layer % self.cycle) for layer in range(self.n_layers))

    @property
    def receptive_field(self) -> int:
        """How many samples, the newest included, can matter to a prediction."""
        return 1 + (self.kernel - 1) * sum(self.dilations)


AnyModelConfig = ModelConfig | WaveNetConfig


def transformer(config: AnyModelConfig) -> ModelConfig:
    """Return the configuration if it is one of a Compressive Transformer, and refuse a baseline."""
    if not isinstance(config, ModelConfig):
        raise ValueError(f"architecture={config.architecture!r}: expected a Compressive Transformer or TransformerXL")
    return config


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
    """How many steps to train for; one step reads `unroll` windows in every lane."""
    batch: int = 32
    """Lanes: contiguous streams of the corpus that are read side by side, each with its memory."""
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
    """What computes attention: readable, plain torch; fused, Triton kernels; auto, fused in bf16 on a GPU."""
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


def read_tables(tables: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """Turn nested tables into one dataclass each; a table or field that is not known is refused."""
    for table, values in tables.items():
        _require(table in kinds, "table", table, f"one of {', '.join(kinds)}")
        known = [field.name for field in dataclasses.fields(kinds[table])]
        for name in values:
            _require(name in known, f"{table} field", name, f"one of {', '.join(known)}")
    return {table: kinds[table](**tables.get(table, {})) for table in kinds}


def preset_names(holding: str | None = None) -> list[str]:
    """Return the names of all presets, or of those that hold a table: `data` for text, `task` for agents."""
    folder = resources.files("compressive") / "presets"
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return [name for name in names if holding is None or holding in load_preset(name)]


def load_preset(name: str) -> dict[str, Any]:
    """Read a preset's tables; `extends = "other"` in it means the other's values, then its own on top."""
    if name not in preset_names():
        raise ValueError(f"preset={name!r} does not exist; choose one of {', '.join(preset_names())}")
    tables = tomllib.loads((resources.files("compressive") / "presets" / f"{name}.toml").read_text("utf-8"))
    if (parent := tables.pop("extends", None)) is None:
        return tables
    merged = load_preset(parent)
    for table, values in tables.items():
        merged[table] = merged.get(table, {}) | values
    return merged


def _check(config: ModelConfig) -> None:
    """Refuse what cannot work, naming the value, what was expected and the remedy."""
    _check_values(config)
    _check_head(config)

    for name, least in (("memory_size", 0), ("compressed_size", 0), ("compression_rate", 1)):
        value = getattr(config, name)
        if not isinstance(value, tuple):
            _require(_is_int(value) and value >= least, name, value, f"a whole number of at least {least}")
            continue
        _require(len(value) == config.n_layers, name, value, f"one value per layer, n_layers={config.n_layers}")
        _require(all(_is_int(v) and v >= least for v in value), name, value, f"whole numbers of at least {least}")

    _require(
        config.d_model % 2 == 0,
        "d_model",
        config.d_model,
        "an even number, as sines and cosines come in pairs",
    )
    _require(
        config.d_model % config.n_heads == 0,
        "n_heads",
        config.n_heads,
        f"a divisor of d_model={config.d_model}; choose another number of heads or width",
    )
    cutoffs = config.adaptive_cutoffs
    _require(
        isinstance(cutoffs, tuple)
        and all(_is_int(cut) for cut in cutoffs)
        and list(cutoffs) == sorted(set(cutoffs))
        and all(0 < cut < config.vocab_size for cut in cutoffs),
        "adaptive_cutoffs",
        cutoffs,
        f"rising whole numbers between 0 and vocab_size={config.vocab_size}",
    )
    _require(
        config.adaptive_factor ** len(cutoffs) <= config.d_model,
        "adaptive_factor",
        config.adaptive_factor,
        f"a factor that leaves each of {len(cutoffs) + 1} bands a width of at least 1; lower it or cut less often",
    )

    dropped = []
    layers = zip(config.memory_sizes, config.compressed_sizes, config.compression_rates, strict=True)
    for layer, (recent, compressed, rate) in enumerate(layers):
        if compressed == 0:
            continue
        _require(
            recent > 0,
            "memory_size",
            recent,
            f"at least 1 in layer {layer}, whose compressed_size={compressed} is fed from it; or set that to 0",
        )
        _require(
            rate <= config.window,
            "compression_rate",
            rate,
            f"at most window={config.window} in layer {layer}: nothing would ever be compressed; lower it",
        )
        if config.window % rate:
            dropped.append(f"{config.window % rate} in layer {layer} (compression_rate={rate})")
    if dropped:
        _warn_once(
            f"window={config.window} is not a multiple of compression_rate: of each window's evicted memories "
            f"the newest are dropped uncompressed, {', '.join(dropped)}"
        )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def _check_values(config: AnyModelConfig) -> None:
    """Check every field by itself, as far as its type says what it may be."""
    _check_choices(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is float:
            in_range = isinstance(value, int | float) and 0 <= value < 1
            _require(in_range, field.name, value, "a number from 0 up to, but not including, 1")
        elif field.type is int:
            _require(_is_int(value) and value >= 1, field.name, value, "a whole number of at least 1")


def _check_head(config: AnyModelConfig) -> None:
    if config.head == "logistics":
        _require(
            config.vocab_size % 2 == 0 and config.vocab_size <= 65_536,
            "vocab_size",
            config.vocab_size,
            "an even number of ordered codes, up to 65,536 for 16 bits, with head='logistics'",
        )
        adaptive = isinstance(config, ModelConfig) and config.adaptive_cutoffs
        _require(
            not adaptive, "adaptive_cutoffs", adaptive, "none with head='logistics', whose codes have no frequency"
        )


def check_values(config: Any, zero_allowed: tuple[str, ...] = ()) -> None:
    """Refuse names that are none, counts below 1 and numbers that are not above 0; some fields may also be 0."""
    _check_choices(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least = 0 if field.name in zero_allowed else 1
        if field.type is int:
            _require(_is_int(value) and value >= least, field.name, value, f"a whole number of at least {least}")
        elif field.type is float:
            in_range = isinstance(value, int | float) and (value > 0 or (value == 0 and not least))
            _require(in_range, field.name, value, "a number above 0" if least else "a number of at least 0")


def _check_choices(config: Any) -> None:
    for field in dataclasses.fields(config):
        if (choices := get_args(field.type)) and all(isinstance(choice, str) for choice in choices):
            value = getattr(config, field.name)
            _require(value in choices, field.name, value, f"one of {', '.join(choices)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")
