"""TransformerXL's relative attention (Dai et al. 2019) over [compressed, recent, window], Algorithm 1 line 6.

A query at slot i gives slot j the score

    ((q_i + u)·k_j + (q_i + v)·r_{i-j}) / sqrt(K),      r_d = W_r R_d,

where R_d is the sinusoid code of the distance d in slots, and u and v are learned per head.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config import Attention, ModelConfig
from compressive.kernels.linear import Linear, frozen_linear

HAS_TRITON = importlib.util.find_spec("triton") is not None
KERNEL_WIDTHS = (16, 32, 64, 128)
"""Widths of heads that the fused kernels take: powers of two, as tiles are."""


class Projected(NamedTuple):
    """Queries of the window, keys and values of all slots."""

    query: Tensor  # (B, H, T, K)
    key_value: Tensor  # (B, N, 2, H, K), as one product gives them


def heads_of(key_value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, N, K) of (B, N, 2, H, K)."""
    key, value = key_value.permute(2, 0, 3, 1, 4)
    return key, value


class Positions(NamedTuple):
    """The position code r of a run of distances, (H, distances, K): for most slots, and for compressed ones."""

    near: Tensor
    far: Tensor  # the very same tensor where positions are shared


class Biases(NamedTuple):
    """What is added to a query, (H, K), before it meets keys and before it meets position codes."""

    content: Tensor  # u
    near: Tensor  # v
    far: Tensor  # v for compressed slots


class OnePosition(NamedTuple):
    """Query, key and value of one position per lane, (B, H, K) each."""

    query: Tensor
    key: Tensor
    value: Tensor


class Now(NamedTuple):
    """Where a step stands."""

    position: Tensor  # (B,): in the window
    distance: Tensor  # (H, B, N), the same for all heads: how far back each slot lies, 0 for those to come
    hidden: Tensor  # (B, N), bool: slots that may not be seen


class RelativeAttention(nn.Module):
    """Multi-head attention of a window over both memories and itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, H, K = config.d_model, config.n_heads, config.d_head
        self.n_heads = H
        self.dropout = config.attention_dropout
        self.backend: Attention = "auto"
        self.query = Linear(D, D, bias=False)
        self.key_value = Linear(D, 2 * D, bias=False)
        self.output = Linear(D, D, bias=False)
        self.relative = Linear(D, D, bias=False)  # W_r
        self.content_bias = nn.Parameter(torch.zeros(H, K))  # u
        self.position_bias = nn.Parameter(torch.zeros(H, K))  # v
        # How single steps are taken; `generation/stepper.py: for_steps` knows faster ways.
        self.joined: Tensor | None = None  # W_q, W_k and W_v in one
        self.multiply: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.attend_one = step_attention
        # The authors' released code gives compressed slots a W_r and v of their own; the paper does not speak of it.
        self.separate = config.compressed_positions == "separate"
        if self.separate:
            self.far_relative = Linear(D, D, bias=False)
            self.far_position_bias = nn.Parameter(torch.zeros(H, K))

    def project(self, window: Tensor, slots: Tensor, n_frozen: int = 0) -> Projected:
        """Queries from the window (B, T, D), keys and values from all slots (B, N, D), each projected once.

        The first `n_frozen` slots get no gradient: what is remembered has no graph, and half the work is saved.
        """
        key_value = frozen_linear(slots, self.key_value.weight, n_frozen)
        return Projected(self._heads(self.query(window)), torch.unflatten(key_value, -1, (2, self.n_heads, -1)))

    def project_one(self, x: Tensor) -> OnePosition:
        """Project one position per lane (B, D)."""
        if self.joined is None:
            projected = torch.cat([self.query(x), self.key_value(x)], dim=-1)
        else:
            projected = self.multiply(x, self.joined)
        return OnePosition(*projected.view(len(x), 3, self.n_heads, -1).unbind(dim=1))

    def project_frozen(self, slots: Tensor) -> Tensor:
        """Keys and values of slots, (B, N, 2, H, K), with no gradient to the weights: Algorithm 2, line 5."""
        return torch.unflatten(F.linear(slots, self.key_value.weight.detach()), -1, (2, self.n_heads, -1))

    def positions(self, code: Tensor) -> Positions:
        """Give r for each row of the sinusoid code (distances, D)."""
        near = self._heads(self.relative(code))
        return Positions(near, self._heads(self.far_relative(code)) if self.separate else near)

    def biases(self) -> Biases:
        """Give u and both v."""
        far = self.far_position_bias if self.separate else self.position_bias
        return Biases(self.content_bias, self.position_bias, far)

    def forward(
        self,
        projected: Projected,
        code: Tensor,
        memory_valid: Tensor,
        segment_ids: Tensor | None,
        n_compressed: int,
        with_usage: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; also return the mean attention each slot received, (B, N), when asked to.

        `code` is the sinusoid code of the distances N-1 down to -T, as `sinusoids` gives it.
        """
        fused = self.chosen(projected.query.device, projected.query.dtype) == "fused"
        # The shift of the readable way passes over distances that are yet to come; the kernels never meet them.
        positions = self.positions(code[: projected.key_value.shape[1]] if fused else code)
        inputs = (projected, self.biases(), positions, memory_valid, segment_ids, n_compressed)
        if fused:
            from compressive.kernels.relative_attention import fused_attention

            attended, usage = fused_attention(*inputs, with_usage)
        else:
            attended, usage = relative_attention(*inputs, self.dropout if self.training else 0.0, with_usage)
        return self.output(self.merge(attended)), usage

    def use(self, backend: Attention) -> None:
        """Choose what computes attention; what cannot work here is refused."""
        if backend == "fused":
            if not HAS_TRITON:
                raise ValueError("attention='fused': triton is not installed; use readable, or auto")
            if not self._fits_kernels():
                width = self.content_bias.shape[1]
                raise ValueError(
                    f"attention='fused': heads are {width} wide, attention_dropout is {self.dropout}; expected a width "
                    f"of {', '.join(map(str, KERNEL_WIDTHS))} and no attention dropout, or readable"
                )
        self.backend = backend

    def chosen(self, device: torch.device, dtype: torch.dtype) -> str:
        """What computes attention for queries of a type on a device: readable, or fused."""
        if self.backend != "auto":
            return self.backend
        suits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        return "fused" if suits and self._fits_kernels() and HAS_TRITON else "reference"

    def _fits_kernels(self) -> bool:
        return self.content_bias.shape[1] in KERNEL_WIDTHS and not self.dropout

    def merge(self, attended: Tensor) -> Tensor:
        """(B, H, T, K) to (B, T, D)."""
        return attended.transpose(-3, -2).flatten(-2)

    def _heads(self, x: Tensor) -> Tensor:
        """(..., T, D) to (..., H, T, K)."""
        return torch.unflatten(x, -1, (self.n_heads, -1)).transpose(-3, -2)


def relative_attention(
    projected: Projected,
    biases: Biases,
    positions: Positions,
    memory_valid: Tensor,
    segment_ids: Tensor | None,
    n_compressed: int,
    dropout: float = 0.0,
    with_usage: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from a window to all slots: the readable backend, the oracle of every faster one.

    positions for the distances N-1 down to -T; memory_valid (B, C + M); segment_ids (B, T), None where no document
    starts; n_compressed is C. Returns (B, H, T, K), and (B, N) the mean over heads and
    queries of the attention each slot received, before dropout, or None.
    """
    query, (key, value) = projected.query, heads_of(projected.key_value)
    T, N = query.shape[-2], key.shape[-2]
    content = (query + biases.content[:, None]) @ key.transpose(-1, -2)
    separate = positions.far is not positions.near
    first = n_compressed if separate else 0  # the first slot that near codes are for
    position = relative_shift(by_distance(query + biases.near[:, None], positions.near[:, first:]), N - first)
    if separate:
        far = by_distance(query + biases.far[:, None], positions.far[:, : n_compressed + T])
        position = torch.cat([relative_shift(far, n_compressed), position], dim=-1)

    scores = (precise(content) + precise(position)) / math.sqrt(query.shape[-1])
    # Added rather than filled in: a tenth of the time on a CPU, and no pass of its own backwards.
    mask = torch.where(visibility(memory_valid, segment_ids, T), 0.0, -torch.inf)
    weights = (scores + mask[:, None].to(scores.dtype)).softmax(dim=-1)
    usage = weights.mean(dim=(1, 2)) if with_usage else None
    return F.dropout(weights, dropout).to(value.dtype) @ value, usage


def by_distance(query: Tensor, code: Tensor) -> Tensor:
    """Products of queries (B, H, T, K) with the codes of distances (H, distances, K): (B, H, T, distances).

    One product per head for all lanes together, as codes are the same in every lane.
    """
    lanes_as_one = query.transpose(0, 1).flatten(1, 2) @ code.transpose(-1, -2)
    return torch.unflatten(lanes_as_one, 1, (query.shape[0], -1)).transpose(0, 1)


def relative_shift(scores: Tensor, n_slots: int) -> Tensor:
    """Turn scores by distance (..., T, n_slots + T) into scores by slot (..., T, n_slots).

    Columns go from the largest distance to the smallest, so slot j is found at column j + T-1-t for query t: each
    query's row begins one column further left than the one before. Read as one long row, cut into rows
    shorter by one, that shift happens by itself.
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


def step_attention(
    new: OnePosition,
    key: Tensor,
    value: Tensor,
    biases: Biases,
    positions: Positions,
    now: Now,
    n_compressed: int,
    n_memory: int,
) -> tuple[Tensor, Tensor | None]:
    """Write one position per lane into cached keys and values (B, H, N, K), and attend from it.

    positions for the distances 0 to N-1. Returns (B, H, K), and the attention weights (B, H, N), which faster ways of
    doing this may leave out.
    """
    query, (B, H, N, K) = new.query, key.shape
    slot = (now.position + n_memory).view(-1, 1, 1, 1).expand(-1, H, -1, K)
    for slots, entering in ((key, new.key), (value, new.value)):
        slots.scatter_(2, slot, entering.unsqueeze(2).to(slots.dtype))

    def by_slot(bias: Tensor, table: Tensor, index: Tensor) -> Tensor:
        by_distance = torch.bmm((query + bias).transpose(0, 1), table.mT)  # (H, B, N): one product for all lanes
        return by_distance.gather(2, index).transpose(0, 1)

    if positions.far is positions.near:
        position = by_slot(biases.near, positions.near, now.distance)
    else:
        far = by_slot(biases.far, positions.far, now.distance[..., :n_compressed])
        position = torch.cat([far, by_slot(biases.near, positions.near, now.distance[..., n_compressed:])], dim=2)
    # Products of batches as they are: finding out what a product of four dimensions is takes a CPU as long again.
    content = torch.bmm((query + biases.content).view(-1, 1, K), key.view(-1, N, K).mT).view(B, H, N)
    scores = (precise(content) + precise(position)).div_(math.sqrt(K))
    weights = scores.masked_fill_(now.hidden.unsqueeze(1), -torch.inf).softmax(dim=-1)
    return torch.bmm(weights.to(value.dtype).view(-1, 1, N), value.view(-1, N, K)).view(B, H, K), weights


def precise(x: Tensor) -> Tensor:
    """Turn half precision into float32, and leave the rest.

    From here to the softmax scores must not be rounded to bf16 again. Beside the lost bits, the compiler may then keep
    rounded scores beside a maximum of unrounded ones: weights come out wrong by e to the rounding error, gradients
    more so, and training dies once scores have grown to some hundreds (docs/log.md).
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sinusoids(distances: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """The code R of each distance, (distances, D): sines of falling frequency, then their cosines."""
    angle_type = torch.promote_types(dtype, torch.float32)  # large angles need their bits
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=angle_type) / d_model
    angles = distances.to(angle_type)[:, None] * 10000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)
