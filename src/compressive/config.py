"""What a model is made of: one dataclass, checked in one place, with presets as TOML files.

Nothing here imports torch, so that a command line can show its help at once.
"""

import dataclasses
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

    def __post_init__(self) -> None:
        for name in ("memory_size", "compressed_size", "compression_rate", "adaptive_cutoffs"):
            if isinstance(value := getattr(self, name), list):  # TOML and JSON have no tuples
                object.__setattr__(self, name, tuple(value))
        _check(self)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Return the model of a preset, some of its values replaced."""
        return cls(**(load_preset(name)["model"] | overrides))

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


def preset_names() -> list[str]:
    """Return the names of all presets."""
    folder = resources.files("compressive") / "presets"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


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
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if (choices := get_args(field.type)) and all(isinstance(choice, str) for choice in choices):
            _require(value in choices, field.name, value, f"one of {', '.join(choices)}")
        elif field.type is float:
            in_range = isinstance(value, int | float) and 0 <= value < 1
            _require(in_range, field.name, value, "a number from 0 up to, but not including, 1")
        elif field.type is int:
            _require(_is_int(value) and value >= 1, field.name, value, "a whole number of at least 1")

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
        all(_is_int(cut) for cut in cutoffs)
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
        warnings.warn(
            f"window={config.window} is not a multiple of compression_rate: of each window's evicted memories "
            f"the newest are dropped uncompressed, {', '.join(dropped)}",
            stacklevel=4,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")
