"""Relative attention as Triton kernels: position scores first, then attention that reads them.

Slot j and query t meet row m = j - t + T-1 of the table r: what a query needs of the table begins one row earlier than
what the query before it needs. A kernel of its own multiplies queries and rows and writes the products where their
slots are (`_score_positions`); attention then reads them as flash attention reads a bias. On the way back the
gradients of scores go to memory as well, and what is left are products of matrices, some of them with tiles that lie
askew. Those are of queries some way apart, so that their rows begin whole words apart: the skew costs nothing.

Memory: one number of 16 bits per query and slot in the forward pass, two backwards, of one layer at a time. Turning
scores in registers instead needs none, and is what these kernels did before; for heads of 128 there are not enough
registers, and it took nearly twice as long (docs/log.md).

Queries come with their biases added. Position scores are rounded to float16, finer than the bf16 of what they are made
from; all sums and the softmax are float32. Where inputs are float32, nothing is rounded.

Most tiles need no mask: those before the diagonal, of lanes that see all of their memory. A loop of their own has them.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

HEAD_WIDTHS = (16, 32, 64, 128)
"""Widths of heads the kernels take: powers of two, as tiles are."""
LOG2_E = math.log2(math.e)
HIDDEN = tl.constexpr(-(2.0**100))
"""The score of what may not be seen. Times a scale it is exact, as a power of two: a product and a difference that the
compiler joins round once, and two equal scores would else differ by an error beyond all exponents."""
GROUP = tl.constexpr(4)
"""Queries so far apart, times the lanes of a tile, are scored together: their rows are shifted by whole words."""
ALIGNED = 128
"""Rows of scores begin at multiples of it: whole tiles, and whole words."""
PROGRAMS = 256
"""As many programs keep a GPU busy."""

Tile = tuple[int, int, int, int]  # queries, slots, warps, loads in flight
TILES: dict[str, dict[int, Tile]] = {  # by width of a head, up to: the fastest of attention-tiles*-h200.json
    "scoring": {64: (64, 64, 4, 4), 128: (64, 64, 4, 4)},
    "forward": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3)},
    "slots": {64: (32, 64, 4, 3), 128: (32, 64, 4, 3)},
    "content": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)},
    "positions": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)},
    "table": {64: (32, 128, 4, 4), 128: (32, 128, 4, 3)},
}


def compiled_for(tiles: dict[int, Tile], K: int, kind: torch.dtype) -> dict[str, Any]:
    """What a kernel is compiled for, with heads of a width and numbers of a type."""
    queries, slots, warps, stages = next(tile for width, tile in tiles.items() if width >= K)
    if kind == torch.float32:
        queries, slots, stages = min(queries, 32), min(slots, 32), 1  # twice the bytes
    return {"BLOCK_Q": queries, "BLOCK_N": slots, "BLOCK_K": K, "num_warps": warps, "num_stages": stages}


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
def _load_numbers(pointer, at, n, other, MASKED: tl.constexpr):
    """Numbers; where tiles need masks some may lie after the end."""
    return tl.load(pointer + at, mask=at < n, other=other) if MASKED else tl.load(pointer + at)


@triton.jit
def _store(pointer, rows, n_rows, stride, values, BLOCK_K: tl.constexpr):
    to = pointer + rows[:, None] * stride + tl.arange(0, BLOCK_K)[None, :]
    tl.store(to, values.to(pointer.dtype.element_ty), mask=(rows < n_rows)[:, None])


@triton.jit
def _visible(valid, segments, lane, queries, slots, T, N, HAS_SEGMENTS: tl.constexpr):
    """Which slots each query of a tile sees."""
    n_memory = N - T
    in_memory = slots < n_memory
    seen = tl.load(valid + lane * n_memory + slots, mask=in_memory, other=0) != 0
    current = slots - n_memory <= queries
    if HAS_SEGMENTS:
        of_query = tl.load(segments + lane * T + queries, mask=queries < T, other=0)
        of_slot = tl.load(segments + lane * T + slots - n_memory, mask=(slots >= n_memory) & (slots < N), other=-1)
        seen = seen & (of_query == 0)
        current = current & (of_query == of_slot)
    return tl.where(in_memory, seen, current) & (slots < N)


@triton.jit
def _queries_of_lanes(place, B, T, H, LANES: tl.constexpr, BLOCK_Q: tl.constexpr):
    """A tile of the same queries of some lanes, GROUP * LANES apart: the first, steps from it, head, and where all lie.

    Slot j and query t meet row j - t + T-1 of the table: a query's row begins one slot further right than that of the
    query before. Queries of one tile meet the same rows, at slots shifted by multiples of GROUP * LANES: whole words,
    and with four lanes whole sectors of memory.
    """
    EACH: tl.constexpr = BLOCK_Q // LANES  # queries of a lane
    APART: tl.constexpr = GROUP * LANES
    part = tl.program_id(0)
    first = part // APART * APART * EACH + part % APART
    head = place // (B // LANES)
    tile = tl.arange(0, BLOCK_Q)
    lanes = (place % (B // LANES) * LANES + tile // EACH).to(tl.int64)
    steps = tile % EACH * APART
    at_queries = (lanes * T + first + steps) * H + head
    at_scores = (head * B + lanes) * T + first + steps
    return first, steps, head, at_queries, at_scores


@triton.jit
def _score_positions(
    query, r, scores, B, H, T, N, L, begin, end, scale,
    LANES: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scaled products of queries with rows of the table, each where its slot is, from `begin` to `end`."""
    first, steps, head, at_queries, at_scores = _queries_of_lanes(tl.program_id(1), B, T, H, LANES, BLOCK_Q)
    there = (first + steps < T)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    q = tl.load(query + at_queries[:, None] * BLOCK_K + columns, mask=there, other=0.0)
    r += head * BLOCK_K
    scores += at_scores[:, None] * L
    leftmost = begin // (GROUP * LANES) * (GROUP * LANES) - GROUP * (BLOCK_Q - LANES)
    for at in range(leftmost, tl.minimum(end, N - T + first + 1), BLOCK_N):
        at = tl.multiple_of(at, GROUP * LANES)
        unshifted = at + tl.arange(0, BLOCK_N)
        # Rows outside of the table meet only queries and slots that do not exist: any will do.
        rows = tl.minimum(tl.maximum(unshifted - first + T - 1, 0), N - 1)
        table = _load_whole(r, rows, H * BLOCK_K, BLOCK_K)
        slots = unshifted[None, :] + steps[:, None]
        product = tl.dot(q, tl.trans(table), input_precision="ieee") * scale
        tl.store(scores + slots, product.to(scores.dtype.element_ty), mask=(slots >= begin) & (slots < end) & there)


@triton.jit
def _forward(
    query, key, value, scores, valid, open_lanes, segments, out, lse,
    B, H, T, N, L, kv_batch, kv_stride, scale,
    HAS_SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend; `scale` is for powers of two, and so is the logarithm of the sum of weights, `lse`."""
    first = tl.program_id(0) * BLOCK_Q
    lane_head = tl.num_programs(1) - 1 - tl.program_id(1)  # those first whose scores were written last
    lane, head = (lane_head % B).to(tl.int64), lane_head // B
    at_queries = (lane * T * H + head) * BLOCK_K
    queries = first + tl.arange(0, BLOCK_Q)
    key += lane * kv_batch + head * BLOCK_K
    value += lane * kv_batch + head * BLOCK_K
    # Queries after the last read its scores.
    scores += (lane_head.to(tl.int64) * T + tl.minimum(queries, T - 1)[:, None]) * L
    q = _load(query + at_queries, queries, T, H * BLOCK_K, BLOCK_K)

    largest = tl.full([BLOCK_Q], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    middle = 0  # up to which tiles need no mask: all these queries see all of their slots
    if tl.load(open_lanes + lane) != 0:
        middle = (N - T + first + 1) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        until = tl.minimum(N, N - T + first + BLOCK_Q) if masked else middle
        for at in range(middle if masked else 0, until, BLOCK_N):
            slots = at + tl.arange(0, BLOCK_N)
            k = _load_slots(key, slots, N, kv_stride, masked, BLOCK_K)
            x = _load_slots(value, slots, N, kv_stride, masked, BLOCK_K)
            position = tl.load(scores + slots[None, :])
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + position.to(tl.float32)
            if masked:
                seen = _visible(valid, segments, lane, queries[:, None], slots[None, :], T, N, HAS_SEGMENTS)
                score = tl.where(seen, score, HIDDEN)
            # A row that has seen nothing yet sums up nonsense, which its first real score shrinks to nothing.
            new_largest = tl.maximum(largest, tl.max(score, 1))
            weights = tl.math.exp2(score - new_largest[:, None])
            shrink = tl.math.exp2(largest - new_largest)
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(x.dtype), x, sums * shrink[:, None], input_precision="ieee")
            largest = new_largest
    _store(out + at_queries, queries, T, H * BLOCK_K, sums / total[:, None], BLOCK_K)
    tl.store(lse + lane_head * T + queries, largest + tl.math.log2(total), mask=queries < T)


@triton.jit
def _output_products(
    out, d_out, delta, B, H, T, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of each output with its gradient."""
    lane_head = tl.program_id(1)
    at_queries = ((lane_head % B).to(tl.int64) * T * H + lane_head // B) * BLOCK_K
    queries = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o = _load(out + at_queries, queries, T, H * BLOCK_K, BLOCK_K).to(tl.float32)
    do = _load(d_out + at_queries, queries, T, H * BLOCK_K, BLOCK_K).to(tl.float32)
    tl.store(delta + lane_head * T + queries, tl.sum(o * do, 1), mask=queries < T)


@triton.jit
def _backward_slots(
    query, key_value, scores, valid, open_lanes, segments, lse, delta, d_out,
    d_key_value, d_scores, usage, B, H, T, N, scale,
    HAS_SEGMENTS: tl.constexpr, USAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, and of scores; or, with USAGE, only how much attention each slot received.

    Gradients of scores are without the factor 1/sqrt(K), which comes in at the end. What there is per lane and per head
    is given as tensor descriptors: tiles are copied by the device's own unit for that, and there is zero after the end.
    """
    lane_head = tl.num_programs(1) - 1 - tl.program_id(1)  # those first whose scores were written last
    lane, head = lane_head % B, lane_head // B
    start = tl.program_id(0) * BLOCK_N
    slots = start + tl.arange(0, BLOCK_N)
    k = key_value.load([lane, start, head * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
    x = key_value.load([lane, start, (H + head) * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
    dk = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    received = tl.zeros([BLOCK_N], tl.float32)
    earliest = tl.maximum(start - (N - T), 0) // BLOCK_Q * BLOCK_Q  # no query before it sees these slots
    end = tl.cdiv(T, BLOCK_Q) * BLOCK_Q
    middle = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - 1 - (N - T), 0), BLOCK_Q) * BLOCK_Q, end)
    there = (tl.load(valid + lane * (N - T) + slots, mask=slots < N - T, other=1) != 0) & (slots < N)
    if (tl.min(there.to(tl.int32), 0) == 0) | (end > T):
        middle = end
    if HAS_SEGMENTS:  # noqa: SIM102  # a compiler's `if`, then one of the kernel's
        if tl.load(open_lanes + lane) == 0:
            middle = end
    for masked in tl.static_range(1, -1, -1):  # from `middle` on every query is there and sees all of these slots
        for first in range(earliest if masked else middle, middle if masked else T, BLOCK_Q):
            queries = first + tl.arange(0, BLOCK_Q)
            q = query.load([lane, first, head * BLOCK_K]).reshape(BLOCK_Q, BLOCK_K)
            norm = _load_numbers(lse + lane_head * T, queries, T, float("inf"), masked)
            # Slots by queries here, so that weights are where the products below want them.
            position = tl.trans(scores.load([lane_head, first, start]).reshape(BLOCK_Q, BLOCK_N))
            score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale + position.to(tl.float32)
            if masked:
                seen = _visible(valid, segments, lane, queries[None, :], slots[:, None], T, N, HAS_SEGMENTS)
                score = tl.where(seen, score, HIDDEN)
            weights = tl.math.exp2(score - norm[None, :])
            if USAGE:
                received += tl.sum(weights, 1)
            else:
                do = d_out.load([lane, first, head * BLOCK_K]).reshape(BLOCK_Q, BLOCK_K)
                mean = _load_numbers(delta + lane_head * T, queries, T, 0.0, masked)
                dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
                ds = (weights * (tl.dot(x, tl.trans(do), input_precision="ieee") - mean[None, :])).to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee")
                d_scores.store([lane_head, first, start], tl.trans(ds).reshape(1, BLOCK_Q, BLOCK_N))
    if USAGE:
        tl.store(usage + lane_head * N + slots, received, mask=slots < N)
    else:
        dk = (dk * (scale * 0.6931471805599453)).to(d_key_value.dtype)
        d_key_value.store([lane, start, head * BLOCK_K], dk.reshape(1, BLOCK_N, BLOCK_K))
        d_key_value.store([lane, start, (H + head) * BLOCK_K], dv.to(d_key_value.dtype).reshape(1, BLOCK_N, BLOCK_K))


@triton.jit
def _backward_content(
    d_scores, key, d_query, d_bias, B, H, T, N, L, kv_batch, kv_stride, factor,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of queries by content: gradients of scores times keys; the bias has their sum."""
    first = tl.program_id(0) * BLOCK_Q
    lane_head = tl.program_id(1)
    lane, head = (lane_head % B).to(tl.int64), lane_head // B
    queries = first + tl.arange(0, BLOCK_Q)
    d_scores += (lane_head.to(tl.int64) * T + tl.minimum(queries, T - 1)[:, None]) * L
    key += lane * kv_batch + head * BLOCK_K
    given = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    middle = (N - T + first + 1) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        until = tl.minimum(N, N - T + first + BLOCK_Q) if masked else middle
        for at in range(middle if masked else 0, until, BLOCK_N):
            slots = at + tl.arange(0, BLOCK_N)
            ds = tl.load(d_scores + slots[None, :])
            if masked:
                ds = tl.where(slots[None, :] - (N - T) <= queries[:, None], ds, 0.0)
            given = tl.dot(ds, _load_slots(key, slots, N, kv_stride, masked, BLOCK_K), given, input_precision="ieee")
    given *= factor
    _store(d_query + (lane * T * H + head) * BLOCK_K, queries, T, H * BLOCK_K, given, BLOCK_K)
    of_bias = tl.sum(tl.where((queries < T)[:, None], given, 0.0), 0)
    tl.atomic_add(d_bias + head * BLOCK_K + tl.arange(0, BLOCK_K), of_bias, sem="relaxed")


@triton.jit
def _backward_positions(
    d_scores, r, d_query, d_bias, B, H, T, N, L, begin, end, factor,
    LANES: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of queries by position, added to those there are: gradients of scores times rows of the table."""
    # Last lanes and heads first: the kernel before this one has just read their gradients.
    place = tl.num_programs(1) - 1 - tl.program_id(1)
    first, steps, head, at_queries, at_scores = _queries_of_lanes(place, B, T, H, LANES, BLOCK_Q)
    there = (first + steps < T)[:, None]
    r += head * BLOCK_K
    d_scores += at_scores[:, None] * L
    given = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    leftmost = begin // (GROUP * LANES) * (GROUP * LANES) - GROUP * (BLOCK_Q - LANES)
    until = tl.minimum(end, N - T + first + 1)
    middle = leftmost + tl.maximum(until - leftmost, 0) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        for at in range(middle if masked else leftmost, until if masked else middle, BLOCK_N):
            at = tl.multiple_of(at, GROUP * LANES)
            unshifted = at + tl.arange(0, BLOCK_N)
            slots = unshifted[None, :] + steps[:, None]
            ds = tl.load(d_scores + slots, mask=(slots >= begin) & (slots < end) & there, other=0.0)
            if masked:
                ds = tl.where((unshifted <= N - T + first)[None, :], ds, 0.0)
            rows = tl.minimum(tl.maximum(unshifted - first + T - 1, 0), N - 1)
            given = tl.dot(ds, _load_whole(r, rows, H * BLOCK_K, BLOCK_K), given, input_precision="ieee")
    given *= factor
    to = d_query + at_queries[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(to, (given + tl.load(to, mask=there, other=0.0)).to(d_query.dtype.element_ty), mask=there)
    of_bias = tl.sum(given, 0)  # zeros where no query is
    tl.atomic_add(d_bias + head * BLOCK_K + tl.arange(0, BLOCK_K), of_bias, sem="relaxed")


@triton.jit
def _backward_table(
    d_scores, query, d_r, B, H, T, N, L, begin, end, lanes, factor,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of rows of the table: gradients of scores times queries, of so many `lanes` a program.

    A program has every GROUP-th query; so its rows begin where their slots begin a word, and all GROUP of them add up.
    """
    offset = tl.program_id(0) % GROUP
    head = tl.program_id(1)
    row = tl.program_id(0) // GROUP * BLOCK_N + T % GROUP - 1 - offset
    rows = row + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_Q) * GROUP
    query += head * BLOCK_K
    given = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    # Queries before this one meet no slot at these rows.
    earliest = tl.maximum(T - row - BLOCK_N, 0) // (GROUP * BLOCK_Q) * GROUP * BLOCK_Q + offset
    each = tl.cdiv(tl.maximum(T - earliest, 0), GROUP * BLOCK_Q)
    whole = (row - (T - 1) + earliest >= begin) & (row + BLOCK_N <= end) & (T % (GROUP * BLOCK_Q) == 0)
    lane = (tl.program_id(2) * lanes).to(tl.int64)
    first = earliest
    for masked in tl.static_range(2):
        count = tl.minimum(lanes, B - tl.program_id(2) * lanes) * each
        for _ in range(0 if whole == masked else count):
            queries = first + steps
            start = tl.multiple_of(row - (T - 1) + first, GROUP)
            slots = start + steps[:, None] + tl.arange(0, BLOCK_N)[None, :]
            to_scores = d_scores + (head * B + lane) * T * L + queries[:, None] * L + slots
            if masked:
                there = (slots >= begin) & (slots < end) & (queries < T)[:, None]
                ds = tl.load(to_scores, mask=there, other=0.0)
                q = _load(query + lane * T * H * BLOCK_K, queries, T, H * BLOCK_K, BLOCK_K)
            else:
                ds = tl.load(to_scores)
                q = _load_whole(query + lane * T * H * BLOCK_K, queries, H * BLOCK_K, BLOCK_K)
            given = tl.dot(tl.trans(ds), q, given, input_precision="ieee")
            first += GROUP * BLOCK_Q
            lane += tl.where(first < T, 0, 1)
            first = tl.where(first < T, first, earliest)
    to = d_r + (rows[:, None] * H + head) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.atomic_add(to, given * factor, mask=((rows >= 0) & (rows < N))[:, None], sem="relaxed")


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
    with_usage: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from a window to all slots, without dropout.

    q (B, H, T, K): queries. kv (B, N, 2, H, K): keys and values of all slots. r (H, D', K): position codes of the
    distances N-1 downwards; at least N rows, rows after the first N are not read. u, v (H, K): biases.
    valid (B, C + M), bool: which memory slots may be seen. segments (B, T): document ids, None if no document
    starts in the window.
    r_far (H, D', K), v_far (H, K): for the n_compressed oldest slots where they have a scheme of their own.

    Returns (B, H, T, K), and with `with_usage` the mean over heads and queries of the attention each slot received,
    (B, N), else None.
    """
    separate = r_far is not None
    if r_far is None or v_far is None:
        r_far, v_far = r, v
    query = q.transpose(1, 2)  # (B, T, H, K), as the projection lies in memory
    # Sums are here for the compiler to fuse; their gradients go straight to queries and biases.
    sums = [(query + bias).detach().to(query.dtype) for bias in ((u, v, v_far) if separate else (u, v))]
    tables = (x.transpose(0, 1).to(query.dtype) for x in (r, r_far))
    inputs = (sums[0], sums[1], sums[-1], kv, *tables)
    open_lanes = valid.all(dim=1)
    if segments is not None:
        open_lanes = open_lanes & (segments[:, -1] == 0)
    settings = (valid, open_lanes, segments, n_compressed, separate)
    out, lse = attend(query, torch.stack((u, v, v_far)), *inputs, *settings)
    usage = attention_received(*(x.detach() for x in inputs), *settings, lse) if with_usage else None
    return out.transpose(1, 2), usage


def _aligned(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Matrices to be copied by tiles."""
    return TensorDescriptor.from_tensor(x, [1, rows, columns])


class _Tiles:
    """What the kernels are called with."""

    def __init__(
        self, content: Tensor, near: Tensor, far: Tensor, key_value: Tensor, r_near: Tensor, r_far: Tensor,
        valid: Tensor, open_lanes: Tensor, segments: Tensor | None, n_compressed: int, separate: bool,
    ) -> None:  # fmt: skip
        B, N, _, H, K = key_value.shape
        self.B, self.H, self.K, self.N, self.C, self.T = B, H, K, N, n_compressed, N - valid.shape[1]
        self.lanes = next(lanes for lanes in (4, 2, 1) if B % lanes == 0)  # in tiles of queries that are apart
        self.separate = separate
        self.length = _aligned(N)
        self.queries = content.contiguous()
        self.near, self.far, self.r_near, self.r_far = (x.contiguous() for x in (near, far, r_near, r_far))
        self.key_value = key_value.contiguous()
        self.slots = (self.key_value, self.key_value[:, :, 1])
        self.strides = self.key_value.stride()[:2]
        ids = valid if segments is None else segments.to(torch.int32).contiguous()
        self.masks = (valid.contiguous(), open_lanes, ids)
        self.has_segments = segments is not None
        self.kind = key_value.dtype
        self.scale = 1 / math.sqrt(K)

    def options(self, kernel: str) -> dict[str, Any]:
        """What a kernel is compiled for."""
        return compiled_for(TILES[kernel], self.K, self.kind)

    def grid(self, n: int, block: int) -> tuple[int, int]:
        """One program per block of n, per head and lane."""
        return triton.cdiv(n, block), self.H * self.B

    def groups(self, block: int) -> tuple[int, int]:
        """One program per tile of the same queries of some lanes, and head."""
        span = GROUP.value * block
        return GROUP.value * self.lanes * triton.cdiv(self.T, span), self.H * self.B // self.lanes

    def parts(self) -> list[tuple[Tensor, Tensor, int, int]]:
        """Queries and tables for positions, with the slots they are for, from where to where."""
        if not self.separate:
            return [(self.near, self.r_near, 0, self.length)]
        return [(self.near, self.r_near, self.C, self.length), (self.far, self.r_far, 0, self.C)]

    def positions(self) -> Tensor:
        """Position scores by slot, (H, B, T, N and some more)."""
        kind = torch.float32 if self.kind == torch.float32 else torch.float16
        scores = self.queries.new_empty(self.H, self.B, self.T, self.length, dtype=kind)
        options = self.options("scoring")
        for queries, r, begin, end in self.parts():
            _score_positions[self.groups(options["BLOCK_Q"])](
                queries, r, scores, self.B, self.H, self.T, self.N, self.length, begin, end,
                self.scale * LOG2_E, LANES=self.lanes, **options,
            )  # fmt: skip
        return scores

    def by_slots(self, lse: Tensor, gradients: tuple[Tensor, ...] | None = None, usage: Tensor | None = None) -> None:
        """Write what comes back to slots: gradients, given d_out and delta, or attention received."""
        options = self.options("slots")
        queries, slots = options["BLOCK_Q"], options["BLOCK_N"]
        d_out, delta, d_key_value, d_scores = gradients or (self.queries, lse, self.key_value, None)
        scores = _described(self.positions().flatten(0, 1), queries, slots)
        _backward_slots[self.grid(self.N, slots)](
            _described(self.queries.flatten(2), queries, self.K),
            _described(self.key_value.flatten(2), slots, self.K),
            scores, *self.masks, lse, delta, _described(d_out.flatten(2), queries, self.K),
            _described(d_key_value.flatten(2), slots, self.K),
            scores if d_scores is None else _described(d_scores.flatten(0, 1), queries, slots), usage,
            self.B, self.H, self.T, self.N, self.scale * LOG2_E,
            HAS_SEGMENTS=self.has_segments, USAGE=usage is not None, **options,
        )  # fmt: skip


@torch.library.custom_op("compressive::attend", mutates_args=())
def attend(
    query: Tensor, biases: Tensor,
    content: Tensor, near: Tensor, far: Tensor, key_value: Tensor, r_near: Tensor, r_far: Tensor,
    valid: Tensor, open_lanes: Tensor, segments: Tensor | None, n_compressed: int, separate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend: queries with each bias (B, T, H, K), keys and values (B, N, 2, H, K), tables r (N or more, H, K).

    Queries (B, T, H, K) and biases (3, H, K) themselves are there to be given gradients, their sums have none.
    valid (B, C + M) and segments (B, T) as in `relative_attention`; open_lanes (B,): lanes whose every query sees all
    of its memory, and in which no document starts: they take fewer masks. Where positions are not separate, give the
    near ones twice. Returns (B, T, H, K), and the logarithm to base 2 of each query's sum of weights, (H, B, T).
    """
    tiles = _Tiles(content, near, far, key_value, r_near, r_far, valid, open_lanes, segments, n_compressed, separate)
    out = torch.empty_like(tiles.queries)
    lse = content.new_empty(tiles.H, tiles.B, tiles.T, dtype=torch.float32)
    options = tiles.options("forward")
    _forward[tiles.grid(tiles.T, options["BLOCK_Q"])](
        tiles.queries, *tiles.slots, tiles.positions(), *tiles.masks, out, lse,
        tiles.B, tiles.H, tiles.T, tiles.N, tiles.length, *tiles.strides, tiles.scale * LOG2_E,
        HAS_SEGMENTS=tiles.has_segments, **options,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("compressive::attend_backward", mutates_args=())
def _attend_backward(
    content: Tensor, near: Tensor, far: Tensor, key_value: Tensor, r_near: Tensor, r_far: Tensor,
    valid: Tensor, open_lanes: Tensor, segments: Tensor | None, n_compressed: int, separate: bool,
    out: Tensor, lse: Tensor, d_out: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of queries, of biases, of keys and values, and of tables, the far ones only if they are others."""
    tiles = _Tiles(content, near, far, key_value, r_near, r_far, valid, open_lanes, segments, n_compressed, separate)
    sizes = B, H, T, N, _ = tiles.B, tiles.H, tiles.T, tiles.N, tiles.length
    d_out, delta = d_out.contiguous(), torch.empty_like(lse)
    options = tiles.options("content")
    _output_products[tiles.grid(T, options["BLOCK_Q"])](out, d_out, delta, B, H, T, **options)

    d_key_value = torch.empty_like(tiles.key_value)
    d_scores = content.new_empty(H, B, T, tiles.length)
    tiles.by_slots(lse, gradients=(d_out, delta, d_key_value, d_scores))
    d_query, d_biases = torch.empty_like(tiles.queries), lse.new_zeros(3, H, tiles.K)
    options = tiles.options("content")
    _backward_content[tiles.grid(T, options["BLOCK_Q"])](
        d_scores, tiles.key_value, d_query, d_biases, *sizes, *tiles.strides, tiles.scale, **options
    )
    d_tables = []
    for (queries, r, begin, end), d_bias in zip(tiles.parts(), d_biases[1:], strict=False):
        options = tiles.options("positions")
        _backward_positions[tiles.groups(options["BLOCK_Q"])](
            d_scores, r, d_query, d_bias, *sizes, begin, end, tiles.scale, LANES=tiles.lanes, **options
        )
        d_r = lse.new_zeros(r.shape)
        options = tiles.options("table")
        rows = GROUP.value * triton.cdiv(N + GROUP.value, options["BLOCK_N"])
        lanes = triton.cdiv(B * rows * H, max(PROGRAMS, rows * H))  # fewer where rows and heads are few
        grid = rows, H, triton.cdiv(B, lanes)
        _backward_table[grid](d_scores, queries, d_r, *sizes, begin, end, lanes, tiles.scale, **options)
        d_tables.append(d_r.to(r.dtype))
    return [d_query, d_biases, d_key_value, *d_tables]


@torch.library.custom_op("compressive::attention_received", mutates_args=())
def attention_received(
    content: Tensor, near: Tensor, far: Tensor, key_value: Tensor, r_near: Tensor, r_far: Tensor,
    valid: Tensor, open_lanes: Tensor, segments: Tensor | None, n_compressed: int, separate: bool, lse: Tensor,
) -> Tensor:  # fmt: skip
    """The mean over heads and queries of the attention each slot received, (B, N)."""
    tiles = _Tiles(content, near, far, key_value, r_near, r_far, valid, open_lanes, segments, n_compressed, separate)
    received = lse.new_empty(tiles.H, tiles.B, tiles.N)
    tiles.by_slots(lse, usage=received)
    return received.mean(dim=0) / tiles.T


@attend.register_fake
def _(query: Tensor, biases: Tensor, content: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _K = content.shape
    return torch.empty_like(content).contiguous(), content.new_empty(H, B, T, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    content: Tensor, near: Tensor, far: Tensor, key_value: Tensor, r_near: Tensor, r_far: Tensor,
    valid: Tensor, open_lanes: Tensor, segments: Tensor | None, n_compressed: int, separate: bool, *_: Tensor,
) -> list[Tensor]:  # fmt: skip
    d_biases = content.new_empty(3, *content.shape[2:], dtype=torch.float32)
    like = [key_value, r_near, r_far] if separate else [key_value, r_near]
    return [content.new_empty(content.shape), d_biases, *(x.new_empty(x.shape) for x in like)]


@attention_received.register_fake
def _(content: Tensor, near: Tensor, far: Tensor, key_value: Tensor, *_: Any) -> Tensor:
    return key_value.new_empty(*key_value.shape[:2], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _query, _biases, *tensors, n_compressed, separate = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = n_compressed, separate
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    d_query, d_biases, d_key_value, *d_tables = _attend_backward(*inputs, *ctx.settings, out, lse, d_out)
    # Of tables that are the same, the near ones have all the gradient.
    d_near, d_far = d_tables if ctx.settings[1] else (*d_tables, None)
    return d_query, d_biases, None, None, None, d_key_value, d_near, d_far, *[None] * 5


attend.register_autograd(_differentiate, setup_context=_keep)
