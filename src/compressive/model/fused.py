"""Relative attention as Triton kernels: the scores of a tile live in registers, and nowhere else.

Forward, and two kernels backward, each a loop over tiles of BLOCK queries by BLOCK slots, as in flash attention. New is
the position term. Slot j and query t meet row m = j - t + T-1 of the table r, so a tile needs a band of 2·BLOCK - 1
rows. Those are two blocks of rows, of which the second is the first of the next tile: one product per tile gives both.
Within the band every query's row begins one column further left than that of the query before; as

    column of r, within its block of the band = (slot - query - 1) mod BLOCK,

this is a rotation of each row, after taking each element from the first block or the second: `_to_slots`, and `_turn`
the other way for gradients.

A rotation costs shuffles, so it is done on words of two 16-bit numbers. Columns c and c + BLOCK/2 share a word:
rotating words, and swapping the halves of some, rotates the whole. So that a word's halves are neighbours wherever
matrices are, slots and rows are taken in that order everywhere, 0, 32, 1, 33, ...: `_order`. Position scores are
rounded to float16 for it, finer than the bf16 of what they are made from; all sums and the softmax are float32. Where
inputs are float32, nothing is packed or rounded.

Some tiles need no mask: those in memory, of lanes that see all of it. They come first, in a loop of their own.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressive.model.attention import Biases, Positions, Projected

BLOCK = 64
LOG2_E = math.log2(math.e)
HIDDEN = tl.constexpr(-(2.0**100))
"""The score of what may not be seen. Times a scale it is exact, as a power of two: a product and a difference that the
compiler joins round once, and two equal scores would else differ by an error beyond all exponents."""


def _stages(head_width: int, dtype: torch.dtype) -> dict[str, int]:
    """How many loads of each kernel are in flight: what shared memory holds for two programs side by side."""
    if dtype == torch.float32:
        return {"forward": 1, "queries": 1, "slots": 1}
    return {"forward": 3, "queries": 2, "slots": 2} if head_width <= 64 else {"forward": 3, "queries": 1, "slots": 1}


@triton.jit
def _order(BLOCK: tl.constexpr):
    """Columns that share a word side by side: 0, BLOCK/2, 1, BLOCK/2 + 1, ..."""
    i = tl.arange(0, BLOCK)
    return (i >> 1) + (i & 1) * (BLOCK // 2)


# What comes after a `return` in an `if` would be compiled too: each of these has one way out.


@triton.jit
def _pack(x, KIND: tl.constexpr):
    """Neighbouring columns as one word of two 16-bit numbers; float32 stays as it is."""
    if tl.float32 == KIND:
        words = x
    else:
        bits = x.to(KIND).to(tl.uint16, bitcast=True).to(tl.uint32)
        first, second = tl.split(tl.reshape(bits, (bits.shape[0], bits.shape[1] // 2, 2)))
        words = first | (second << 16)
    return words


@triton.jit
def _unpack(words, KIND: tl.constexpr):
    if tl.float32 == KIND:
        x = words
    else:
        first = (words & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True)
        second = (words >> 16).to(tl.uint16).to(KIND, bitcast=True)
        x = tl.reshape(tl.join(first, second), (words.shape[0], words.shape[1] * 2))
    return x


@triton.jit
def _turn(x, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Give column c of query t what was in column (c + SIGN·(t + 1)) mod BLOCK."""
    if x.dtype == tl.float32:
        source = (_order(BLOCK)[None, :] + SIGN * (tl.arange(0, BLOCK)[:, None] + 1)) & (BLOCK - 1)
        turned = tl.gather(x, source % (BLOCK // 2) * 2 + source // (BLOCK // 2), 1)
    else:
        # A warp holds 16 neighbouring queries of a product, but every fourth of a gather: in this order of queries no
        # word has to leave its warp.
        row = tl.arange(0, BLOCK)[:, None]
        query = (row % (BLOCK // 16)) * 16 + row // (BLOCK // 16)
        source = tl.arange(0, BLOCK // 2)[None, :] + SIGN * (query + 1)
        x = tl.reshape(tl.permute(tl.reshape(x, (BLOCK // 16, 16, BLOCK // 2)), (1, 0, 2)), (BLOCK, BLOCK // 2))
        x = tl.gather(x, source & (BLOCK // 2 - 1), 1)
        x = tl.where((source & (BLOCK // 2)) != 0, (x >> 16) | (x << 16), x)
        turned = tl.reshape(tl.permute(tl.reshape(x, (16, BLOCK // 16, BLOCK // 2)), (1, 0, 2)), (BLOCK, BLOCK // 2))
    return turned


@triton.jit
def _from_both(low, high, BLOCK: tl.constexpr):
    """Columns from BLOCK - 1 - query on of the first, those before of the second."""
    query = tl.arange(0, BLOCK)[:, None]
    if low.dtype == tl.float32:
        both = tl.where(_order(BLOCK)[None, :] >= BLOCK - 1 - query, low, high)
    else:
        column = tl.arange(0, BLOCK // 2)[None, :]
        first = tl.where(column >= BLOCK - 1 - query, 0x0000FFFF, 0).to(tl.uint32)
        second = tl.where(column + BLOCK // 2 >= BLOCK - 1 - query, 0xFFFF0000, 0).to(tl.uint32)
        both = (low & (first | second)) | (high & ~(first | second))
    return both


@triton.jit
def _by_row(q, r):
    """Position scores by row of a block of the band, packed."""
    return _pack(tl.dot(q, tl.trans(r), input_precision="ieee"), tl.float32 if q.dtype == tl.float32 else tl.float16)


@triton.jit
def _to_slots(low, high, BLOCK: tl.constexpr):
    """Position scores by row, of both blocks of the band, to those by slot."""
    turned = _turn(_from_both(low, high, BLOCK), -1, BLOCK)
    return _unpack(turned, tl.float32 if low.dtype == tl.float32 else tl.float16).to(tl.float32)


@triton.jit
def _load(pointer, rows, n_rows, stride, BLOCK_K: tl.constexpr):
    """Rows of a matrix, zeros after its end."""
    columns = tl.arange(0, BLOCK_K)
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=(rows < n_rows)[:, None], other=0.0)


@triton.jit
def _load_whole(pointer, rows, stride, BLOCK_K: tl.constexpr):
    """Rows of a matrix that are all there."""
    return tl.load(pointer + rows[:, None] * stride + tl.arange(0, BLOCK_K)[None, :])


@triton.jit
def _load_slots(pointer, slots, N, stride, MASKED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Keys or values; where tiles need masks the last may reach beyond the last slot."""
    return _load(pointer, slots, N, stride, BLOCK_K) if MASKED else _load_whole(pointer, slots, stride, BLOCK_K)


@triton.jit
def _load_table(pointer, rows, n_rows, stride, BLOCK_K: tl.constexpr):
    """Rows of r. Those outside of it meet only queries and slots that do not exist: any number will do."""
    return _load_whole(pointer, tl.minimum(tl.maximum(rows, 0), n_rows - 1), stride, BLOCK_K)


@triton.jit
def _store(pointer, rows, n_rows, stride, values, BLOCK_K: tl.constexpr):
    to = pointer + rows[:, None] * stride + tl.arange(0, BLOCK_K)[None, :]
    tl.store(to, values.to(pointer.dtype.element_ty), mask=(rows < n_rows)[:, None])


@triton.jit
def _add(pointer, rows, n_rows, stride, values, BLOCK_K: tl.constexpr):
    """Add to rows of a table. Those outside of it stand for queries and slots that do not exist, and add zeros."""
    rows = tl.minimum(tl.maximum(rows, 0), n_rows - 1)
    tl.atomic_add(pointer + rows[:, None] * stride + tl.arange(0, BLOCK_K)[None, :], values, sem="relaxed")


@triton.jit
def _visible(valid, segments, lane, queries, slots, T, N, end, HAS_SEGMENTS: tl.constexpr):
    """Which slots, up to `end`, each query of a tile sees."""
    n_memory = N - T
    in_memory = slots < n_memory
    seen = tl.load(valid + lane * n_memory + slots, mask=in_memory, other=0) != 0
    current = slots - n_memory <= queries
    if HAS_SEGMENTS:
        of_query = tl.load(segments + lane * T + queries, mask=queries < T, other=0)
        of_slot = tl.load(segments + lane * T + slots - n_memory, mask=(slots >= n_memory) & (slots < N), other=-1)
        seen = seen & (of_query == 0)
        current = current & (of_query == of_slot)
    return tl.where(in_memory, seen, current) & (slots < end)


@triton.jit
def _open_until(open_lanes, lane, begin, end, BLOCK: tl.constexpr):
    """Where the tiles from `begin` on end that need no mask."""
    until = begin
    if tl.load(open_lanes + lane) != 0:
        until = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    return until


@triton.jit
def _forward(
    query, u, v_far, v_near, key, value, r_far, r_near, valid, open_lanes, segments,
    out, lse, q_content, q_far, q_near,
    H, T, N, C, kv_batch, kv_stride, scale,
    SEPARATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend; `scale` is for powers of two, and so is the logarithm of the sum of weights, `lse`.

    For the way back also come queries with their biases.
    """
    first = tl.program_id(0) * BLOCK
    lane_head = tl.program_id(1)
    lane, head = (lane_head // H).to(tl.int64), lane_head % H
    at_queries = (lane * T * H + head) * BLOCK_K
    queries, order, columns = first + tl.arange(0, BLOCK), _order(BLOCK), tl.arange(0, BLOCK_K)
    key += lane * kv_batch + head * BLOCK_K
    value += lane * kv_batch + head * BLOCK_K
    q = _load(query + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
    qc = (q + tl.load(u + head * BLOCK_K + columns)[None, :]).to(q.dtype)
    _store(q_content + at_queries, queries, T, H * BLOCK_K, qc, BLOCK_K)

    largest = tl.full([BLOCK], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for part in tl.static_range(0, 2 if SEPARATE else 1):
        # Compressed slots first, with a table of their own, where positions are separate; else all slots at once.
        far = SEPARATE and part == 0
        begin = 0 if part == 0 else C
        end = C if far else tl.minimum(N, N - T + first + BLOCK)
        r = (r_far if far else r_near) + head * BLOCK_K
        v = (v_far if far else v_near) + head * BLOCK_K
        qp = (q + tl.load(v + columns)[None, :]).to(q.dtype)
        _store((q_far if far else q_near) + at_queries, queries, T, H * BLOCK_K, qp, BLOCK_K)
        low = _by_row(qp, _load_table(r, begin - first - BLOCK + T + order, N + T, H * BLOCK_K, BLOCK_K))
        middle = _open_until(open_lanes, lane, begin, tl.minimum(end, N - T), BLOCK)
        for masked in tl.static_range(2):
            for at in range(middle if masked else begin, end if masked else middle, BLOCK):
                slots = at + order
                high = _by_row(qp, _load_table(r, slots - first + T, N + T, H * BLOCK_K, BLOCK_K))
                k = _load_slots(key, slots, N, kv_stride, masked, BLOCK_K)
                x = _load_slots(value, slots, N, kv_stride, masked, BLOCK_K)
                scores = tl.dot(qc, tl.trans(k), _to_slots(low, high, BLOCK), input_precision="ieee")
                if masked:
                    seen = _visible(valid, segments, lane, queries[:, None], slots[None, :], T, N, end, HAS_SEGMENTS)
                    scores = tl.where(seen, scores, HIDDEN)
                # A row that has seen nothing yet sums up nonsense, which its first real score shrinks to nothing.
                new_largest = tl.maximum(largest, tl.max(scores, 1))
                weights = tl.math.exp2(scores * scale - (new_largest * scale)[:, None])
                shrink = tl.math.exp2((largest - new_largest) * scale)
                total = total * shrink + tl.sum(weights, 1)
                sums = tl.dot(weights.to(x.dtype), x, sums * shrink[:, None], input_precision="ieee")
                largest = new_largest
                low = high
    _store(out + at_queries, queries, T, H * BLOCK_K, sums / total[:, None], BLOCK_K)
    tl.store(lse + lane_head * T + queries, largest * scale + tl.math.log2(total), mask=queries < T)


@triton.jit
def _backward_queries(
    q_content, q_far, q_near, key, value, r_far, r_near, valid, open_lanes, segments, out, lse, d_out,
    delta, d_query, d_biases, d_r_far, d_r_near,
    H, T, N, C, kv_batch, kv_stride, scale,
    SEPARATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and of the tables, to which all lanes and queries add.

    Gradients of scores are without the factor 1/sqrt(K), which comes in at the end. On the way comes `delta`, the
    products of outputs and their gradients, for the other kernel.
    """
    first = tl.program_id(0) * BLOCK
    lane_head = tl.program_id(1)
    lane, head = (lane_head // H).to(tl.int64), lane_head % H
    at_queries = (lane * T * H + head) * BLOCK_K
    queries, order, columns = first + tl.arange(0, BLOCK), _order(BLOCK), tl.arange(0, BLOCK_K)
    key += lane * kv_batch + head * BLOCK_K
    value += lane * kv_batch + head * BLOCK_K
    qc = _load(q_content + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
    do = _load(d_out + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
    o = _load(out + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
    mean = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + lane_head * T + queries, mean, mask=queries < T)
    norm = tl.load(lse + lane_head * T + queries, mask=queries < T, other=float("inf"))

    dq = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for part in tl.static_range(0, 2 if SEPARATE else 1):
        far = SEPARATE and part == 0
        begin = 0 if part == 0 else C
        end = C if far else tl.minimum(N, N - T + first + BLOCK)
        r = (r_far if far else r_near) + head * BLOCK_K
        qp = _load((q_far if far else q_near) + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
        d_r = (d_r_far if far else d_r_near) + head * BLOCK_K
        low = _by_row(qp, _load_table(r, begin - first - BLOCK + T + order, N + T, H * BLOCK_K, BLOCK_K))
        before = _pack(tl.zeros([BLOCK, BLOCK], tl.float32), qc.dtype)  # gradients by row, of the tile before
        middle = _open_until(open_lanes, lane, begin, tl.minimum(end, N - T), BLOCK)
        for masked in tl.static_range(2):
            for at in range(middle if masked else begin, end if masked else middle, BLOCK):
                slots = at + order
                rows = slots - first + T
                high = _by_row(qp, _load_table(r, rows, N + T, H * BLOCK_K, BLOCK_K))
                k = _load_slots(key, slots, N, kv_stride, masked, BLOCK_K)
                x = _load_slots(value, slots, N, kv_stride, masked, BLOCK_K)
                scores = tl.dot(qc, tl.trans(k), _to_slots(low, high, BLOCK), input_precision="ieee")
                if masked:
                    seen = _visible(valid, segments, lane, queries[:, None], slots[None, :], T, N, end, HAS_SEGMENTS)
                    scores = tl.where(seen, scores, HIDDEN)
                weights = tl.math.exp2(scores * scale - norm[:, None])
                ds = weights * (tl.dot(do, tl.trans(x), input_precision="ieee") - mean[:, None])
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
                turned = _turn(_pack(ds, k.dtype), 1, BLOCK)
                by_row = _unpack(_from_both(turned, before, BLOCK), k.dtype)
                dq = tl.dot(
                    by_row, _load_table(r, rows - BLOCK, N + T, H * BLOCK_K, BLOCK_K), dq, input_precision="ieee"
                )
                given = tl.dot(tl.trans(by_row), qp, input_precision="ieee")
                _add(d_r, rows - BLOCK, N + T, H * BLOCK_K, given, BLOCK_K)
                before = turned
                low = high
        # The second block of the last tile's band has no tile after it.
        last = tl.maximum(tl.cdiv(end - begin, BLOCK), 0) * BLOCK
        by_row = _unpack(_from_both(_pack(tl.zeros([BLOCK, BLOCK], tl.float32), qc.dtype), before, BLOCK), qc.dtype)
        rows = begin + last - first - BLOCK + T + order
        dq = tl.dot(by_row, _load_table(r, rows, N + T, H * BLOCK_K, BLOCK_K), dq, input_precision="ieee")
        given = tl.dot(tl.trans(by_row), qp, input_precision="ieee")
        _add(d_r, rows, N + T, H * BLOCK_K, given, BLOCK_K)
        # The sum over these queries, of this part and of those before it.
        tl.atomic_add(d_biases + ((2 + part) * H + head) * BLOCK_K + columns, tl.sum(dq, 0), sem="relaxed")
    _store(d_query + at_queries, queries, T, H * BLOCK_K, dq * (scale * 0.6931471805599453), BLOCK_K)


@triton.jit
def _backward_slots(
    q_content, q_far, q_near, key, value, r_far, r_near, valid, open_lanes, segments, lse, delta, d_out,
    d_key, d_value, d_biases, usage,
    H, T, N, C, kv_batch, kv_stride, scale,
    SEPARATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, USAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, and of u; or, with USAGE, only how much attention each slot received."""
    lane_head = tl.program_id(1)
    lane, head = (lane_head // H).to(tl.int64), lane_head % H
    at_queries = (lane * T * H + head) * BLOCK_K
    n_far = tl.cdiv(C, BLOCK) if SEPARATE else 0
    number = tl.program_id(0)
    far = number < n_far
    start = number * BLOCK if far else (number - n_far) * BLOCK + (C if SEPARATE else 0)
    end = C if far else N
    slots, columns = start + _order(BLOCK), tl.arange(0, BLOCK_K)
    k = _load(key + lane * kv_batch + head * BLOCK_K, slots, end, kv_stride, BLOCK_K)
    x = _load(value + lane * kv_batch + head * BLOCK_K, slots, end, kv_stride, BLOCK_K)
    q_position = (q_far if far else q_near) + at_queries
    r = (r_far if far else r_near) + head * BLOCK_K
    dk = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    received = tl.zeros([BLOCK], tl.float32)
    earliest = tl.maximum(start - (N - T), 0) // BLOCK * BLOCK  # no query before it sees these slots
    middle = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK - 1 - (N - T), 0), BLOCK), tl.cdiv(T, BLOCK)) * BLOCK
    there = (tl.load(valid + lane * (N - T) + slots, mask=slots < N - T, other=1) != 0) & (slots < end)
    if tl.min(there.to(tl.int32), 0) == 0:
        middle = tl.cdiv(T, BLOCK) * BLOCK
    if HAS_SEGMENTS:  # noqa: SIM102  # a compiler's `if`, then one of the kernel's
        if tl.load(open_lanes + lane) == 0:
            middle = tl.cdiv(T, BLOCK) * BLOCK
    for masked in tl.static_range(1, -1, -1):  # from `middle` on every query sees all of these slots
        for first in range(earliest if masked else middle, middle if masked else T, BLOCK):
            queries = first + tl.arange(0, BLOCK)
            qp = _load(q_position, queries, T, H * BLOCK_K, BLOCK_K)
            rows = slots - first + T
            low = _by_row(qp, _load_table(r, rows - BLOCK, N + T, H * BLOCK_K, BLOCK_K))
            high = _by_row(qp, _load_table(r, rows, N + T, H * BLOCK_K, BLOCK_K))
            # Slots by queries here, so that weights are where the products below want them.
            qc = _load(q_content + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
            norm = tl.load(lse + lane_head * T + queries, mask=queries < T, other=float("inf"))
            scores = tl.dot(k, tl.trans(qc), tl.trans(_to_slots(low, high, BLOCK)), input_precision="ieee")
            if masked:
                seen = _visible(valid, segments, lane, queries[None, :], slots[:, None], T, N, end, HAS_SEGMENTS)
                scores = tl.where(seen, scores, HIDDEN)
            weights = tl.math.exp2(scores * scale - norm[None, :])
            if USAGE:
                received += tl.sum(weights, 1)
            else:
                do = _load(d_out + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
                mean = tl.load(delta + lane_head * T + queries, mask=queries < T, other=0.0)
                dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
                ds = weights * (tl.dot(x, tl.trans(do), input_precision="ieee") - mean[None, :])
                received += tl.sum(ds, 1)
                dk = tl.dot(ds.to(qc.dtype), qc, dk, input_precision="ieee")
    if USAGE:
        tl.store(usage + lane_head * N + slots, received, mask=slots < end)
    else:
        at_slots = (lane * N * 2 * H + head) * BLOCK_K
        _store(d_key + at_slots, slots, end, 2 * H * BLOCK_K, dk * (scale * 0.6931471805599453), BLOCK_K)
        _store(d_value + at_slots, slots, end, 2 * H * BLOCK_K, dv, BLOCK_K)
        # u is added to all queries alike, so it gets each key times the sum of that slot's gradients.
        to = d_biases + ((0 if far else 1) * H + head) * BLOCK_K + columns
        tl.atomic_add(to, tl.sum(received[:, None] * k.to(tl.float32), 0), sem="relaxed")


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
    query = projected.query.transpose(1, 2)  # (B, T, H, K), as the projection lies in memory
    if query.device.type != "cuda" and isinstance(_forward, triton.JITFunction):
        raise ValueError(f"attention='fused' on {query.device}: expected a GPU; use auto, or readable")
    far, near = (x.transpose(0, 1) for x in (positions.far, positions.near))
    separate = positions.far is not positions.near
    inputs = (query, projected.key_value, *biases, near.to(query.dtype), far.to(query.dtype))
    open_lanes = memory_valid.all(dim=1)
    if segment_ids is not None:
        open_lanes = open_lanes & (segment_ids[:, -1] == 0)
    settings = (memory_valid, open_lanes, segment_ids, n_compressed, separate)
    out, lse, queries = attend(*inputs, *settings)
    usage = None
    if with_usage:
        slots = (x.detach() for x in (inputs[1], *inputs[-2:]))
        usage = attention_received(*slots, *settings, lse, queries)
    return out.transpose(1, 2), usage


class _Tiles:
    """What the kernels are called with."""

    def __init__(
        self, key_value: Tensor, r_near: Tensor, r_far: Tensor, valid: Tensor, open_lanes: Tensor,
        segments: Tensor | None, n_compressed: int, separate: bool,
    ) -> None:  # fmt: skip
        B, N, _, H, K = key_value.shape
        T = N - valid.shape[1]
        key_value = key_value.contiguous()
        self.slots = (key_value, key_value[:, :, 1], r_far.contiguous(), r_near.contiguous())
        ids = valid if segments is None else segments.to(torch.int32).contiguous()
        self.masks = (valid.contiguous(), open_lanes, ids)
        self.scale = 1 / math.sqrt(K)
        self.sizes = (H, T, N, n_compressed, key_value.stride(0), key_value.stride(1))
        self.constants = {"SEPARATE": separate, "HAS_SEGMENTS": segments is not None, "BLOCK": BLOCK, "BLOCK_K": K}
        self.stages = _stages(K, key_value.dtype)
        self.n_blocks = triton.cdiv(T, BLOCK)
        n_far = n_compressed if separate else 0
        self.n_slots = triton.cdiv(n_far, BLOCK) + triton.cdiv(N - n_far, BLOCK)
        self.lanes_heads = B * H

    def options(self, kernel: str) -> dict[str, Any]:
        """What a kernel is compiled for."""
        return {**self.constants, "num_warps": 4, "num_stages": self.stages[kernel]}


@torch.library.custom_op("compressive::attend", mutates_args=())
def attend(
    query: Tensor, key_value: Tensor, u: Tensor, v_near: Tensor, v_far: Tensor, r_near: Tensor, r_far: Tensor,
    valid: Tensor, open_lanes: Tensor, segments: Tensor | None, n_compressed: int, separate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attend: queries (B, T, H, K), keys and values (B, N, 2, H, K), biases (H, K), tables r (N + T, H, K).

    valid (B, C + M) and segments (B, T) as in `relative_attention`; open_lanes (B,): lanes whose every query sees all
    of its memory, and in which no document starts: they take fewer masks. Where positions are not separate, give the
    near ones twice. Returns (B, T, H, K), and what the way back needs: the logarithm to base 2 of each query's sum of
    weights, (B, H, T), and queries with their biases, content, near and, where it differs, far, (2 or 3, B, T, H, K).
    """
    B, T, H, _ = query.shape
    tiles = _Tiles(key_value, r_near, r_far, valid, open_lanes, segments, n_compressed, separate)
    out = query.new_empty(query.shape)
    queries = query.new_empty(3 if separate else 2, *query.shape)
    lse = query.new_empty(B, H, T, dtype=torch.float32)
    _forward[(tiles.n_blocks, tiles.lanes_heads)](
        query.contiguous(), *(x.float().contiguous() for x in (u, v_far, v_near)), *tiles.slots, *tiles.masks,
        out, lse, queries[0], queries[-1], queries[1],
        *tiles.sizes, tiles.scale * LOG2_E, **tiles.options("forward"),
    )  # fmt: skip
    return out, lse, queries


@torch.library.custom_op("compressive::attend_backward", mutates_args=())
def _attend_backward(
    key_value: Tensor, r_near: Tensor, r_far: Tensor, valid: Tensor, open_lanes: Tensor, segments: Tensor | None,
    n_compressed: int, separate: bool, out: Tensor, lse: Tensor, queries: Tensor, d_out: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, u, v near and far, r near and far; without the far ones if the same."""
    tiles = _Tiles(key_value, r_near, r_far, valid, open_lanes, segments, n_compressed, separate)
    H, K = out.shape[2:]
    d_out, delta, d_query = d_out.contiguous(), torch.empty_like(lse), torch.empty_like(out)
    d_key_value = key_value.new_empty(key_value.shape)
    # Of u by compressed slots and by the others, of queries by compressed slots and by all: what is not u's is v's.
    d_biases = lse.new_zeros(4, H, K)
    d_tables = lse.new_zeros(2 if separate else 1, *r_near.shape)  # near, far
    _backward_queries[(tiles.n_blocks, tiles.lanes_heads)](
        queries[0], queries[-1], queries[1], *tiles.slots, *tiles.masks, out, lse, d_out,
        delta, d_query, d_biases, d_tables[-1], d_tables,
        *tiles.sizes, tiles.scale * LOG2_E, **tiles.options("queries"),
    )  # fmt: skip
    _backward_slots[(tiles.n_slots, tiles.lanes_heads)](
        queries[0], queries[-1], queries[1], *tiles.slots, *tiles.masks, lse, delta, d_out,
        d_key_value, d_key_value[:, :, 1], d_biases, lse,
        *tiles.sizes, tiles.scale * LOG2_E, USAGE=False, **tiles.options("slots"),
    )  # fmt: skip
    u_far, u_near, q_first, q_all = d_biases * tiles.scale
    d_u = u_far + u_near
    d_v = [q_all - q_first - u_near, q_first - u_far] if separate else [q_first - u_near]
    d_r = [torch.mul(d, tiles.scale, out=r_near.new_empty(r_near.shape)) for d in d_tables]
    return [d_query, d_key_value, d_u, *d_v, *d_r]


@torch.library.custom_op("compressive::attention_received", mutates_args=())
def attention_received(
    key_value: Tensor, r_near: Tensor, r_far: Tensor, valid: Tensor, open_lanes: Tensor, segments: Tensor | None,
    n_compressed: int, separate: bool, lse: Tensor, queries: Tensor,
) -> Tensor:  # fmt: skip
    """The mean over heads and queries of the attention each slot received, (B, N); weights are never stored."""
    tiles = _Tiles(key_value, r_near, r_far, valid, open_lanes, segments, n_compressed, separate)
    B, H, T = lse.shape
    received = lse.new_empty(B, H, key_value.shape[1])
    _backward_slots[(tiles.n_slots, tiles.lanes_heads)](
        queries[0], queries[-1], queries[1], *tiles.slots, *tiles.masks, lse, lse, lse, lse, lse, lse, received,
        *tiles.sizes, tiles.scale * LOG2_E, USAGE=True, **tiles.options("slots"),
    )  # fmt: skip
    return received.mean(dim=1) / T


@attend.register_fake
def _(
    query: Tensor, key_value: Tensor, u: Tensor, v_near: Tensor, v_far: Tensor, r_near: Tensor, r_far: Tensor,
    valid: Tensor, open_lanes: Tensor, segments: Tensor | None, n_compressed: int, separate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H, _ = query.shape
    out, queries = query.new_empty(query.shape), query.new_empty(3 if separate else 2, *query.shape)
    return out, query.new_empty(B, H, T, dtype=torch.float32), queries


@_attend_backward.register_fake
def _(
    key_value: Tensor, r_near: Tensor, r_far: Tensor, valid: Tensor, open_lanes: Tensor, segments: Tensor | None,
    n_compressed: int, separate: bool, out: Tensor, lse: Tensor, *_: Tensor,
) -> list[Tensor]:  # fmt: skip
    n, bias = 2 if separate else 1, lse.new_empty(out.shape[2:])
    tables = [r_near.new_empty(r_near.shape) for _ in range(n)]
    new = [x.new_empty(x.shape) for x in (out, key_value)]
    return [*new, *(torch.empty_like(bias) for _ in range(1 + n)), *tables]


@attention_received.register_fake
def _(key_value: Tensor, *_: Any) -> Tensor:
    return key_value.new_empty(*key_value.shape[:2], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, key_value, u, _, _, r_near, r_far, *masks, n_compressed, separate = inputs
    ctx.save_for_backward(key_value, r_near, r_far, *masks, *output)
    ctx.settings = n_compressed, separate
    ctx.kind = u.dtype
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, lse, queries = ctx.saved_tensors
    d_query, d_key_value, d_u, *others = _attend_backward(*inputs, *ctx.settings, out, lse, queries, d_out)
    # Of tables that are the same, the near ones have all the gradient.
    d_v_near, d_v_far, d_r_near, d_r_far = others if ctx.settings[1] else (others[0], None, others[1], None)
    d_u, d_v_near, d_v_far = (None if d is None else d.to(ctx.kind) for d in (d_u, d_v_near, d_v_far))
    return d_query, d_key_value, d_u, d_v_near, d_v_far, d_r_near, d_r_far, *[None] * 5


attend.register_autograd(_differentiate, setup_context=_keep)
