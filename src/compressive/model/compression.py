"""Every compression function f_c: old memories in, floor(n / c) compressed memories out (Algorithm 1, line 9).

One interface: a compressor takes what was evicted and returns new slots with their visibility. Max, mean, conv,
dilated and most-used are the paper's; the GRU and the learned-query attention follow its closing wish for
other compressors.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config import ModelConfig
from compressive.model.linear import Linear
from compressive.model.memory import Evicted


class Compressor(nn.Module):
    """Makes one slot of every `rate` consecutive old ones, the oldest group first; a remainder is dropped."""

    def __init__(self, config: ModelConfig, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.partial = config.spanning_slots == "partial"

    def forward(self, old: Evicted) -> tuple[Tensor, Tensor]:
        """Return new slots (B, n // c, D) and whether each may be seen (B, n // c).

        Some members of a group may not be seen, such as those from before a new document's start. Then the slot is
        hidden too or, with `spanning_slots="partial"`, made of the other members alone. Evicted slots that may not be
        seen are zeros, so nothing of them is left in either case.
        """
        if old.slots.shape[1] < self.rate:
            return old.slots[:, :0], old.valid[:, :0]
        valid = self.groups(old.valid)
        if self.partial:
            return self.compress(old.slots, valid), valid.any(dim=2)
        return self.compress(old.slots), valid.all(dim=2)

    def compress(self, slots: Tensor, valid: Tensor | None = None) -> Tensor:
        """Turn (B, n, D) into (B, n // c, D); `valid` (B, n // c, c) says which members count, None that all do."""
        raise NotImplementedError

    def groups(self, x: Tensor) -> Tensor:
        """(B, n, ...) to (B, n // c, c, ...)."""
        count = x.shape[1] // self.rate
        return torch.unflatten(x[:, : count * self.rate], 1, (count, self.rate))


class MaxPooling(Compressor):
    """The largest value of each feature."""

    def compress(self, slots: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: D102
        groups = self.groups(slots)
        if valid is None:
            return groups.amax(dim=2)
        largest = groups.masked_fill(~valid[..., None], -math.inf).amax(dim=2)
        return largest.masked_fill(~valid.any(dim=2)[..., None], 0)


class MeanPooling(Compressor):
    """The mean of each feature."""

    def compress(self, slots: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: D102
        groups = self.groups(slots)
        return groups.mean(dim=2) if valid is None else groups.sum(dim=2) / valid.sum(dim=2, keepdim=True).clamp(min=1)


class Convolution(Compressor):
    """One-dimensional convolution with kernel and stride c, written as the matrix product that it is.

    Members that do not count are zeros, as padding is.
    """

    def __init__(self, config: ModelConfig, rate: int) -> None:
        super().__init__(config, rate)
        self.kernel = Linear(rate * config.d_model, config.d_model)

    def compress(self, slots: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: D102
        new: Tensor = self.kernel(self.groups(slots).flatten(2))
        return new


class DilatedConvolution(Convolution):
    """Three convolutions of width 3, dilated 1, 2 and 4, that keep the length; then the strided one."""

    def __init__(self, config: ModelConfig, rate: int) -> None:
        super().__init__(config, rate)
        D = config.d_model
        convolutions = [nn.Conv1d(D, D, 3, padding=d, dilation=d) for d in (1, 2, 4)]
        for convolution in convolutions:
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        self.stack = nn.ModuleList(convolutions)

    def compress(self, slots: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: D102
        x = slots.transpose(1, 2)
        for convolution in self.stack:
            x = F.relu(convolution(x))
        return super().compress(x.transpose(1, 2), valid)


class MostUsed(Compressor):
    """Keeps the n // c memories that received most attention while in memory, in order of time.

    Memories that may not be seen come last; of equals the older is kept.
    """

    def forward(self, old: Evicted) -> tuple[Tensor, Tensor]:  # noqa: D102
        kept = self.kept(old)
        slots = old.slots.gather(1, kept[..., None].expand(-1, -1, old.slots.shape[-1]))
        return slots, old.valid.gather(1, kept)

    def kept(self, old: Evicted) -> Tensor:
        """Which of the evicted slots stay, by number (B, n // c), oldest first."""
        assert old.usage is not None
        rank = old.usage.masked_fill(~old.valid, -1)  # usage is never negative
        order = rank.sort(dim=1, descending=True, stable=True).indices
        return order[:, : rank.shape[1] // self.rate].sort(dim=1).values


class RecurrentCompression(Compressor):
    """A GRU reads each group, oldest first, and its last state, projected, is the slot."""

    def __init__(self, config: ModelConfig, rate: int) -> None:
        super().__init__(config, rate)
        self.cell = nn.GRUCell(config.d_model, config.d_model)
        # A GRU's state lies within (-1, 1), activations do not.
        self.output = nn.Linear(config.d_model, config.d_model)

    def compress(self, slots: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: D102
        groups = self.groups(slots)
        members = groups.flatten(0, 1).unbind(dim=1)
        state = torch.zeros_like(members[0])
        for i, member in enumerate(members):
            after = self.cell(member, state)
            state = after if valid is None else torch.where(valid[..., i].flatten()[:, None], after, state)
        return torch.unflatten(self.output(state), 0, groups.shape[:2])


class AttentionPooling(Compressor):
    """A learned query per head attends to the members of each group, told apart by a learned bias."""

    def __init__(self, config: ModelConfig, rate: int) -> None:
        super().__init__(config, rate)
        D, H, K = config.d_model, config.n_heads, config.d_head
        self.query = nn.Parameter(torch.zeros(H, K))
        self.offset = nn.Parameter(torch.zeros(H, rate))
        self.key_value = nn.Linear(D, 2 * D, bias=False)
        self.output = nn.Linear(D, D, bias=False)

    def compress(self, slots: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: D102
        H, K = self.query.shape
        key, value = torch.unflatten(self.key_value(self.groups(slots)), -1, (2, H, K)).unbind(dim=-3)
        scores = torch.einsum("hk,bgchk->bghc", self.query, key) / math.sqrt(K) + self.offset
        if valid is not None:  # a finite score, as a group without any member must stay finite
            scores = scores.masked_fill(~valid[:, :, None], torch.finfo(scores.dtype).min)
        new: Tensor = self.output(torch.einsum("bghc,bgchk->bghk", scores.softmax(dim=-1), value).flatten(2))
        return new


COMPRESSORS: dict[str, type[Compressor]] = {
    "max": MaxPooling,
    "mean": MeanPooling,
    "conv": Convolution,
    "dilated": DilatedConvolution,
    "most_used": MostUsed,
    "gru": RecurrentCompression,
    "attention": AttentionPooling,
}
