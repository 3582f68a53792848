"""Algorithm 1, top to bottom: the trunk that text, speech and the agent all stand on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config import ModelConfig
from compressive.config.checks import warn_once
from compressive.config.documented import documented
from compressive.kernels.dispatch import operation
from compressive.model import decoding
from compressive.model.attention import Codes, Projected, RelativeAttention, sinusoids
from compressive.model.compression import COMPRESSORS
from compressive.model.decoding import DecodingState, LayerCache, Now
from compressive.model.linear import Linear, linear
from compressive.model.memory import (
    Evicted,
    LayerMemory,
    Memory,
    Segments,
    after_attention,
    entering,
    evict,
    push_compressed,
    push_recent,
)
from compressive.model.reconstruction import Decoder, attention_loss


@documented
@dataclass(frozen=True)
class TrunkOutput:
    """What one window gives."""

    hidden: Tensor
    """Activations after the last layer, (B, T, D)."""
    memory: Memory
    """Memory to pass on with the next window."""
    compression_loss: Tensor
    """Sum over layers, ()."""
    compression_losses: Tensor
    """The same by layer, (n_layers,)."""


class Remembered(NamedTuple):
    """A layer's memory after a window, what left recent memory, and what compression made of it."""

    memory: LayerMemory
    old: Evicted
    new: Tensor  # (B, n, D)
    new_valid: Tensor  # (B, n)


class Layer(nn.Module):
    """One layer: attention over both memories, an MLP, and its own compression."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        D, rate = config.d_model, config.compression_rates[index]
        self.n_compressed = config.compressed_sizes[index]
        self.n_recent = config.memory_sizes[index]
        self.n_memory = self.n_compressed + self.n_recent
        # Slots that distances to compressed ones do not count.
        self.n_skipped = self.n_recent if config.compressed_positions == "from_window" else 0
        self.pre_norm = config.norm == "pre"
        self.attention = RelativeAttention(config)
        self.attention_norm = nn.LayerNorm(D)
        self.mlp = nn.Sequential(Linear(D, config.d_ff), nn.ReLU(), nn.Dropout(config.dropout), Linear(config.d_ff, D))
        self.mlp_norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        self.loss = config.compression_loss
        self.compression = COMPRESSORS[config.compression](config, rate) if self.n_compressed else None
        if self.compression is not None and self.loss == "autoencoding":
            self.compression_decoder = Decoder(config, rate)

    def forward(
        self, h: Tensor, memory: LayerMemory, codes: Codes, segments: Segments | None
    ) -> tuple[Tensor, LayerMemory, Tensor]:
        """Lines 5 to 12; returns the next layer's input, this layer's next memory and its compression loss."""
        slots = self.normed(memory.slots(h))  # line 5
        projected = self.attention.project(slots[:, -h.shape[1] :], slots, self._n_frozen(memory))
        attended, usage = self.attention(  # line 6
            projected,
            codes,
            memory.valid(),
            None if segments is None else segments.ids,
            self.n_compressed,
            with_usage=memory.usage is not None,
        )
        a = self.add_attention(h, attended)  # line 7
        received = None if usage is None else usage[:, self.n_compressed : self.n_memory]
        remembered = self.remember(memory, h, segments, received)  # lines 8 to 11
        h = self.mlp_block(a)  # line 12
        return h, remembered.memory, self.compression_loss(remembered, projected, segments)

    def add_attention(self, h: Tensor, attended: Tensor) -> Tensor:
        """Line 7: the skip connection around attention, and its norm."""
        if self.training:
            attended = self.dropout(attended)
        return h + attended if self.pre_norm else _add_norm(self.attention_norm, h, attended)

    def remember(
        self, memory: LayerMemory, h: Tensor, segments: Segments | None, received: Tensor | None
    ) -> Remembered:
        """Lines 8 to 11: the window enters recent memory, what leaves it is compressed.

        `received` (B, M) is the mean attention on recent slots, None where compression does not ask for usage.
        """
        memory = after_attention(memory, segments, received)
        window = entering(memory, h, segments)
        old = evict(memory, window)  # line 8
        if self.compression is None:
            return Remembered(push_recent(memory, window), old, old.slots[:, :0], old.valid[:, :0])
        new, new_valid = self.compression(old)  # line 9
        memory = push_recent(memory, window)  # line 10
        # Only without a loss of its own is compression trained through the windows that follow (BPTT).
        memory = push_compressed(memory, new if self.loss == "none" else new.detach(), new_valid)  # line 11
        return Remembered(memory, old, new, new_valid)

    def mlp_block(self, a: Tensor) -> Tensor:
        """Line 12: the MLP, the skip connection around it, and its norm."""
        widen, _, dropout, narrow = self.mlp
        assert isinstance(widen, nn.Linear)
        hidden = linear(self.mlp_norm(a) if self.pre_norm else a, widen.weight, widen.bias, relu=True)
        out: Tensor = self.dropout(narrow(dropout(hidden))) if self.training else narrow(hidden)
        return a + out if self.pre_norm else _add_norm(self.mlp_norm, a, out)

    def compression_loss(self, remembered: Remembered, projected: Projected, segments: Segments | None) -> Tensor:
        """Algorithm 2, or auto-encoding: how much of the evicted memories survives compression."""
        _, old, new, new_valid = remembered
        if self.loss == "none" or new.shape[1] == 0:
            return new.new_zeros(())
        counts = new_valid.new_ones(new.shape[0]) if segments is None else segments.unbroken
        if self.loss == "autoencoding":
            loss: Tensor = self.compression_decoder(old, new, new_valid, counts)
            return loss
        # The evicted slots were projected for attention already: they follow the compressed ones (lines 3-6).
        evicted = slice(self.n_compressed, self.n_compressed + old.slots.shape[1])
        query, old_projected = projected.query.detach(), projected.key_value.detach()[:, evicted]
        new_projected = self.attention.project_frozen(self.normed_frozen(new))
        return attention_loss(query, old_projected, new_projected, old.valid, new_valid, counts)

    def normed(self, slots: Tensor) -> Tensor:
        """Slots as attention sees them: pre-norm has its norm here, post-norm nothing."""
        return self.attention_norm(slots) if self.pre_norm else slots

    def normed_frozen(self, slots: Tensor) -> Tensor:
        """The same with no gradient to the norm: Algorithm 2, line 5."""
        norm = self.attention_norm
        if not self.pre_norm:
            return slots
        return F.layer_norm(slots, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps)

    def _n_frozen(self, memory: LayerMemory) -> int:
        """Slots that need no input gradient: Memory is detached, except under BPTT; pre-norm has a weight there."""
        attached = memory.compressed.requires_grad or memory.recent.requires_grad
        return 0 if self.pre_norm or attached else self.n_memory

    def start_cache(self, memory: LayerMemory, codes: Codes, window: int) -> LayerCache:
        """Begin to decode, see `decoding.start_cache`."""
        return decoding.start_cache(self, memory, codes, window)

    def step(self, h: Tensor, cache: LayerCache, now: Now) -> tuple[Tensor, LayerCache]:
        """Decode one position, see `decoding.step_layer`."""
        return decoding.step_layer(self, h, cache, now)

    def end_window(
        self, memory: LayerMemory, cache: LayerCache, window: Tensor, segments: Segments
    ) -> tuple[LayerMemory, LayerCache]:
        """End a decoded window, see `decoding.end_window`."""
        return decoding.end_window(self, memory, cache, window, segments)


@operation("add_norm")
def add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x + y, (..., D) each, in the type of y; the sum itself is not rounded.

    The products that come next, and memory, would round the norm anyway: only the next sum sees a difference.
    """
    return torch.layer_norm(x.to(weight.dtype) + y, weight.shape, weight, bias, eps).to(y.dtype)


def _add_norm(norm: nn.LayerNorm, x: Tensor, y: Tensor) -> Tensor:
    return add_norm(x, y, norm.weight, norm.bias, norm.eps)


class CompressiveTransformer(nn.Module):
    """The Compressive Transformer from (B, T, D) to (B, T, D), with memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(config.dropout)
        self.layers: Sequence[Layer] = nn.ModuleList(  # type: ignore[assignment]
            Layer(config, index) for index in range(config.n_layers)
        )
        self.final_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self._initialise()

    def _initialise(self) -> None:
        """Initialise matrices with variance 2 / (sqrt(n_layers)·fan_in), as the authors' released code does.

        At 24 layers of width 1024 that is TransformerXL's 0.02. Matrices of compressors, whose number does not grow
        with depth, keep the scale of their input instead.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                gain = 1.0 if "compress" in name else 2 / math.sqrt(self.config.n_layers)
                nn.init.normal_(module.weight, std=math.sqrt(gain / module.in_features))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def initial_memory(self, batch_size: int) -> Memory:
        """Return empty memories (lines 1 and 2), on the model's device and in its type."""
        weight = next(self.parameters())
        return Memory.empty(self.config, batch_size, weight.device, weight.dtype)

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Return what trains compression and nothing else: f_c and the auto-encoder's g."""
        return [parameter for name, parameter in self.named_parameters() if "compress" in name]

    def forward(self, x: Tensor, memory: Memory, starts: Tensor | None = None) -> TrunkOutput:
        """Read a window x (B, T, D), T at most `window`; `starts` (B, T) marks where new documents begin.

        A window shorter than a layer's compression rate c is too short to be compressed there: floor(T / c) is 0, and
        what it pushes out of recent memory is lost. One such window may be the rest of a text; a second one after it
        warns, once, unless the whole model is compiled. To read token by token, use `decoding_state` and `step`.

        Raises ValueError for other shapes, and for a memory of another model, batch, device or type.
        """
        self._check(x, memory, starts)
        T = x.shape[1]
        segments = None if starts is None else Segments.of(starts)
        most_slots = max(layer.n_memory for layer in self.layers) + T
        last = -T - max(layer.n_skipped for layer in self.layers)
        code = self.position_code(torch.arange(most_slots - 1, last - 1, -1, device=x.device), x.dtype)
        h = self.dropout(x)
        memories, losses = [], []
        for layer, layer_memory in zip(self.layers, memory.layers, strict=True):  # line 4
            first, count = most_slots - (layer.n_memory + T), layer.n_memory + 2 * T
            codes = Codes(code[first:][:count], code[first + layer.n_skipped :][:count])
            h, layer_memory, loss = layer(h, layer_memory, codes, segments)
            memories.append(layer_memory)
            losses.append(loss)
        per_layer = torch.stack(losses)
        hidden = self.dropout(self.final_norm(h))
        following = Memory(tuple(memories), memory.zeros_visible)
        if not torch.compiler.is_compiling():
            self._watch_length(T, memory, following)
        return TrunkOutput(hidden, following, per_layer.sum(), per_layer)

    @torch.no_grad()
    def decoding_state(self, memory: Memory) -> DecodingState:
        """Return the state to `step` from, at the beginning of a window, see `decoding.begin`."""
        return decoding.begin(self, memory)

    @torch.no_grad()
    def step(self, x: Tensor, state: DecodingState, starts: Tensor | None = None) -> tuple[Tensor, DecodingState]:
        """Read one position per batch row, x (B, D), as `forward` does in evaluation mode, see `decoding.step`."""
        return decoding.step(self, self.layers, x, state, starts)

    def position_code(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """Sinusoid code of the distances, with TransformerXL's dropout on it."""
        if self.config.max_distance:
            distances = distances.clamp(max=self.config.max_distance)
        code: Tensor = self.dropout(sinusoids(distances, self.config.d_model, dtype))
        return code

    def _watch_length(self, time: int, memory: Memory, following: Memory) -> None:
        """Mark the memory that follows a window too short to be compressed; warn where the one before was so too."""
        rates = [rate for layer, rate in zip(self.layers, self.config.compression_rates, strict=True)
                 if layer.n_compressed and rate > time]  # fmt: skip
        if not rates:
            return
        if memory.too_short:
            warn_once(
                f"windows shorter than compression_rate={max(rates)} follow each other: what they push out of recent "
                f"memory is lost uncompressed in {len(rates)} of {len(self.layers)} layers; to read token by token, "
                "use decoding_state(memory) and step, which gather whole windows; or read longer windows"
            )
        object.__setattr__(following, "too_short", True)

    def _check(self, x: Tensor, memory: Memory, starts: Tensor | None) -> None:
        """Refuse input of the wrong shape before anything is done with it."""
        if not isinstance(memory, Memory):
            raise TypeError(
                f"memory of type {type(memory).__name__}: expected a Memory; begin with initial_memory(batch_size), "
                "then pass on what the last window gave"
            )
        D, window = self.config.d_model, self.config.window
        if x.ndim != 3 or x.shape[2] != D:
            raise ValueError(f"input of shape {tuple(x.shape)}: expected (batch, time, d_model={D})")
        if not 1 <= x.shape[1] <= window:
            raise ValueError(
                f"time={x.shape[1]}: expected 1 to window={window}; cut the text into windows and carry the memory"
            )
        if starts is not None and (starts.dtype != torch.bool or starts.shape != x.shape[:2]):
            raise ValueError(
                f"starts of type {starts.dtype} and shape {tuple(starts.shape)}: expected a bool mask of the "
                f"input's (batch, time) = {tuple(x.shape[:2])}"
            )
        memory.check(self.config, x.shape[0], next(self.parameters()))
