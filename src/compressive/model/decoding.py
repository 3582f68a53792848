"""What `step` carries from one position to the next, of constant size however long the text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from compressive.model.memory import Memory
from compressive.model.records import SHARED, TensorRecord


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
    """A state whose buffers are written to, and which yet stays good after a step from it.

    The next state takes its buffers over, and whoever steps from it again, or from a state that was moved, forked or
    loaded, first gets a copy.
    """

    owns_buffers: bool = field(default=False, init=False)  # nobody else holds keys, values and windows

    def owning(self) -> Self:
        """Declare that nobody else holds this state's buffers, so that the next step may write into them."""
        object.__setattr__(self, "owns_buffers", True)
        return self

    def take(self) -> Self:
        """Hand the buffers over to be written to: these if they are this state's alone, and only once, else a copy."""
        if not self.owns_buffers:
            return self.clone()
        object.__setattr__(self, "owns_buffers", False)
        return self


@dataclass(frozen=True)
class DecodingState(OwnedRecord):
    """Everything needed to go on decoding, lanes at positions of their own.

    `select` forks lanes (read a book once, continue it many times), `join` batches states of different texts.
    """

    memory: Memory  # as it was when each lane's window began
    layers: tuple[LayerCache, ...]
    window: Tensor  # (B, n_layers, window, D): each layer's inputs so far, which will enter memory
    order: Tensor  # (B, n_layers, N): where in this window a slot is read, -1 if before it, `window`: never to be seen
    position: Tensor  # (B,): tokens of the current window read so far
    start: Tensor  # (B,): where in this window the current document began, -1 if before it
    room: int  # for so many steps at least no lane's window is full: spares a look at the device
    together: bool  # all lanes have as much room, so that all their windows end together: spares another

    def _combine(self, others: Sequence[Self], function: Callable[..., Tensor], shared: bool = False) -> Self:
        states = (self, *others)
        rooms = [state.room for state in states]
        together = all(state.together for state in states) and min(rooms) == max(rooms)
        first, *rest = (replace(state, room=min(rooms), together=together) for state in states)
        return super(DecodingState, first)._combine(rest, function, shared)
