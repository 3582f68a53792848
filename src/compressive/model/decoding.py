"""Algorithm 1 one position at a time: keys and values of all slots are cached, memory is updated at a window's end.

`DecodingState` is what is carried from one position to the next, of constant size however long the text. The functions
below do for a trunk and its layers what their `forward` does for a window, to rounding.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from compressive.config.documented import documented
from compressive.model.attention import Codes, Positions, heads_of, upcast
from compressive.model.memory import LayerMemory, Memory, Segments, fifo_in
from compressive.model.records import SHARED, TensorRecord, saved_as

if TYPE_CHECKING:
    from compressive.model.transformer import CompressiveTransformer, Layer


@documented
@dataclass(frozen=True)
class LayerCache(TensorRecord):
    """One layer's projections of all N = C + M + window slots."""

    key: Tensor  # (B, H, N, K)
    value: Tensor  # (B, H, N, K)
    received: Tensor | None  # (B, M): attention on recent slots, summed over this window; for most-used compression
    near: Tensor = field(metadata=SHARED)  # (H, N, K): r for the distances 0 to N-1
    far: Tensor | None = field(metadata=SHARED)  # the same for compressed slots, where it differs


@dataclass(frozen=True)
class OwnedRecord(TensorRecord):
    """A state whose buffers are written in place, and which stays valid after a step from it.

    The next state takes its buffers over. Whoever steps from it again, or from a state that was moved, forked or
    loaded, first gets a copy.
    """

    owns_buffers: bool = field(default=False, init=False)  # nobody else holds keys, values and windows

    def owning(self) -> Self:
        """Declare that nobody else holds this state's buffers, so that the next step may write into them."""
        object.__setattr__(self, "owns_buffers", True)
        return self

    def claim(self) -> Self:
        """Hand over buffers to write into: these, once, if they are this state's alone, else a copy."""
        if not self.owns_buffers:
            return self.clone()
        object.__setattr__(self, "owns_buffers", False)
        return self


@documented
@dataclass(frozen=True)
class DecodingState(OwnedRecord):
    """Everything needed to go on decoding; batch rows may be at different positions of their windows.

    `select` forks rows (read a book once, continue it many times), `join` batches states of different texts.
    """

    memory: Memory  # as it was when each row's window began
    layers: tuple[LayerCache, ...]  # keys and values, one cache per layer
    window: Tensor  # (B, n_layers, window, D): each layer's inputs so far, which will enter memory
    order: Tensor  # (B, n_layers, N): where in this window a slot is read, -1 if before it, `window`: never to be seen
    position: Tensor  # (B,): tokens of the current window read so far
    start: Tensor  # (B,): where in this window the current document began, -1 if before it
    remaining: int = field(metadata=saved_as("room"))  # steps until the first window is full; avoids a device sync
    together: bool  # all rows have as many steps left, so all windows end together; avoids another sync

    def _combine(self, others: Sequence[Self], function: Callable[..., Tensor], shared: bool = False) -> Self:
        states = (self, *others)
        remaining = [state.remaining for state in states]
        together = all(state.together for state in states) and min(remaining) == max(remaining)
        first, *rest = (replace(state, remaining=min(remaining), together=together) for state in states)
        return super(DecodingState, first)._combine(rest, function, shared)


class Now(NamedTuple):
    """Where a step stands."""

    position: Tensor  # (B,): in the window
    distance: Tensor  # (H, B, N), the same for all heads: how far back each slot lies, 0 for those to come
    hidden: Tensor  # (B, N), bool: slots that may not be seen


class StepLayer(Protocol):
    """What one position per batch row passes through: a layer, or a faster form of one."""

    def step(self, h: Tensor, cache: LayerCache, now: Now) -> tuple[Tensor, LayerCache]:
        """Read h (B, D); return the next layer's input and the cache."""


# The trunk.


def begin(trunk: "CompressiveTransformer", memory: Memory) -> DecodingState:
    """Return the state at the beginning of a window: all of memory projected, once."""
    weight, window = next(trunk.parameters()), trunk.config.window
    memory = memory.detach()
    memory.check(trunk.config, memory.batch_size, weight)
    layers = []
    for layer, layer_memory in zip(trunk.layers, memory.layers, strict=True):
        distances = torch.arange(layer.n_memory + window, device=weight.device)
        near = trunk.position_code(distances, weight.dtype)
        far = trunk.position_code(distances - layer.n_skipped, weight.dtype) if layer.n_skipped else near
        layers.append(layer.start_cache(layer_memory, Codes(near, far), window))
    position = torch.zeros(memory.batch_size, dtype=torch.long, device=weight.device)
    return DecodingState(
        memory=memory,
        layers=tuple(layers),
        window=memory.recent[0].new_zeros(memory.batch_size, len(layers), window, trunk.config.d_model),
        order=_order(trunk, memory),
        position=position,
        start=position - 1,
        remaining=window,
        together=True,
    ).owning()


def step(
    trunk: "CompressiveTransformer",
    layers: Sequence[StepLayer],
    x: Tensor,
    state: DecodingState,
    starts: Tensor | None = None,
) -> tuple[Tensor, DecodingState]:
    """Read one position per batch row, x (B, D), through the trunk's layers or faster forms of them.

    `starts` (B,) marks new documents. Time per position is constant; the step that completes a window also pays for its
    compression. Raises ValueError for other shapes.
    """
    _check(trunk, x, state, starts)
    state = state.claim()
    position, order, window = state.position, state.order, trunk.config.window
    start = state.start if starts is None else torch.where(starts, position, state.start)
    # What holds for all layers is computed once, for the one with most slots.
    most = order.shape[2]
    back = torch.arange(most - window, -window, -1, device=order.device)
    distance = (position[:, None] + back).clamp_(min=0).expand(trunk.config.n_heads, -1, -1)
    hidden = (order < start[:, None, None]) | (order > position[:, None, None])
    h, inputs, caches = trunk.dropout(x) if trunk.training else x, [], []
    for layer, cache, unseen in zip(layers, state.layers, hidden.unbind(dim=1), strict=True):
        inputs.append(h)
        fewer = most - cache.key.shape[2]  # slots are aligned at their right end, where the window is
        now = Now(position, distance[..., fewer:], unseen[:, fewer:]) if fewer else Now(position, distance, unseen)
        h, cache = layer.step(h, cache, now)
        caches.append(cache)
    read = torch.stack(inputs, dim=1)[:, :, None].to(state.window.dtype)
    state.window.scatter_(2, position[:, None, None, None].expand_as(read), read)
    state = replace(state, layers=tuple(caches), position=position + 1, start=start, remaining=state.remaining - 1)
    if state.remaining == 0:
        state = _end_windows(trunk, state)
    h = trunk.final_norm(h)
    return trunk.dropout(h) if trunk.training else h, state.owning()


def _end_windows(trunk: "CompressiveTransformer", state: DecodingState) -> DecodingState:
    """Push the windows of those rows that have filled theirs."""
    window = trunk.config.window
    if state.together:
        return replace(_end_window(trunk, state), remaining=window)
    full = (state.position == window).nonzero().squeeze(1)
    if len(full) == len(state.position):
        state = _end_window(trunk, state)
    elif len(full) > 0:
        state = state.put(full, _end_window(trunk, state.select(full)))
    return replace(state, remaining=window - int(state.position.max()))


def _end_window(trunk: "CompressiveTransformer", state: DecodingState) -> DecodingState:
    """Push the window of every row, all being full."""
    offsets = torch.arange(trunk.config.window, device=state.start.device)
    segments = Segments.of(offsets == state.start[:, None])
    memories, caches = [], []
    for i, (layer, memory, cache) in enumerate(zip(trunk.layers, state.memory.layers, state.layers, strict=True)):
        memory, cache = layer.end_window(memory, cache, state.window[:, i], segments)
        memories.append(memory)
        caches.append(cache)
    pushed = replace(state.memory, layers=tuple(memories))
    return replace(
        state,
        memory=pushed,
        layers=tuple(caches),
        window=torch.zeros_like(state.window),  # the old one stays as it is for states that still hold it
        order=_order(trunk, pushed),
        position=torch.zeros_like(state.position),
        start=torch.full_like(state.start, -1),
    )


def _order(trunk: "CompressiveTransformer", memory: Memory) -> Tensor:
    """`DecodingState.order` as a window begins; slots that a layer lacks beside the largest one: never."""
    window, most = trunk.config.window, max(layer.n_memory for layer in trunk.layers)
    valid = torch.stack([F.pad(layer.valid(), (most - layer.valid().shape[1], 0)) for layer in memory.layers], dim=1)
    offsets = torch.arange(window, device=valid.device).expand(*valid.shape[:2], -1)
    return torch.cat([torch.where(valid, -1, window), offsets], dim=2)


def _check(trunk: "CompressiveTransformer", x: Tensor, state: DecodingState, starts: Tensor | None) -> None:
    if not isinstance(state, DecodingState):
        raise TypeError(
            f"state of type {type(state).__name__}: expected a DecodingState; begin with decoding_state(memory), then "
            "pass on what the last step gave"
        )
    config, rows, d_model = trunk.config, len(state.position), trunk.config.d_model
    found = [cache.key.shape[2] for cache in state.layers]
    expected = [layer.n_memory + config.window for layer in trunk.layers]
    heads = state.layers[0].key.shape
    if found != expected or (heads[1], heads[3]) != (config.n_heads, config.d_head):
        raise ValueError(
            f"state of another model: {heads[1]} heads of width {heads[3]}, slots by layer {found}; expected "
            f"{config.n_heads} of width {config.d_head}, {expected}"
        )
    if x.shape != (rows, d_model):
        raise ValueError(f"input of shape {tuple(x.shape)}: expected ({rows} rows of the state, d_model={d_model})")
    if starts is not None and (starts.dtype != torch.bool or starts.shape != (rows,)):
        raise ValueError(
            f"starts of type {starts.dtype} and shape {tuple(starts.shape)}: expected a bool mask of shape ({rows},)"
        )


# A layer.


def start_cache(layer: "Layer", memory: LayerMemory, codes: Codes, window: int) -> LayerCache:
    """Project what is in memory, once, and leave space for a window."""
    slots = torch.cat([memory.compressed, memory.recent], dim=1)
    key, value = heads_of(layer.attention.project_frozen(layer.normed_frozen(slots)))
    positions = layer.attention.positions(codes)
    return LayerCache(
        key=F.pad(key, (0, 0, 0, window)),
        value=F.pad(value, (0, 0, 0, window)),
        received=None if memory.usage is None else torch.zeros_like(memory.usage),
        near=positions.r.contiguous(),
        far=None if positions.r_far is None else positions.r_far.contiguous(),
    )


def step_layer(
    layer: "Layer",
    h: Tensor,
    cache: LayerCache,
    now: Now,
    joined: Tensor | None = None,
    observe: Callable[[Tensor], object] | None = None,
) -> tuple[Tensor, LayerCache]:
    """Lines 5 to 7 and 12 for one position per row, h (B, D), whose key and value are written into the cache.

    `joined` (3·D, D) is W_q, W_k and W_v as one matrix, if the caller has it. `observe` is called with the attention
    weights (B, H, N).
    """
    attention, x = layer.attention, layer.normed(h)
    if joined is None:
        projected = torch.cat([attention.query(x), attention.key_value(x)], dim=-1)
    else:
        projected = F.linear(x, joined)
    positions = Positions(
        cache.near, attention.position_bias, cache.far, attention.far_position_bias if attention.separate else None
    )
    q, k, v = projected.view(len(x), 3, attention.n_heads, -1).unbind(dim=1)
    attended, weights = relative_attention_step(
        q, k, v, cache.key, cache.value, attention.content_bias, positions, now, layer.n_compressed, layer.n_memory
    )
    if observe is not None:
        observe(weights)
    cache = receive(layer, cache, weights)
    return layer.mlp_block(layer.add_attention(h, attention.output(attended.flatten(1)))), cache


def receive(layer: "Layer", cache: LayerCache, weights: Tensor | None) -> LayerCache:
    """Add a step's attention weights (B, H, N) to what recent slots have received, where compression asks for it."""
    if cache.received is None or weights is None:
        return cache
    recent = weights.mean(dim=1)[:, layer.n_compressed : layer.n_memory]
    return replace(cache, received=cache.received + recent)


def end_window(
    layer: "Layer", memory: LayerMemory, cache: LayerCache, window: Tensor, segments: Segments
) -> tuple[LayerMemory, LayerCache]:
    """Lines 8 to 11 for a window (B, T, D) read step by step; only new compressed slots are projected."""
    C, M, T = layer.n_compressed, layer.n_recent, window.shape[1]
    received = None if cache.received is None else cache.received / T
    pushed = layer.remember(memory, window, segments, received)
    new = layer.normed_frozen(pushed.new.to(memory.compressed.dtype))
    key, value = heads_of(layer.attention.project_frozen(new))

    def shift(slots: Tensor, new: Tensor) -> Tensor:
        compressed, recent, window = slots.split_with_sizes([C, M, T], dim=2)
        kept = [fifo_in(compressed, new.to(slots.dtype), dim=2), fifo_in(recent, window, dim=2)]
        return torch.cat([*kept, torch.zeros_like(window)], dim=2)  # the old ones stay for states that hold them

    cache = dataclasses.replace(
        cache,
        key=shift(cache.key, key),
        value=shift(cache.value, value),
        received=None if cache.received is None else torch.zeros_like(cache.received),
    )
    return pushed.memory, cache


def relative_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    u: Tensor,
    positions: Positions,
    now: Now,
    n_compressed: int,
    n_memory: int,
) -> tuple[Tensor, Tensor]:
    """Write one position per row into cached keys and values (B, H, N, K), and attend from it: the reference form.

    q, k, v (B, H, K) of the new position; positions for the distances 0 to N-1. Returns (B, H, K) and the attention
    weights (B, H, N). `inference.fast_decoder` runs the kernel of this name where the dispatcher lets it.
    """
    B, H, N, K = keys.shape
    slot = (now.position + n_memory).view(-1, 1, 1, 1).expand(-1, H, -1, K)
    for slots, entering in ((keys, k), (values, v)):
        slots.scatter_(2, slot, entering.unsqueeze(2).to(slots.dtype))

    def by_slot(bias: Tensor, table: Tensor, index: Tensor) -> Tensor:
        by_distance = torch.bmm((q + bias).transpose(0, 1), table.mT)  # (H, B, N): one product for the whole batch
        return by_distance.gather(2, index).transpose(0, 1)

    if positions.r_far is None or positions.v_far is None:
        position = by_slot(positions.v, positions.r, now.distance)
    else:
        far = by_slot(positions.v_far, positions.r_far, now.distance[..., :n_compressed])
        position = torch.cat([far, by_slot(positions.v, positions.r, now.distance[..., n_compressed:])], dim=2)
    # bmm on views: the shape logic of a 4-D matmul costs a CPU as much time again.
    content = torch.bmm((q + u).view(-1, 1, K), keys.view(-1, N, K).mT).view(B, H, N)
    scores = (upcast(content) + upcast(position)).div_(math.sqrt(K))
    weights = scores.masked_fill_(now.hidden.unsqueeze(1), -torch.inf).softmax(dim=-1)
    return torch.bmm(weights.to(values.dtype).view(-1, 1, N), values.view(-1, N, K)).view(B, H, K), weights
