"""Algorithm 1, top to bottom: the trunk that text, speech and the agent all stand on."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config import Attention, ModelConfig
from compressive.kernels.linear import Linear, linear_relu
from compressive.model.attention import HAS_TRITON, Now, Positions, Projected, RelativeAttention, heads_of, sinusoids
from compressive.model.compression import COMPRESSORS
from compressive.model.decoding import DecodingState, LayerCache
from compressive.model.memory import (
    Evicted,
    LayerMemory,
    Memory,
    Segments,
    fifo,
    push_compressed,
    push_recent,
)
from compressive.model.reconstruction import Decoder, attention_reconstruction


@dataclass(frozen=True)
class TrunkOutput:
    """What one window gives."""

    hidden: Tensor  # (B, T, D)
    memory: Memory
    compression_loss: Tensor  # (), the sum over layers
    compression_losses: Tensor  # (n_layers,)


class Pushed(NamedTuple):
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
        self.pre_norm = config.norm == "pre"
        self.attention = RelativeAttention(config)
        self.attention_norm = nn.LayerNorm(D)
        self.mlp = nn.Sequential(Linear(D, config.d_ff), nn.ReLU(), nn.Dropout(config.dropout), Linear(config.d_ff, D))
        self.mlp_norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        self.finish_step = finish_step  # `generation/stepper.py: for_steps` knows a faster way
        self.loss = config.compression_loss
        self.compression = COMPRESSORS[config.compression](config, rate) if self.n_compressed else None
        if self.compression is not None and self.loss == "autoencoding":
            self.compression_decoder = Decoder(config, rate)

    def forward(
        self, h: Tensor, memory: LayerMemory, code: Tensor, segments: Segments | None
    ) -> tuple[Tensor, LayerMemory, Tensor]:
        """Lines 5 to 12; returns the next layer's input, this layer's next memory and its compression loss."""
        slots = self.normed(memory.slots(h))  # line 5
        # With post-norm all that a gradient could do in memory is vanish; only BPTT keeps a graph there.
        attached = memory.compressed.requires_grad or memory.recent.requires_grad
        frozen = 0 if self.pre_norm or attached else self.n_memory
        projected = self.attention.project(slots[:, -h.shape[1] :], slots, frozen)
        attention, usage = self.attention(  # line 6
            projected,
            code,
            memory.valid(),
            None if segments is None else segments.ids,
            self.n_compressed,
            with_usage=memory.usage is not None,
        )
        received = None if usage is None else usage[:, self.n_compressed : self.n_memory]
        pushed = self.push(memory, h, segments, received)  # lines 8 to 11
        return self.mix(h, attention), pushed.memory, self.compression_loss(pushed, projected, segments)

    def mix(self, h: Tensor, attention: Tensor) -> Tensor:
        """Lines 7 and 12: skip connections, layer norms and the MLP."""
        if self.training:
            attention = self.dropout(attention)
        if self.pre_norm:
            a = h + attention
            return a + self._mlp(self.mlp_norm(a))
        a = self._norm_of_sum(self.attention_norm, h, attention)
        return self._norm_of_sum(self.mlp_norm, a, self._mlp(a))

    @staticmethod
    def _norm_of_sum(norm: nn.LayerNorm, x: Tensor, y: Tensor) -> Tensor:
        """The norm of x + y, in the type of products like y; the sum is not rounded.

        Products that come next, and memory, would round it anyway; the next sum is the only one to see the difference.
        """
        if HAS_TRITON and y.is_cuda:
            from compressive.kernels import add_norm as fused_norm

            if fused_norm.fits(norm, y):
                return fused_norm.norm_of_sum(norm, x, y)
        weight = norm.weight
        normed = torch.layer_norm(x.to(weight.dtype) + y, norm.normalized_shape, weight, norm.bias, norm.eps)
        return normed.to(y.dtype)

    def _mlp(self, x: Tensor) -> Tensor:
        """The MLP and the dropout after it, with its ReLU in the first product's kernel."""
        widen, _, dropout, narrow = self.mlp
        assert isinstance(widen, nn.Linear)
        hidden = linear_relu(x, widen)
        output: Tensor = self.dropout(narrow(dropout(hidden))) if self.training else narrow(hidden)
        return output

    def push(self, memory: LayerMemory, window: Tensor, segments: Segments | None, received: Tensor | None) -> Pushed:
        """Lines 8 to 11: the window enters recent memory, what leaves it is compressed."""
        memory, old = push_recent(memory, window, segments, received)
        if self.compression is None:
            return Pushed(memory, old, old.slots[:, :0], old.valid[:, :0])
        new, new_valid = self.compression(old)  # line 9
        # Only without a loss of its own is compression trained through the windows that follow (BPTT).
        stored = new if self.loss == "none" else new.detach()
        return Pushed(push_compressed(memory, stored, new_valid), old, new, new_valid)

    def compression_loss(self, pushed: Pushed, projected: Projected, segments: Segments | None) -> Tensor:
        """Algorithm 2, or auto-encoding: how much of the evicted memories survives compression."""
        _, old, new, new_valid = pushed
        if self.loss == "none" or new.shape[1] == 0:
            return new.new_zeros(())
        counts = new_valid.new_ones(new.shape[0]) if segments is None else segments.unbroken
        if self.loss == "autoencoding":
            loss: Tensor = self.compression_decoder(old, new, new_valid, counts)
            return loss
        # The evicted slots were projected for attention already: they follow the compressed ones (lines 3-6).
        evicted = slice(self.n_compressed, self.n_compressed + old.slots.shape[1])
        query, key_value = projected.query.detach(), projected.key_value.detach()
        compare = attention_reconstruction
        if self.attention.chosen(query.device, query.dtype) == "fused":
            from compressive.kernels.reconstruction import fused_reconstruction as compare
        projected_new = self.attention.project_frozen(self.normed_frozen(new))
        return compare(query, key_value[:, evicted], projected_new, old.valid, new_valid, counts)

    def normed(self, slots: Tensor) -> Tensor:
        """Slots as attention sees them: pre-norm has its norm here, post-norm nothing."""
        return self.attention_norm(slots) if self.pre_norm else slots

    def normed_frozen(self, slots: Tensor) -> Tensor:
        """The same with no gradient to the norm: Algorithm 2, line 5."""
        norm = self.attention_norm
        if not self.pre_norm:
            return slots
        return F.layer_norm(slots, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps)

    def start_cache(self, memory: LayerMemory, code: Tensor, window: int) -> LayerCache:
        """Project what is in memory, once, and leave room for a window."""
        slots = torch.cat([memory.compressed, memory.recent], dim=1)
        key, value = heads_of(self.attention.project_frozen(self.normed_frozen(slots)))
        near, far = (r.contiguous() for r in self.attention.positions(code))
        return LayerCache(
            key=F.pad(key, (0, 0, 0, window)),
            value=F.pad(value, (0, 0, 0, window)),
            received=None if memory.usage is None else torch.zeros_like(memory.usage),
            near=near,
            far=far if self.attention.separate else None,
        )

    def step(self, h: Tensor, cache: LayerCache, now: Now) -> tuple[Tensor, LayerCache]:
        """Lines 5 to 7 and 12 for one position per lane, h (B, D), whose key and value are written into the cache."""
        new = self.attention.project_one(self.normed(h))
        positions = Positions(cache.near, cache.near if cache.far is None else cache.far)
        attended, weights = self.attention.attend_one(
            new, cache.key, cache.value, self.attention.biases(), positions, now, self.n_compressed, self.n_memory
        )
        if cache.received is not None:
            assert weights is not None
            recent = weights.mean(dim=1)[:, self.n_compressed : self.n_memory]
            cache = dataclasses.replace(cache, received=cache.received + recent)
        return self.finish_step(self, h, attended.flatten(1)), cache

    def end_window(
        self, memory: LayerMemory, cache: LayerCache, window: Tensor, segments: Segments
    ) -> tuple[LayerMemory, LayerCache]:
        """Lines 8 to 11 for a window (B, T, D) read step by step; only new compressed slots are projected."""
        C, M, T = self.n_compressed, self.n_recent, window.shape[1]
        received = None if cache.received is None else cache.received / T
        pushed = self.push(memory, window, segments, received)
        new = self.normed_frozen(pushed.new.to(memory.compressed.dtype))
        key, value = heads_of(self.attention.project_frozen(new))

        def shift(slots: Tensor, new: Tensor) -> Tensor:
            compressed, recent, window = slots.split_with_sizes([C, M, T], dim=2)
            kept = [fifo(compressed, new.to(slots.dtype), dim=2)[1], fifo(recent, window, dim=2)[1]]
            return torch.cat([*kept, torch.zeros_like(window)], dim=2)  # the old ones stay for states that hold them

        cache = dataclasses.replace(
            cache,
            key=shift(cache.key, key),
            value=shift(cache.value, value),
            received=None if cache.received is None else torch.zeros_like(cache.received),
        )
        return pushed.memory, cache


def finish_step(layer: Layer, h: Tensor, attended: Tensor) -> Tensor:
    """Lines 7 and 12 for one position per lane, from what its heads attended to, (B, D)."""
    return layer.mix(h, layer.attention.output(attended))


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
        """Draw the matrices with variance 2 / (sqrt(n_layers)·fan_in), as the authors' released code does.

        At 24 layers of width 1024 that is TransformerXL's 0.02. Matrices of compressors, whose number does not grow
        with depth, keep the scale of their input instead.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                gain = 1.0 if "compress" in name else 2 / math.sqrt(self.config.n_layers)
                nn.init.normal_(module.weight, std=math.sqrt(gain / module.in_features))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def use_attention(self, backend: Attention) -> None:
        """Choose what computes attention in every layer."""
        for layer in self.layers:
            layer.attention.use(backend)

    def attention_backend(self, device: torch.device, dtype: torch.dtype) -> str:
        """What computes attention in that type on that device."""
        return self.layers[0].attention.chosen(device, dtype)

    def initial_memory(self, batch_size: int) -> Memory:
        """Lines 1 and 2: empty memories, on the model's device and in its type."""
        weight = next(self.parameters())
        return Memory.empty(self.config, batch_size, weight.device, weight.dtype)

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Return what trains compression and nothing else: f_c and the auto-encoder's g."""
        return [parameter for name, parameter in self.named_parameters() if "compress" in name]

    def forward(self, x: Tensor, memory: Memory, starts: Tensor | None = None) -> TrunkOutput:
        """Read a window x (B, T, D), T at most `window`; `starts` (B, T) marks where new documents begin."""
        self._check(x, memory, starts)
        T = x.shape[1]
        segments = None if starts is None else Segments.of(starts)
        most_slots = max(layer.n_memory for layer in self.layers) + T
        code = self._code(torch.arange(most_slots - 1, -T - 1, -1, device=x.device), x.dtype)
        h = self.dropout(x)
        memories, losses = [], []
        for layer, layer_memory in zip(self.layers, memory.layers, strict=True):  # line 4
            distances = code[most_slots - (layer.n_memory + T) :]
            h, layer_memory, loss = layer(h, layer_memory, distances, segments)
            memories.append(layer_memory)
            losses.append(loss)
        per_layer = torch.stack(losses)
        hidden = self.dropout(self.final_norm(h))
        return TrunkOutput(hidden, Memory(tuple(memories), memory.zeros_visible), per_layer.sum(), per_layer)

    @torch.no_grad()
    def decoding_state(self, memory: Memory) -> DecodingState:
        """Return the state to `step` from, at the beginning of a window: all of memory projected, once."""
        weight, window = next(self.parameters()), self.config.window
        memory = memory.detach()
        memory.check(self.config, memory.batch_size, weight)
        layers = []
        for layer, layer_memory in zip(self.layers, memory.layers, strict=True):
            distances = torch.arange(layer.n_memory + window, device=weight.device)
            layers.append(layer.start_cache(layer_memory, self._code(distances, weight.dtype), window))
        position = torch.zeros(memory.batch_size, dtype=torch.long, device=weight.device)
        return DecodingState(
            memory=memory,
            layers=tuple(layers),
            window=memory.recent[0].new_zeros(memory.batch_size, len(layers), window, self.config.d_model),
            order=self._order(memory),
            position=position,
            start=position - 1,
            room=window,
            together=True,
        ).owning()

    @torch.no_grad()
    def step(self, x: Tensor, state: DecodingState, starts: Tensor | None = None) -> tuple[Tensor, DecodingState]:
        """Read one position per lane, x (B, D), as the windowed pass does in evaluation mode.

        `starts` (B,) marks new documents. Time per position is constant; the step that completes a window also pays
        for its compression.
        """
        _check_step(x, state, starts, self.config.d_model)
        state = state.take()
        position, order = state.position, state.order
        start = state.start if starts is None else torch.where(starts, position, state.start)
        # What holds for all layers is found once, for the one with most slots.
        most = order.shape[2]
        back = torch.arange(most - self.config.window, -self.config.window, -1, device=order.device)
        distance = (position[:, None] + back).clamp_(min=0).expand(self.config.n_heads, -1, -1)
        hidden = (order < start[:, None, None]) | (order > position[:, None, None])
        h, inputs, caches = self.dropout(x) if self.training else x, [], []
        for layer, cache, unseen in zip(self.layers, state.layers, hidden.unbind(dim=1), strict=True):
            inputs.append(h)
            fewer = most - cache.key.shape[2]  # slots are aligned at their right end, where the window is
            now = Now(position, distance[..., fewer:], unseen[:, fewer:]) if fewer else Now(position, distance, unseen)
            h, cache = layer.step(h, cache, now)
            caches.append(cache)
        read = torch.stack(inputs, dim=1)[:, :, None].to(state.window.dtype)
        state.window.scatter_(2, position[:, None, None, None].expand_as(read), read)
        state = dataclasses.replace(
            state, layers=tuple(caches), position=position + 1, start=start, room=state.room - 1
        )
        if state.room == 0:
            state = self._end_windows(state)
        h = self.final_norm(h)
        return self.dropout(h) if self.training else h, state.owning()

    def _end_windows(self, state: DecodingState) -> DecodingState:
        """Push the windows of those lanes that have filled theirs."""
        if state.together:
            return dataclasses.replace(self._end_window(state), room=self.config.window)
        full = (state.position == self.config.window).nonzero().squeeze(1)
        if len(full) == len(state.position):
            state = self._end_window(state)
        elif len(full) > 0:
            state = state.put(full, self._end_window(state.select(full)))
        return dataclasses.replace(state, room=self.config.window - int(state.position.max()))

    def _end_window(self, state: DecodingState) -> DecodingState:
        """Push the window of every lane, all being full."""
        offsets = torch.arange(self.config.window, device=state.start.device)
        segments = Segments.of(offsets == state.start[:, None])
        memories, caches = [], []
        for i, (layer, memory, cache) in enumerate(zip(self.layers, state.memory.layers, state.layers, strict=True)):
            memory, cache = layer.end_window(memory, cache, state.window[:, i], segments)
            memories.append(memory)
            caches.append(cache)
        pushed = dataclasses.replace(state.memory, layers=tuple(memories))
        return dataclasses.replace(
            state,
            memory=pushed,
            layers=tuple(caches),
            window=torch.zeros_like(state.window),  # the old one stays as it is for states that still hold it
            order=self._order(pushed),
            position=torch.zeros_like(state.position),
            start=torch.full_like(state.start, -1),
        )

    def _order(self, memory: Memory) -> Tensor:
        """Give `DecodingState.order` as a window begins; slots that other layers have and a layer has not: never."""
        window, most = self.config.window, max(layer.n_memory for layer in self.layers)
        valid = torch.stack(
            [F.pad(layer.valid(), (most - layer.valid().shape[1], 0)) for layer in memory.layers], dim=1
        )
        offsets = torch.arange(window, device=valid.device).expand(*valid.shape[:2], -1)
        return torch.cat([torch.where(valid, -1, window), offsets], dim=2)

    def _code(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """Sinusoid code of the distances, with TransformerXL's dropout on it."""
        code: Tensor = self.dropout(sinusoids(distances, self.config.d_model, dtype))
        return code

    def _check(self, x: Tensor, memory: Memory, starts: Tensor | None) -> None:
        """Refuse input of the wrong shape before anything is done with it."""
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


def _check_step(x: Tensor, state: DecodingState, starts: Tensor | None, d_model: int) -> None:
    lanes = len(state.position)
    if x.shape != (lanes, d_model):
        raise ValueError(f"input of shape {tuple(x.shape)}: expected ({lanes} lanes of the state, d_model={d_model})")
    if starts is not None and (starts.dtype != torch.bool or starts.shape != (lanes,)):
        raise ValueError(
            f"starts of type {starts.dtype} and shape {tuple(starts.shape)}: expected a bool mask of shape ({lanes},)"
        )
