"""The models: the Compressive Transformer, and WaveNet, the baseline on speech."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from compressive.config.checks import check_choices, is_int, require, warn_once
from compressive.config.presets import load_preset

PerLayer = int | tuple[int, ...]
Compression = Literal["max", "mean", "conv", "dilated", "most_used", "gru", "attention"]
CompressionLoss = Literal["attention", "autoencoding", "none"]
CompressedPositions = Literal["shared", "separate"]
EmptyMemory = Literal["zeros", "masked"]
Norm = Literal["post", "pre"]
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


def _check(config: ModelConfig) -> None:
    """Refuse what cannot work, naming the value, what was expected and the remedy."""
    _check_values(config)
    _check_head(config)

    for name, least in (("memory_size", 0), ("compressed_size", 0), ("compression_rate", 1)):
        value = getattr(config, name)
        if not isinstance(value, tuple):
            require(is_int(value) and value >= least, name, value, f"a whole number of at least {least}")
            continue
        require(len(value) == config.n_layers, name, value, f"one value per layer, n_layers={config.n_layers}")
        require(all(is_int(v) and v >= least for v in value), name, value, f"whole numbers of at least {least}")

    require(
        config.d_model % 2 == 0,
        "d_model",
        config.d_model,
        "an even number, as sines and cosines come in pairs",
    )
    require(
        config.d_model % config.n_heads == 0,
        "n_heads",
        config.n_heads,
        f"a divisor of d_model={config.d_model}; choose another number of heads or width",
    )
    cutoffs = config.adaptive_cutoffs
    require(
        isinstance(cutoffs, tuple)
        and all(is_int(cut) for cut in cutoffs)
        and list(cutoffs) == sorted(set(cutoffs))
        and all(0 < cut < config.vocab_size for cut in cutoffs),
        "adaptive_cutoffs",
        cutoffs,
        f"rising whole numbers between 0 and vocab_size={config.vocab_size}",
    )
    require(
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
        require(
            recent > 0,
            "memory_size",
            recent,
            f"at least 1 in layer {layer}, whose compressed_size={compressed} is fed from it; or set that to 0",
        )
        require(
            rate <= config.window,
            "compression_rate",
            rate,
            f"at most window={config.window} in layer {layer}: nothing would ever be compressed; lower it",
        )
        if config.window % rate:
            dropped.append(f"{config.window % rate} in layer {layer} (compression_rate={rate})")
    if dropped:
        warn_once(
            f"window={config.window} is not a multiple of compression_rate: of each window's evicted memories "
            f"the newest are dropped uncompressed, {', '.join(dropped)}"
        )


def _check_values(config: AnyModelConfig) -> None:
    """Check every field by itself, as far as its type says what it may be."""
    check_choices(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is float:
            in_range = isinstance(value, int | float) and 0 <= value < 1
            require(in_range, field.name, value, "a number from 0 up to, but not including, 1")
        elif field.type is int:
            require(is_int(value) and value >= 1, field.name, value, "a whole number of at least 1")


def _check_head(config: AnyModelConfig) -> None:
    if config.head == "logistics":
        require(
            config.vocab_size % 2 == 0 and config.vocab_size <= 65_536,
            "vocab_size",
            config.vocab_size,
            "an even number of ordered codes, up to 65,536 for 16 bits, with head='logistics'",
        )
        adaptive = isinstance(config, ModelConfig) and config.adaptive_cutoffs
        require(not adaptive, "adaptive_cutoffs", adaptive, "none with head='logistics', whose codes have no frequency")
