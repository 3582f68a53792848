"""Relative attention as Triton kernels: the scores of a tile live in registers, and nowhere else.

Forward, and two kernels backward, each a loop over tiles of BLOCK queries by BLOCK slots, as in flash attention. New is
the position term. Slot j and query t meet row m = j - t + T-1 of the table r, so a tile needs a band of 2·BLOCK - 1
rows. Those are two aligned blocks of rows, of which the second is the first of the next tile: one product per tile
gives both. Within the band every query's row begins one column further left than that of the query before; as

    column of r, within its block of the band = (slot - query - 1) mod BLOCK,

this is a rotation of each row, after taking each element from the first block or the second: `_to_slots`, and
`_to_rows` back. Scores, maxima and sums are float32 from the products on.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressive.model.attention import Biases, Positions, Projected

BLOCK = 64
LAUNCH = {"forward": (8, 2), "slots": (8, 2), "queries": (8, 2)}
"""Warps, and stages of loads in flight, of each kernel."""
HEAD_WIDTHS = (16, 32, 64, 128)
"""What the kernels take: powers of two, as tiles are."""


@triton.jit
def _to_slots(low, high, BLOCK: tl.constexpr):
    """Position scores by row of the band, two blocks (query, row), to those by slot (query, slot)."""
    query = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    taken = tl.where(column >= BLOCK - 1 - query, low, high)
    return tl.gather(taken, (column - query - 1 + BLOCK) % BLOCK, 1)


@triton.jit
def _to_rows(gradient, BLOCK: tl.constexpr):
    """The way back: what the two blocks of the band receive."""
    query = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    turned = tl.gather(gradient, (column + query + 1) % BLOCK, 1)
    in_low = column >= BLOCK - 1 - query
    return tl.where(in_low, turned, 0.0), tl.where(in_low, 0.0, turned)


@triton.jit
def _load(pointer, rows, n_rows, stride, BLOCK_K: tl.constexpr):
    """Rows of a matrix, zeros outside of it."""
    columns = tl.arange(0, BLOCK_K)
    inside = (rows >= 0) & (rows < n_rows)
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _store(pointer, rows, n_rows, stride, values, BLOCK_K: tl.constexpr):
    columns = tl.arange(0, BLOCK_K)
    inside = (rows >= 0) & (rows < n_rows)
    tl.store(
        pointer + rows[:, None] * stride + columns[None, :], values.to(pointer.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit
def _visible(valid, segments, lane, queries, slots, T, N, end, HAS_SEGMENTS: tl.constexpr):
    """Which slots, up to `end`, each query of a tile sees."""
    n_memory = N - T
    in_memory = slots < n_memory
    seen = tl.load(valid + lane * n_memory + slots, mask=in_memory, other=0) != 0
    causal = (slots[None, :] - n_memory <= queries[:, None]) & (slots < end)[None, :]
    if HAS_SEGMENTS:
        of_query = tl.load(segments + lane * T + queries, mask=queries < T, other=0)
        of_slot = tl.load(segments + lane * T + slots - n_memory, mask=(slots >= n_memory) & (slots < N), other=-1)
        remembered = seen[None, :] & (of_query == 0)[:, None]
        current = of_query[:, None] == of_slot[None, :]
    else:
        remembered = seen[None, :]
        current = ~in_memory[None, :]
    visible = tl.where(in_memory[None, :], remembered, current & causal)
    return visible & (slots < end)[None, :] & (queries < T)[:, None]


@triton.jit
def _forward(
    q_content, q_far, q_near, key, value, r_far, r_near, valid, segments, out, lse,
    H, T, N, C, kv_batch, kv_stride, scale,
    SEPARATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    lane_head = tl.program_id(1)
    lane, head = (lane_head // H).to(tl.int64), lane_head % H
    at_queries = (lane * T * H + head) * BLOCK_K
    queries = first + tl.arange(0, BLOCK)
    key += lane * kv_batch + head * BLOCK_K
    value += lane * kv_batch + head * BLOCK_K
    qc = _load(q_content + at_queries, queries, T, H * BLOCK_K, BLOCK_K)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for part in tl.static_range(0, 2 if SEPARATE else 1):
        # Compressed slots first, with a table of their own, where positions are separate; else all slots at once.
        far = SEPARATE and part == 0
        begin = 0 if part == 0 else C
        end = C if far else tl.minimum(N, N - T + first + BLOCK)
        qp = _load((q_far if far else q_near) + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
        r = (r_far if far else r_near) + head * BLOCK_K
        band = begin - first - BLOCK + T + tl.arange(0, BLOCK)  # rows of the first block of the band
        low = tl.dot(qp, tl.trans(_load(r, band, N + T, H * BLOCK_K, BLOCK_K)), input_precision="ieee")
        for start in range(begin, end, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            band += BLOCK
            high = tl.dot(qp, tl.trans(_load(r, band, N + T, H * BLOCK_K, BLOCK_K)), input_precision="ieee")
            scores = tl.dot(qc, tl.trans(_load(key, slots, N, kv_stride, BLOCK_K)), input_precision="ieee")
            scores = (scores + _to_slots(low, high, BLOCK)) * scale
            visible = _visible(valid, segments, lane, queries, slots, T, N, end, HAS_SEGMENTS)
            scores = tl.where(visible, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            against = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # of a row that has seen nothing yet
            weights = tl.exp(scores - against[:, None])
            shrink = tl.exp(largest - against)
            total = total * shrink + tl.sum(weights, 1)
            v = _load(value, slots, N, kv_stride, BLOCK_K)
            sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            largest = new_largest
            low = high
    total = tl.where(queries < T, total, 1.0)
    _store(out + at_queries, queries, T, H * BLOCK_K, sums / total[:, None], BLOCK_K)
    tl.store(lse + lane_head * T + queries, largest + tl.log(total), mask=queries < T)


@triton.jit
def _backward_slots(
    q_content, q_far, q_near, key, value, r_far, r_near, valid, segments, lse, delta, d_out, d_key, d_value, usage,
    H, T, N, C, kv_batch, kv_stride, scale,
    SEPARATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, USAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values; or, with USAGE, only how much attention each slot received."""
    lane_head = tl.program_id(1)
    lane, head = (lane_head // H).to(tl.int64), lane_head % H
    at_queries = (lane * T * H + head) * BLOCK_K
    at_slots = (lane * N * H + head) * BLOCK_K
    n_far = tl.cdiv(C, BLOCK) if SEPARATE else 0
    number = tl.program_id(0)
    far = number < n_far
    start = number * BLOCK if far else (number - n_far) * BLOCK + (C if SEPARATE else 0)
    end = C if far else N
    slots = start + tl.arange(0, BLOCK)
    k = _load(key + lane * kv_batch + head * BLOCK_K, slots, end, kv_stride, BLOCK_K)
    v = _load(value + lane * kv_batch + head * BLOCK_K, slots, end, kv_stride, BLOCK_K)
    q_position = q_far if far else q_near
    r = (r_far if far else r_near) + head * BLOCK_K
    dk = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    received = tl.zeros([BLOCK], tl.float32)
    earliest = tl.maximum(start - (N - T), 0) // BLOCK * BLOCK  # no query before it sees these slots
    for first in range(earliest, T, BLOCK):
        queries = first + tl.arange(0, BLOCK)
        qc = _load(q_content + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
        qp = _load(q_position + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
        band = start - first - BLOCK + T + tl.arange(0, BLOCK)
        low = tl.dot(qp, tl.trans(_load(r, band, N + T, H * BLOCK_K, BLOCK_K)), input_precision="ieee")
        high = tl.dot(qp, tl.trans(_load(r, band + BLOCK, N + T, H * BLOCK_K, BLOCK_K)), input_precision="ieee")
        scores = (tl.dot(qc, tl.trans(k), input_precision="ieee") + _to_slots(low, high, BLOCK)) * scale
        visible = _visible(valid, segments, lane, queries, slots, T, N, end, HAS_SEGMENTS)
        norm = tl.load(lse + lane_head * T + queries, mask=queries < T, other=0.0)
        weights = tl.where(visible, tl.exp(scores - norm[:, None]), 0.0)
        if USAGE:
            received += tl.sum(weights, 0)
        else:
            do = _load(d_out + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
            dv += tl.dot(tl.trans(weights.to(do.dtype)), do, input_precision="ieee")
            mean = tl.load(delta + lane_head * T + queries, mask=queries < T, other=0.0)
            d_scores = weights * (tl.dot(do, tl.trans(v), input_precision="ieee") - mean[:, None]) * scale
            dk += tl.dot(tl.trans(d_scores.to(qc.dtype)), qc, input_precision="ieee")
    if USAGE:
        tl.store(usage + lane_head * N + slots, received, mask=slots < end)
    else:
        _store(d_key + at_slots, slots, end, H * BLOCK_K, dk, BLOCK_K)
        _store(d_value + at_slots, slots, end, H * BLOCK_K, dv, BLOCK_K)


@triton.jit
def _add_rows(pointer, rows, n_rows, stride, values, BLOCK_K: tl.constexpr):
    columns = tl.arange(0, BLOCK_K)
    inside = (rows >= 0) & (rows < n_rows)
    tl.atomic_add(
        pointer + rows[:, None] * stride + columns[None, :],
        values.to(pointer.dtype.element_ty),
        mask=inside[:, None] & (columns >= 0)[None, :],
        sem="relaxed",
    )


@triton.jit
def _backward_queries(
    q_content, q_far, q_near, key, value, r_far, r_near, valid, segments, lse, delta, d_out,
    d_content, d_far, d_near, d_r_far, d_r_near,
    H, T, N, C, kv_batch, kv_stride, scale,
    SEPARATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and of the tables, to which all lanes and queries add."""
    first = tl.program_id(0) * BLOCK
    lane_head = tl.program_id(1)
    lane, head = (lane_head // H).to(tl.int64), lane_head % H
    at_queries = (lane * T * H + head) * BLOCK_K
    queries = first + tl.arange(0, BLOCK)
    key += lane * kv_batch + head * BLOCK_K
    value += lane * kv_batch + head * BLOCK_K
    qc = _load(q_content + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
    do = _load(d_out + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
    norm = tl.load(lse + lane_head * T + queries, mask=queries < T, other=0.0)
    mean = tl.load(delta + lane_head * T + queries, mask=queries < T, other=0.0)
    dqc = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for part in tl.static_range(0, 2 if SEPARATE else 1):
        far = SEPARATE and part == 0
        begin = 0 if part == 0 else C
        end = C if far else tl.minimum(N, N - T + first + BLOCK)
        qp = _load((q_far if far else q_near) + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
        r = (r_far if far else r_near) + head * BLOCK_K
        dr = (d_r_far if far else d_r_near) + head * BLOCK_K
        dqp = tl.zeros([BLOCK, BLOCK_K], tl.float32)
        band = begin - first - BLOCK + T + tl.arange(0, BLOCK)
        r_low = _load(r, band, N + T, H * BLOCK_K, BLOCK_K)
        low = tl.dot(qp, tl.trans(r_low), input_precision="ieee")
        pending = tl.zeros([BLOCK, BLOCK], tl.float32)  # what the first block of the band got from the tile before
        for start in range(begin, end, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            r_high = _load(r, band + BLOCK, N + T, H * BLOCK_K, BLOCK_K)
            high = tl.dot(qp, tl.trans(r_high), input_precision="ieee")
            k = _load(key, slots, N, kv_stride, BLOCK_K)
            scores = (tl.dot(qc, tl.trans(k), input_precision="ieee") + _to_slots(low, high, BLOCK)) * scale
            visible = _visible(valid, segments, lane, queries, slots, T, N, end, HAS_SEGMENTS)
            weights = tl.where(visible, tl.exp(scores - norm[:, None]), 0.0)
            v = _load(value, slots, N, kv_stride, BLOCK_K)
            d_scores = weights * (tl.dot(do, tl.trans(v), input_precision="ieee") - mean[:, None]) * scale
            dqc += tl.dot(d_scores.to(k.dtype), k, input_precision="ieee")
            to_low, to_high = _to_rows(d_scores, BLOCK)
            whole = (pending + to_low).to(r_low.dtype)
            dqp += tl.dot(whole, r_low, input_precision="ieee")
            _add_rows(dr, band, N + T, H * BLOCK_K, tl.dot(tl.trans(whole), qp, input_precision="ieee"), BLOCK_K)
            pending = to_high
            low = high
            r_low = r_high
            band += BLOCK
        whole = pending.to(r_low.dtype)
        dqp += tl.dot(whole, r_low, input_precision="ieee")
        _add_rows(dr, band, N + T, H * BLOCK_K, tl.dot(tl.trans(whole), qp, input_precision="ieee"), BLOCK_K)
        _store((d_far if far else d_near) + at_queries, queries, T, H * BLOCK_K, dqp, BLOCK_K)
    _store(d_content + at_queries, queries, T, H * BLOCK_K, dqc, BLOCK_K)


def fused_attention(
    projected: Projected,
    biases: Biases,
    positions: Positions,
    memory_valid: Tensor,
    segment_ids: Tensor | None,
    n_compressed: int,
    with_usage: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `relative_attention` does, without dropout."""
    query, key, value = (x.transpose(1, 2) for x in projected)  # (B, T, H, K), as the projections lie in memory
    far, near = (x.transpose(0, 1) for x in (positions.far, positions.near))
    queries = [(query + bias).to(key.dtype) for bias in (biases.content, biases.far, biases.near)]
    separate = positions.far is not positions.near
    inputs = (*queries, key, value, far.to(key.dtype), near.to(key.dtype))
    settings = (memory_valid, segment_ids, n_compressed, separate)
    out, lse = attend(*inputs, *settings)
    usage = attention_received(*(x.detach() for x in inputs), *settings, lse) if with_usage else None
    return out.transpose(1, 2), usage


class _Tiles:
    """What the kernels are called with."""

    def __init__(
        self, queries: tuple[Tensor, ...], key: Tensor, value: Tensor, tables: tuple[Tensor, ...], valid: Tensor,
        segments: Tensor | None, n_compressed: int, separate: bool,
    ) -> None:  # fmt: skip
        B, T, H, K = queries[0].shape
        N = key.shape[1]
        if key.stride() != value.stride() or key.stride()[2:] != (K, 1):  # halves of one projection pass as they are
            key, value = key.contiguous(), value.contiguous()
        queries, tables = (tuple(x.contiguous() for x in group) for group in (queries, tables))
        ids = valid if segments is None else segments.to(torch.int32).contiguous()
        self.inputs = (*queries, key, value, *tables, valid.contiguous(), ids)
        self.sizes = (H, T, N, n_compressed, key.stride(0), key.stride(1), 1 / math.sqrt(K))
        constants = {"SEPARATE": separate, "HAS_SEGMENTS": segments is not None, "BLOCK": BLOCK, "BLOCK_K": K}
        self.options: dict[str, dict[str, Any]] = {
            kernel: {**constants, "num_warps": warps, "num_stages": stages}
            for kernel, (warps, stages) in LAUNCH.items()
        }
        slots = triton.cdiv(n_compressed, BLOCK) + triton.cdiv(N - n_compressed, BLOCK)
        self.over_queries = (triton.cdiv(T, BLOCK), B * H)
        self.over_slots = (slots if separate else triton.cdiv(N, BLOCK), B * H)


@torch.library.custom_op("compressive::attend", mutates_args=())
def attend(
    q_content: Tensor, q_far: Tensor, q_near: Tensor, key: Tensor, value: Tensor, r_far: Tensor, r_near: Tensor,
    valid: Tensor, segments: Tensor | None, n_compressed: int, separate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend: queries with their biases (B, T, H, K), keys and values (B, N, H, K), tables r (N + T, H, K).

    valid (B, C + M) and segments (B, T) as in `relative_attention`. Where positions are not separate, give the near
    ones twice. Returns (B, T, H, K), and the logarithm of each query's sum of weights, (B, H, T).
    """
    B, T, H, _ = q_content.shape
    tiles = _Tiles((q_content, q_far, q_near), key, value, (r_far, r_near), valid, segments, n_compressed, separate)
    out = torch.empty_like(tiles.inputs[0])
    lse = out.new_empty(B, H, T, dtype=torch.float32)
    _forward[tiles.over_queries](*tiles.inputs, out, lse, *tiles.sizes, **tiles.options["forward"])
    return out, lse


@torch.library.custom_op("compressive::attend_backward", mutates_args=())
def _attend_backward(
    q_content: Tensor, q_far: Tensor, q_near: Tensor, key: Tensor, value: Tensor, r_far: Tensor, r_near: Tensor,
    valid: Tensor, segments: Tensor | None, n_compressed: int, separate: bool, out: Tensor, lse: Tensor, d_out: Tensor,
) -> list[Tensor]:  # fmt: skip
    tiles = _Tiles((q_content, q_far, q_near), key, value, (r_far, r_near), valid, segments, n_compressed, separate)
    d_out = d_out.contiguous()
    delta = (d_out.float() * out.float()).sum(dim=-1).transpose(1, 2).contiguous()  # (B, H, T)
    d_queries = [torch.zeros_like(x) if i == 1 else torch.empty_like(x) for i, x in enumerate(tiles.inputs[:3])]
    d_key, d_value = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (key, value))
    d_tables = [torch.zeros_like(x, dtype=torch.float32) for x in tiles.inputs[5:7]]
    _backward_slots[tiles.over_slots](
        *tiles.inputs, lse, delta, d_out, d_key, d_value, lse, *tiles.sizes, USAGE=False, **tiles.options["slots"]
    )
    _backward_queries[tiles.over_queries](
        *tiles.inputs, lse, delta, d_out, *d_queries, *d_tables, *tiles.sizes, **tiles.options["queries"]
    )
    return [*d_queries, d_key, d_value, *(table.to(r_near.dtype) for table in d_tables)]


@torch.library.custom_op("compressive::attention_received", mutates_args=())
def attention_received(
    q_content: Tensor, q_far: Tensor, q_near: Tensor, key: Tensor, value: Tensor, r_far: Tensor, r_near: Tensor,
    valid: Tensor, segments: Tensor | None, n_compressed: int, separate: bool, lse: Tensor,
) -> Tensor:  # fmt: skip
    """The mean over heads and queries of the attention each slot received, (B, N); weights are never stored."""
    B, T, H, _ = q_content.shape
    tiles = _Tiles((q_content, q_far, q_near), key, value, (r_far, r_near), valid, segments, n_compressed, separate)
    received = lse.new_empty(B, H, key.shape[1])
    _backward_slots[tiles.over_slots](
        *tiles.inputs, lse, lse, lse, lse, lse, received, *tiles.sizes, USAGE=True, **tiles.options["slots"]
    )
    return received.mean(dim=1) / T


@attend.register_fake
def _(q_content: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _K = q_content.shape
    out = torch.empty_like(q_content, memory_format=torch.contiguous_format)
    return out, q_content.new_empty(B, H, T, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    q_content: Tensor, q_far: Tensor, q_near: Tensor, key: Tensor, value: Tensor, r_far: Tensor, r_near: Tensor,
    *_: Any,
) -> list[Tensor]:  # fmt: skip
    inputs = (q_content, q_far, q_near, key, value, r_far, r_near)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


@attention_received.register_fake
def _(q_content: Tensor, q_far: Tensor, q_near: Tensor, key: Tensor, *_: Any) -> Tensor:
    return q_content.new_empty(key.shape[0], key.shape[1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, n_compressed, separate = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = n_compressed, separate
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    gradients = _attend_backward(*tensors, *ctx.settings, out, lse, d_out)
    if not ctx.settings[1]:
        gradients[1] = gradients[5] = None  # the near ones have it all
    return (*gradients, None, None, None, None)


attend.register_autograd(_differentiate, setup_context=_keep)
