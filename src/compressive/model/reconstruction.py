"""The auxiliary losses that train compression (section 3.2 of the paper).

Both compare what was evicted with what compression made of it, and both are the mean squared difference of a
layer: the paper writes a norm, which differs by the size of the tensor alone, and a mean keeps layers and
window lengths comparable. Rows where a new document started, and slots that may not be seen, do not count.
"""

import math

import torch
from torch import Tensor, nn

from compressive.config import ModelConfig
from compressive.kernels.dispatch import operation
from compressive.model.attention import heads_of, upcast
from compressive.model.memory import Evicted


def attention_loss(
    query: Tensor, old: Tensor, new: Tensor, old_valid: Tensor, new_valid: Tensor, counts: Tensor
) -> Tensor:
    """Algorithm 2 for one layer: the mean of `attention_reconstruction` over the rows that count, ().

    counts (B,), bool: the rows whose memory this window could see. Rows without a new slot to see do not count either.
    """
    per_row = attention_reconstruction(query, old, new, old_valid, new_valid)
    return _mean_over(per_row, counts & new_valid.any(dim=1))


@operation("attention_reconstruction")
def attention_reconstruction(query: Tensor, old: Tensor, new: Tensor, old_valid: Tensor, new_valid: Tensor) -> Tensor:
    """Algorithm 2, lines 6 and 8: attention over the old memories against that over the new, per row (B,).

    query (B, H, T, K); keys and values of the old and of the new slots, (B, n, 2, H, K) each; valid (B, n). Only the
    new slots carry a gradient (lines 3-5): the caller hands over the rest detached.
    """
    target = _content_attention(query, old, old_valid)
    difference = _content_attention(query, new, new_valid) - target
    return upcast(difference).square().mean(dim=(1, 2, 3))


class Decoder(nn.Module):
    """The auto-encoding loss and its learned g, a transposed convolution with kernel and stride c."""

    def __init__(self, config: ModelConfig, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.expand = nn.Linear(config.d_model, rate * config.d_model)

    def forward(self, old: Evicted, new: Tensor, new_valid: Tensor, counts: Tensor) -> Tensor:
        """Return || old - g(new) ||² per element, over the old memories that compression took in."""
        restored = self.expand(new).unflatten(-1, (self.rate, -1)).flatten(1, 2)
        difference = restored - old.slots[:, : restored.shape[1]]
        per_slot = upcast(difference).square().mean(dim=-1)
        counted = (new_valid & counts[:, None]).repeat_interleave(self.rate, dim=1)
        return _mean_over(per_slot, counted & old.valid[:, : counted.shape[1]])


def _content_attention(query: Tensor, key_value: Tensor, valid: Tensor) -> Tensor:
    """Line 6: softmax of the scaled products, no u, v or position; heads as in the layer.

    Spelled out, since torch's own attention takes eight times as long backward in bf16 on a CPU (docs/log.md).
    """
    key, value = heads_of(key_value)
    seen = valid | ~valid.any(dim=1, keepdim=True)  # a row with nothing to see does not count, but must stay finite
    scores = upcast(query @ key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    mask = torch.where(seen, 0.0, -torch.inf)[:, None, None]
    return (scores + mask.to(scores.dtype)).softmax(dim=-1).to(value.dtype) @ value


def _mean_over(x: Tensor, counts: Tensor) -> Tensor:
    return (x * counts).sum() / counts.sum().clamp(min=1)
