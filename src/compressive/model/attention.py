"""TransformerXL's relative attention (Dai et al. 2019) over [compressed, recent, window], Algorithm 1 line 6.

A query at slot i gives slot j the score

    ((q_i + u)·k_j + (q_i + v)·r_{i-j}) / sqrt(K),      r_d = W_r R_d,

where R_d is the sinusoid code of the distance d in slots, and u and v are learned per head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config import ModelConfig
from compressive.kernels.dispatch import operation
from compressive.model.linear import Linear, linear


class Projected(NamedTuple):
    """Queries of the window, keys and values of all slots."""

    query: Tensor  # (B, H, T, K)
    key_value: Tensor  # (B, N, 2, H, K), as one product gives them


class Codes(NamedTuple):
    """Sinusoid codes of a run of distances, (distances, D) each."""

    near: Tensor  # to recent slots and the window
    far: Tensor  # to compressed slots, whose distances may not count recent memory


class Positions(NamedTuple):
    """The position term: codes r of a run of distances, (H, distances, K), and the query's bias v, (H, K)."""

    r: Tensor
    v: Tensor
    r_far: Tensor | None  # the same for compressed slots, where they have a scheme of their own
    v_far: Tensor | None


def heads_of(key_value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, N, K) of (B, N, 2, H, K)."""
    key, value = key_value.permute(2, 0, 3, 1, 4)
    return key, value


class RelativeAttention(nn.Module):
    """Multi-head attention of a window over both memories and itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, H, K = config.d_model, config.n_heads, config.d_head
        self.n_heads = H
        self.dropout = config.attention_dropout
        self.query = Linear(D, D, bias=False)
        self.key_value = Linear(D, 2 * D, bias=False)
        self.output = Linear(D, D, bias=False)
        self.relative = Linear(D, D, bias=False)  # W_r
        self.content_bias = nn.Parameter(torch.zeros(H, K))  # u
        self.position_bias = nn.Parameter(torch.zeros(H, K))  # v
        # The authors' released code (Sonnet 1) gives compressed slots a W_r and v of their own, and counts their
        # distances from the window on, as if there were no recent memory. The paper does not mention it.
        self.separate = config.compressed_positions != "shared"
        if self.separate:
            self.far_relative = Linear(D, D, bias=False)
            self.far_position_bias = nn.Parameter(torch.zeros(H, K))

    def project(self, window: Tensor, slots: Tensor, n_frozen: int = 0) -> Projected:
        """Queries from the window (B, T, D), keys and values from all slots (B, N, D), each projected once.

        The first `n_frozen` slots need no input gradient.
        """
        key_value = linear(slots, self.key_value.weight, n_frozen=n_frozen)
        return Projected(self._heads(self.query(window)), torch.unflatten(key_value, -1, (2, self.n_heads, -1)))

    def project_frozen(self, slots: Tensor) -> Tensor:
        """Keys and values of slots, (B, N, 2, H, K), with no gradient to the weights: Algorithm 2, line 5."""
        return torch.unflatten(F.linear(slots, self.key_value.weight.detach()), -1, (2, self.n_heads, -1))

    def positions(self, codes: Codes) -> Positions:
        """The position term for each row of the sinusoid codes (distances, D)."""
        r = self._heads(self.relative(codes.near))
        if not self.separate:
            return Positions(r, self.position_bias, None, None)
        return Positions(r, self.position_bias, self._heads(self.far_relative(codes.far)), self.far_position_bias)

    def forward(
        self,
        projected: Projected,
        codes: Codes,
        memory_valid: Tensor,
        segment_ids: Tensor | None,
        n_compressed: int,
        with_usage: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; also return the mean attention each slot received, (B, N), when asked to.

        `codes` are the sinusoid codes of the distances N-1 down to -T, as `sinusoids` gives them.
        """
        r, v, r_far, v_far = self.positions(codes)
        attended, usage = relative_attention(
            projected.query, projected.key_value, r, self.content_bias, v, memory_valid, segment_ids,
            r_far=r_far, v_far=v_far, n_compressed=n_compressed,
            dropout=self.dropout if self.training else 0.0, with_usage=with_usage,
        )  # fmt: skip
        return self.output(attended.transpose(-3, -2).flatten(-2)), usage

    def _heads(self, x: Tensor) -> Tensor:
        """(..., T, D) to (..., H, T, K)."""
        return torch.unflatten(x, -1, (self.n_heads, -1)).transpose(-3, -2)


@operation("relative_attention")
def relative_attention(
    q: Tensor,
    kv: Tensor,
    r: Tensor,
    u: Tensor,
    v: Tensor,
    valid: Tensor,
    segments: Tensor | None = None,
    *,
    r_far: Tensor | None = None,
    v_far: Tensor | None = None,
    n_compressed: int = 0,
    dropout: float = 0.0,
    with_usage: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from a window to all slots: the reference that every kernel is tested against.

    q (B, H, T, K); kv (B, N, 2, H, K), keys and values of all slots; r (H, N + T, K) for the distances N-1 down to -T;
    u, v (H, K); valid (B, C + M); segments (B, T), None where no document starts; r_far and v_far like r and v
    for the first `n_compressed` slots, None where positions are shared. Returns (B, H, T, K), and (B, N), the mean
    over heads and queries of the attention each slot received before dropout, or None.
    """
    key, value = heads_of(kv)
    T, N = q.shape[-2], key.shape[-2]
    content = (q + u[:, None]) @ key.transpose(-1, -2)
    if r_far is None or v_far is None:
        position = relative_shift(by_distance(q + v[:, None], r), N)
    else:
        far = relative_shift(by_distance(q + v_far[:, None], r_far[:, : n_compressed + T]), n_compressed)
        near = relative_shift(by_distance(q + v[:, None], r[:, n_compressed:]), N - n_compressed)
        position = torch.cat([far, near], dim=-1)

    scores = (upcast(content) + upcast(position)) / math.sqrt(q.shape[-1])
    # Added rather than filled in: a tenth of the time on a CPU, and no pass of its own in the backward pass.
    mask = torch.where(visibility(valid, segments, T), 0.0, -torch.inf)
    weights = (scores + mask[:, None].to(scores.dtype)).softmax(dim=-1)
    usage = weights.mean(dim=(1, 2)) if with_usage else None
    return F.dropout(weights, dropout).to(value.dtype) @ value, usage


def by_distance(query: Tensor, code: Tensor) -> Tensor:
    """Products of queries (B, H, T, K) with the codes of distances (H, distances, K): (B, H, T, distances).

    One product per head for the whole batch, as all rows share the codes.
    """
    products = query.transpose(0, 1).flatten(1, 2) @ code.transpose(-1, -2)
    return torch.unflatten(products, 1, (query.shape[0], -1)).transpose(0, 1)


def relative_shift(scores: Tensor, n_slots: int) -> Tensor:
    """Turn scores by distance (..., T, n_slots + 1 or more) into scores by slot (..., T, n_slots).

    Columns go from the largest distance to the smallest. Query t finds slot j at column j + T-1-t, so each query's row
    begins one column further left than the one before. Flattened and cut into rows that are shorter by one, the rows
    are shifted just so. Slots after the query get scores of other queries, which the causal mask hides.
    """
    T, columns = scores.shape[-2:]
    flat = scores.flatten(-2)[..., T - 1 : T - 1 + T * (columns - 1)]
    return torch.unflatten(flat, -1, (T, columns - 1))[..., :n_slots]


def visibility(memory_valid: Tensor, segment_ids: Tensor | None, n_queries: int) -> Tensor:
    """Which slots each query sees, (B, T, N): valid memory and the window up to itself, of its own document."""
    causal = memory_valid.new_ones(n_queries, n_queries).tril()
    memory = memory_valid[:, None].expand(-1, n_queries, -1)
    if segment_ids is None:
        window = causal.expand(memory.shape[0], -1, -1)
    else:
        memory = memory & (segment_ids == 0)[:, :, None]
        window = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return torch.cat([memory, window], dim=-1)


def upcast(x: Tensor) -> Tensor:
    """Turn half precision into float32, and leave the rest.

    From the products to the softmax scores must stay in float32. Rounded to bf16 in between, the compiler may keep
    rounded scores beside a maximum of unrounded ones: weights are then off by e to the rounding error, and training
    diverges once scores have grown to some hundreds (docs/log.md).
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sinusoids(distances: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """The code R of each distance, (distances, D): sines of falling frequency, then their cosines."""
    angle_type = torch.promote_types(dtype, torch.float32)  # large angles need their bits
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=angle_type) / d_model
    angles = distances.to(angle_type)[:, None] * 10000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)
