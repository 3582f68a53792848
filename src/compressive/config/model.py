"""Model configurations: the Compressive Transformer, and WaveNet, the speech baseline."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from compressive.config.checks import check_choices, is_int, require, warn_once
from compressive.config.documented import documented
from compressive.config.presets import load_preset

PerLayer = int | tuple[int, ...]
Compression = Literal["max", "mean", "conv", "dilated", "most_used", "gru", "attention"]
CompressionLoss = Literal["attention", "autoencoding", "none"]
CompressedPositions = Literal["shared", "separate", "from_window"]
EmptyMemory = Literal["zeros", "masked"]
SpanningSlots = Literal["hidden", "partial"]
Norm = Literal["post", "pre"]
Head = Literal["softmax", "logistics"]


@documented
@dataclass(frozen=True)
class ModelConfig:
    """The Compressive Transformer; with `compressed_size=0` in all layers it is a TransformerXL."""

    vocab_size: int = 256
    """Vocabulary size; 256 for bytes."""
    n_layers: int = 12
    """Number of layers, l in the paper."""
    d_model: int = 512
    """Width of the activations, d in the paper."""
    n_heads: int = 8
    """Attention heads per layer; each is d_model / n_heads wide."""
    d_ff: int = 2048
    """Hidden width of each layer's MLP."""
    dropout: float = 0.0
    """Dropout on the input, the position encoding, both branches of a layer, the MLP's hidden units and the output."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    window: int = 512
    """Maximum tokens per forward pass, n_s in the paper."""
    memory_size: PerLayer = 512
    """Slots of recent memory, n_m in the paper: one number, or one per layer."""
    compressed_size: PerLayer = 512
    """Slots of compressed memory, n_cm: one number, or one per layer; 0 in all layers gives a TransformerXL."""
    compression_rate: PerLayer = 4
    """Memories compressed into one, c in the paper: one number, or one per layer."""
    compression: Compression = "conv"
    """Compression function f_c."""
    compression_loss: CompressionLoss = "attention"
    """Loss that trains f_c: attention reconstruction, auto-encoding, or none (BPTT only)."""
    compressed_positions: CompressedPositions = "shared"
    """Positions of compressed slots: shared; separate, own W_r and bias; from_window, and counted from the window."""
    empty_memory: EmptyMemory = "zeros"
    """Empty slots: zeros take part in attention (Algorithm 1); masked do not."""
    spanning_slots: SpanningSlots = "hidden"
    """Compressed slots that span a document's or an episode's start: hidden, or partial, made of what came after it."""
    norm: Norm = "post"
    """Layer norm: post, after each residual sum (Algorithm 1), or pre, before each branch."""
    adaptive_cutoffs: tuple[int, ...] = ()
    """Band edges of adaptive input and softmax over tokens sorted by frequency, below vocab_size; empty for a plain
    softmax."""
    adaptive_factor: int = 4
    """Factor by which each band of the adaptive embedding is narrower than the previous one."""
    first_band_projections: bool = False
    """Projections before and after the first band's table, one each; as in the published TransformerXL."""
    max_distance: int = 0
    """Larger distances between slots count as this one, as TransformerXL's clamp_len; 0: no limit."""
    head: Head = "softmax"
    """Output distribution: softmax, or a mixture of logistics over ordered codes, as in 16-bit audio."""
    mixtures: int = 10
    """Components of the mixture of logistics."""
    architecture: Literal["compressive"] = "compressive"
    """Kind of model, as written in configuration files."""

    def __post_init__(self) -> None:
        for name in ("memory_size", "compressed_size", "compression_rate", "adaptive_cutoffs"):
            if isinstance(value := getattr(self, name), list):  # TOML and JSON have no tuples
                object.__setattr__(self, name, tuple(value))
        _check(self)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Return a preset's model configuration with some values replaced; raise ValueError if it is not this kind."""
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
        """Tokens before the window that can influence a prediction: l × (n_m + c·n_cm) for equal layers."""
        layers = zip(self.memory_sizes, self.compression_rates, self.compressed_sizes, strict=True)
        return sum(recent + rate * compressed for recent, rate, compressed in layers)

    @property
    def memory_span(self) -> int:
        """How many tokens fill the memories of every layer."""
        layers = zip(self.memory_sizes, self.compression_rates, self.compressed_sizes, strict=True)
        return max(recent + rate * compressed for recent, rate, compressed in layers)

    def _per_layer(self, value: PerLayer) -> tuple[int, ...]:
        return (value,) * self.n_layers if isinstance(value, int) else value


@documented
@dataclass(frozen=True)
class WaveNetConfig:
    """WaveNet (van den Oord et al. 2016), the speech baseline: gated, dilated, causal convolutions."""

    vocab_size: int = 256
    """Vocabulary size; 256 for 8-bit mu-law codes."""
    n_layers: int = 30
    """Number of layers; the dilation doubles with each layer and returns to 1 after each cycle."""
    cycle: int = 10
    """Layers per cycle; 10 gives dilations from 1 to 512."""
    kernel: int = 3
    """Kernel size of each convolution, in samples."""
    residual: int = 416
    """Width of the residual stream, and of each half of a gate."""
    skip: int = 256
    """Width of the skip connections that are summed into the output."""
    dropout: float = 0.0
    """Dropout on the input of every convolution."""
    window: int = 3840
    """Samples per forward pass; the preceding receptive field is carried as memory."""
    head: Head = "softmax"
    """Output distribution: softmax, or a mixture of logistics over ordered codes, as in 16-bit audio."""
    mixtures: int = 10
    """Components of the mixture of logistics."""
    architecture: Literal["wavenet"] = "wavenet"
    """Kind of model, as written in configuration files."""

    def __post_init__(self) -> None:
        _check_values(self)
        _check_head(self)

    @property
    def dilations(self) -> tuple[int, ...]:
        """The dilation of each layer."""
        return tuple(2 ** (layer % self.cycle) for layer in range(self.n_layers))

    @property
    def memory_span(self) -> int:
        """How many samples fill the memory."""
        return self.receptive_field

    @property
    def receptive_field(self) -> int:
        """Samples, the newest included, that a prediction depends on."""
        return 1 + (self.kernel - 1) * sum(self.dilations)


AnyModelConfig = ModelConfig | WaveNetConfig


def transformer(config: AnyModelConfig) -> ModelConfig:
    """Return the configuration if it is a Compressive Transformer's; raise ValueError for a WaveNet."""
    if not isinstance(config, ModelConfig):
        raise ValueError(f"architecture={config.architecture!r}: expected a Compressive Transformer or TransformerXL")
    return config


def check_cutoffs(config: ModelConfig) -> None:
    """Raise ValueError if a cutoff is beyond the vocabulary.

    Not a check of the configuration itself: the vocabulary of a preset gives way to that of the corpus, and only then
    is it known which cutoffs fit.
    """
    size, cutoffs = config.vocab_size, config.adaptive_cutoffs
    require(
        all(cut < size for cut in cutoffs),
        "adaptive_cutoffs",
        cutoffs,
        f"numbers between 0 and vocab_size={size}; give smaller ones, or leave out those beyond the vocabulary",
    )


def _check(config: ModelConfig) -> None:
    """Raise ValueError for values that cannot work, naming the value, what was expected and the remedy."""
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
        "an even number, as position encodings have sine-cosine pairs",
    )
    require(
        config.d_model % config.n_heads == 0,
        "n_heads",
        config.n_heads,
        f"a divisor of d_model={config.d_model}; change n_heads or d_model",
    )
    cutoffs = config.adaptive_cutoffs
    require(
        isinstance(cutoffs, tuple)
        and all(is_int(cut) for cut in cutoffs)
        and list(cutoffs) == sorted(set(cutoffs))
        and all(cut > 0 for cut in cutoffs),
        "adaptive_cutoffs",
        cutoffs,
        "increasing whole numbers above 0",
    )
    require(
        config.adaptive_factor ** len(cutoffs) <= config.d_model,
        "adaptive_factor",
        config.adaptive_factor,
        f"a factor that leaves each of {len(cutoffs) + 1} bands a width of at least 1; lower it or use fewer cutoffs",
    )
    require(
        bool(cutoffs) or not config.first_band_projections,
        "first_band_projections",
        config.first_band_projections,
        "False without bands; or set adaptive_cutoffs",
    )

    require(
        (config.compression, config.compression_loss) != ("most_used", "autoencoding"),
        "compression_loss",
        config.compression_loss,
        "attention or none with compression='most_used', which keeps single memories: the decoder restores groups of "
        "compression_rate memories, one from each slot; change either",
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
            f"at least 1 in layer {layer}, which has compressed_size={compressed}; or set that to 0",
        )
        require(
            rate <= config.window,
            "compression_rate",
            rate,
            f"at most window={config.window} in layer {layer}: otherwise nothing is ever compressed; lower it",
        )
        if config.window % rate:
            dropped.append((layer, rate))
    if dropped:
        same = len(dropped) == config.n_layers and len({rate for _, rate in dropped}) == 1
        listed = [("every layer" if same else f"layer {layer}", rate) for layer, rate in dropped[: 1 if same else None]]
        lost = (f"{config.window % rate} in {where} (compression_rate={rate})" for where, rate in listed)
        warn_once(
            f"window={config.window} is not a multiple of compression_rate: the newest memories evicted by each "
            f"window are dropped uncompressed, {', '.join(lost)}"
        )


def _check_values(config: AnyModelConfig) -> None:
    """Check each field by its type: choices, floats from 0 to below 1, ints from 1 on."""
    check_choices(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is float:
            in_range = isinstance(value, int | float) and 0 <= value < 1
            require(in_range, field.name, value, "a number from 0 up to, but not including, 1")
        elif field.type is int:
            least = 0 if field.name == "max_distance" else 1
            require(is_int(value) and value >= least, field.name, value, f"a whole number of at least {least}")


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
