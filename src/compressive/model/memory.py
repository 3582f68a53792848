"""The two memories of every layer, as pure functions on an immutable `Memory` (Algorithm 1, lines 1-2 and 8-11).

Both are first-in, first-out. A window of T activations enters `recent` at its new end and pushes the T oldest
slots out; what compression makes of these enters `compressed` at its new end and pushes its oldest out.

Every slot has a flag that says whether it may be seen. A slot becomes invisible for good when a new document
starts after it (`starts`). A compressed slot is visible only if all that it was made of is, or, with
`spanning_slots="partial"`, if any of it is.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from compressive.config import ModelConfig, PerLayer
from compressive.config.documented import documented
from compressive.model.records import TensorRecord


@documented
@dataclass(frozen=True)
class LayerMemory(TensorRecord):
    """What one layer remembers, oldest first."""

    recent: Tensor  # (B, M, D)
    compressed: Tensor  # (B, C, D)
    recent_valid: Tensor  # (B, M), bool: may be seen
    compressed_valid: Tensor  # (B, C), bool
    usage: Tensor | None  # (B, M): attention received since the slot entered memory; only where compression wants it

    def slots(self, window: Tensor) -> Tensor:
        """All that a window attends to, (B, N, D), in the order of line 5: compressed, recent, window."""
        return torch.cat([self.compressed, self.recent, window], dim=1)

    def valid(self) -> Tensor:
        """Which slots of both memories may be seen, (B, C + M)."""
        return torch.cat([self.compressed_valid, self.recent_valid], dim=1)


@documented
@dataclass(frozen=True)
class Memory(TensorRecord):
    """Both memories of all layers; immutable, so a failed step leaves it unchanged."""

    layers: tuple[LayerMemory, ...]  # one per layer of the model
    zeros_visible: bool  # whether slots that were never written are seen as zeros, or not at all
    too_short: bool = field(default=False, init=False)  # the last window was shorter than a compression rate; not saved

    @classmethod
    def empty(cls, config: ModelConfig, batch_size: int, device: torch.device, dtype: torch.dtype) -> Self:
        """Return empty memories, zeros everywhere (Algorithm 1, lines 1-2)."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected at least 1")
        visible = config.empty_memory == "zeros"

        def layer(recent: int, compressed: int) -> LayerMemory:
            zeros = torch.zeros(batch_size, recent, config.d_model, device=device, dtype=dtype)
            valid = torch.full((batch_size, recent), visible, device=device)
            return LayerMemory(
                recent=zeros,
                compressed=zeros.new_zeros(batch_size, compressed, config.d_model),
                recent_valid=valid,
                compressed_valid=valid.new_full((batch_size, compressed), visible),
                usage=zeros.new_zeros(batch_size, recent) if config.compression == "most_used" else None,
            )

        sizes = zip(config.memory_sizes, config.compressed_sizes, strict=True)
        return cls(tuple(layer(*size) for size in sizes), visible)

    @property
    def recent(self) -> tuple[Tensor, ...]:
        """Recent memory, one (B, M, D) tensor per layer."""
        return tuple(layer.recent for layer in self.layers)

    @property
    def compressed(self) -> tuple[Tensor, ...]:
        """Compressed memory, one (B, C, D) tensor per layer."""
        return tuple(layer.compressed for layer in self.layers)

    @property
    def batch_size(self) -> int:
        """Number of batch rows."""
        return self.layers[0].recent.shape[0]

    def resize(
        self, memory_size: PerLayer | list[int] | None = None, compressed_size: PerLayer | list[int] | None = None
    ) -> Self:
        """Grow by empty slots or shrink by forgetting, at the old end; one size, or one per layer."""

        def fit(x: Tensor, size: int | None, blank: float) -> Tensor:
            if size is None:
                return x
            kept = x[:, max(0, x.shape[1] - size) :]
            return F.pad(kept, (0, 0) * (x.ndim - 2) + (size - kept.shape[1], 0), value=blank)

        def layer(old: LayerMemory, recent: int | None, compressed: int | None) -> LayerMemory:
            return LayerMemory(
                recent=fit(old.recent, recent, 0),
                compressed=fit(old.compressed, compressed, 0),
                recent_valid=fit(old.recent_valid, recent, self.zeros_visible),
                compressed_valid=fit(old.compressed_valid, compressed, self.zeros_visible),
                usage=None if old.usage is None else fit(old.usage, recent, 0),
            )

        sizes = zip(self.layers, self._per_layer(memory_size), self._per_layer(compressed_size), strict=True)
        return dataclasses.replace(self, layers=tuple(layer(*size) for size in sizes))

    def reset(self, rows: Tensor) -> Self:
        """Empty some batch rows, given as a (B,) bool mask, as at time zero; raises ValueError for any other shape."""
        if rows.dtype != torch.bool or rows.shape != (self.batch_size,):
            raise ValueError(
                f"rows of type {rows.dtype} and shape {tuple(rows.shape)}: expected a bool mask "
                f"of shape ({self.batch_size},), one flag per batch row"
            )

        def clear(x: Tensor) -> Tensor:
            blank = self.zeros_visible if x.dtype == torch.bool else 0
            # In one pass. `masked_fill` copies everything first.
            return torch.where(rows.view(-1, *[1] * (x.ndim - 1)), blank, x)

        return self.map(clear)

    def check(self, config: ModelConfig, batch_size: int, weight: Tensor) -> None:
        """Refuse to be used with another batch, model, device or type than it was made for, with a ValueError."""
        found = [(layer.recent.shape, layer.compressed.shape) for layer in self.layers]
        if len(found) != config.n_layers:
            raise ValueError(f"memory of {len(found)} layers: the model has {config.n_layers}; use its initial_memory")
        for i, (recent, compressed) in enumerate(found):
            for kind, shape, slots in (
                ("recent", recent, config.memory_sizes[i]),
                ("compressed", compressed, config.compressed_sizes[i]),
            ):
                if shape[0] != batch_size:
                    raise ValueError(
                        f"memory of batch size {shape[0]}: the input has {batch_size}; "
                        f"make it with initial_memory(batch_size={batch_size})"
                    )
                if shape[1:] != (slots, config.d_model):
                    raise ValueError(
                        f"{kind} memory of layer {i} has {shape[1]} slots of width {shape[2]}: the model expects "
                        f"{slots} of width {config.d_model}; use memory.resize, or the model's own initial_memory"
                    )
            if (self.layers[i].usage is not None) != (config.compression == "most_used"):
                raise ValueError(
                    f"memory of a model with another compression than {config.compression!r}: "
                    "only most_used keeps usage; use the model's own initial_memory"
                )
        held, device = self.layers[0].recent, weight.device
        if held.device != device:
            raise ValueError(
                f"memory on {held.device}: the model is on {device}; move it with memory.to({str(device)!r})"
            )
        if held.dtype != weight.dtype and (held.dtype, weight.dtype) != (torch.bfloat16, torch.float32):  # autocast
            raise ValueError(
                f"memory of type {held.dtype}: the model is of {weight.dtype}; change it with memory.to(dtype=...)"
            )

    def _per_layer(self, size: PerLayer | list[int] | None) -> Sequence[int | None]:
        sizes = size if isinstance(size, tuple | list) else (size,) * len(self.layers)
        if len(sizes) != len(self.layers) or any(n is not None and n < 0 for n in sizes):
            raise ValueError(
                f"size={size!r}: expected a whole number of at least 0, or one for each of {len(self.layers)} layers"
            )
        return sizes


class Segments(NamedTuple):
    """How new documents divide a window."""

    ids: Tensor  # (B, T): how many documents have started in this window up to here
    current: Tensor  # (B, T), bool: belongs to the document that the window ends in
    unbroken: Tensor  # (B,), bool: no document started, so memory stays visible

    @classmethod
    def of(cls, starts: Tensor) -> Self:
        """Read them off `starts` (B, T), bool."""
        ids = starts.long().cumsum(dim=1)
        return cls(ids, ids == ids[:, -1:], ids[:, -1] == 0)


class Evicted(NamedTuple):
    """What a window pushes out of recent memory."""

    slots: Tensor  # (B, T, D), zero where not valid
    valid: Tensor  # (B, T)
    usage: Tensor | None  # (B, T)


def after_attention(memory: LayerMemory, segments: Segments | None, received: Tensor | None) -> LayerMemory:
    """Memory as a window leaves it before anything is pushed: usage counted, and hidden where a document started.

    `received` (B, M) is the mean attention that recent slots got from this window, added to their usage.
    """
    if memory.usage is not None:
        assert received is not None
        memory = dataclasses.replace(memory, usage=memory.usage + received.detach())
    if segments is None:
        return memory
    unbroken = segments.unbroken[:, None]
    return dataclasses.replace(
        memory,
        recent_valid=memory.recent_valid & unbroken,
        compressed_valid=memory.compressed_valid & unbroken,
    )


class Entering(NamedTuple):
    """A window as it enters recent memory."""

    slots: Tensor  # (B, T, D), detached, in memory's type
    valid: Tensor  # (B, T): belongs to the document that the window ends in
    usage: Tensor | None  # (B, T), zeros


def entering(memory: LayerMemory, window: Tensor, segments: Segments | None) -> Entering:
    """Prepare a window (B, T, D) for recent memory: detached, in memory's type."""
    return Entering(
        window.detach().to(memory.recent.dtype),
        memory.recent_valid.new_ones(window.shape[:2]) if segments is None else segments.current,
        None if memory.usage is None else memory.usage.new_zeros(window.shape[:2]),
    )


def evict(memory: LayerMemory, new: Entering) -> Evicted:
    """Line 8: the oldest slots, as many as the window has, which will push them out.

    Line 8 evicts m[:n_s], which takes n_m >= n_s for granted. Where the window is longer than the memory, the
    activations that never fit are evicted with the rest and so compressed too: a departure, in the spirit of
    the paper that nothing is discarded uncompressed.
    """
    valid = fifo_out(memory.recent_valid, new.valid)
    slots = fifo_out(memory.recent, new.slots).masked_fill(~valid[..., None], 0)
    if memory.usage is None or new.usage is None:
        return Evicted(slots, valid, None)
    return Evicted(slots, valid, fifo_out(memory.usage, new.usage))


def push_recent(memory: LayerMemory, new: Entering) -> LayerMemory:
    """Line 10: the window enters recent memory, and as many of the oldest slots leave."""
    usage = memory.usage if new.usage is None or memory.usage is None else fifo_in(memory.usage, new.usage)
    recent, valid = fifo_in(memory.recent, new.slots), fifo_in(memory.recent_valid, new.valid)
    return LayerMemory(recent, memory.compressed, valid, memory.compressed_valid, usage)


def push_compressed(memory: LayerMemory, new: Tensor, new_valid: Tensor) -> LayerMemory:
    """Line 11: new compressed slots (B, n, D) enter, the oldest leave."""
    compressed = fifo_in(memory.compressed, new.to(memory.compressed.dtype))
    valid = fifo_in(memory.compressed_valid, new_valid)
    return LayerMemory(memory.recent, compressed, memory.recent_valid, valid, memory.usage)


def fifo_out(slots: Tensor, new: Tensor, dim: int = 1) -> Tensor:
    """What falls out when `new` is pushed into `slots` along `dim`: as many as come in, oldest first."""
    size, count = slots.shape[dim], new.shape[dim]
    if count <= size:
        return slots.narrow(dim, 0, count)
    return torch.cat([slots, new.narrow(dim, 0, count - size)], dim)


def fifo_in(slots: Tensor, new: Tensor, dim: int = 1) -> Tensor:
    """What `slots` hold once `new` is pushed in along `dim`; shares no storage with `new`, which may be a buffer."""
    size, count = slots.shape[dim], new.shape[dim]
    if count <= size:
        return torch.cat([slots.narrow(dim, count, size - count), new], dim)
    return new.narrow(dim, count - size, size).clone()
