"""What `step` carries from one position to the next, of constant size however long the text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from compressive.model.memory import Memory
from compressive.model.records import SHARED, TensorRecord


@dataclass(frozen=True)
class LayerCache(TensorRecord):
    """One layer's projections of all N = C + M + window slots, and its window so far."""

    key: Tensor  # (B, H, N, K)
    value: Tensor  # (B, H, N, K)
    window: Tensor  # (B, window, D): the inputs that will enter memory
    received: Tensor | None  # (B, M): attention on recent slots, summed over this window; for most-used compression
    near: Tensor = field(metadata=SHARED)  # (H, N, K): r for the distances 0 to N-1
    far: Tensor | None = field(metadata=SHARED)  # the same for compressed slots, where it differs


@dataclass(frozen=True)
class DecodingState(TensorRecord):
    """Everything needed to go on decoding, lanes at positions of their own.

    `select` forks lanes (read a book once, continue it many times), `join` batches states of different texts.
    A state stays good after a step from it; steps share buffers as long as nobody goes back.
    """

    memory: Memory  # as it was when each lane's window began
    layers: tuple[LayerCache, ...]
    position: Tensor  # (B,): tokens of the current window read so far
    start: Tensor  # (B,): where in this window the current document began, -1 if before it
    room: int  # for so many steps at least no lane's window is full: spares a look at the device
    spent: bool = field(default=False, init=False)  # a later state writes into these buffers

    def take(self) -> Self:
        """Hand the buffers over to be written to: these the first time, a copy from then on."""
        if self.spent:
            return self.clone()
        object.__setattr__(self, "spent", True)
        return self

    @classmethod
    def join(cls, records: Sequence[Self]) -> Self:
        """Lay the lanes of several states side by side in one batch."""
        joined = super().join(records)
        object.__setattr__(joined, "room", min(record.room for record in records))
        return joined
