"""The kernels that read position scores, fetching them ahead: contenders of those in `fused.py`.

The compiler fetches ahead what products are made of, and leaves out what they are added to: position scores are waited
for in every turn of the loop. Here they are added to a product that has been scaled already, which it cannot take for
the same thing. Then they are on the way to the product with values, and are fetched ahead as all else is.
"""

import triton
import triton.language as tl

from compressive.model.fused import HIDDEN, _load, _load_slots, _store, _visible


@triton.jit
def _forward(
    query, key, value, scores, valid, open_lanes, segments, out, lse,
    B, H, T, N, L, kv_batch, kv_stride, scale,
    HAS_SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend; `scale` is for powers of two, and so is the logarithm of the sum of weights, `lse`."""
    first = tl.program_id(0) * BLOCK_Q
    lane_head = tl.program_id(1)
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
    middle = 0  # up to which tiles need no mask
    if tl.load(open_lanes + lane) != 0:
        middle = (N - T) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        until = tl.minimum(N, N - T + first + BLOCK_Q) if masked else middle
        for at in range(middle if masked else 0, until, BLOCK_N):
            slots = at + tl.arange(0, BLOCK_N)
            k = _load_slots(key, slots, N, kv_stride, masked, BLOCK_K)
            x = _load_slots(value, slots, N, kv_stride, masked, BLOCK_K)
            position = tl.load(scores + slots[None, :])
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + position.to(tl.float32) * scale
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
def _backward_slots(
    query, key, value, scores, valid, open_lanes, segments, lse, delta, d_out,
    d_key, d_value, d_scores, usage,
    B, H, T, N, L, kv_batch, kv_stride, scale,
    HAS_SEGMENTS: tl.constexpr, USAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, and of scores; or, with USAGE, only how much attention each slot received.

    Gradients of scores are without the factor 1/sqrt(K), which comes in at the end.
    """
    lane_head = tl.program_id(1)
    lane, head = (lane_head % B).to(tl.int64), lane_head // B
    at_queries = (lane * T * H + head) * BLOCK_K
    scores += lane_head.to(tl.int64) * T * L
    d_scores += lane_head.to(tl.int64) * T * L
    start = tl.program_id(0) * BLOCK_N
    slots = start + tl.arange(0, BLOCK_N)
    k = _load(key + lane * kv_batch + head * BLOCK_K, slots, N, kv_stride, BLOCK_K)
    x = _load(value + lane * kv_batch + head * BLOCK_K, slots, N, kv_stride, BLOCK_K)
    dk = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    received = tl.zeros([BLOCK_N], tl.float32)
    earliest = tl.maximum(start - (N - T), 0) // BLOCK_Q * BLOCK_Q  # no query before it sees these slots
    end = tl.cdiv(T, BLOCK_Q) * BLOCK_Q
    middle = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - 1 - (N - T), 0), BLOCK_Q) * BLOCK_Q, end)
    there = (tl.load(valid + lane * (N - T) + slots, mask=slots < N - T, other=1) != 0) & (slots < N)
    if tl.min(there.to(tl.int32), 0) == 0:
        middle = end
    if HAS_SEGMENTS:  # noqa: SIM102  # a compiler's `if`, then one of the kernel's
        if tl.load(open_lanes + lane) == 0:
            middle = end
    for masked in tl.static_range(1, -1, -1):  # from `middle` on every query sees all of these slots
        for first in range(earliest if masked else middle, middle if masked else T, BLOCK_Q):
            queries = first + tl.arange(0, BLOCK_Q)
            q = _load(query + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
            norm = tl.load(lse + lane_head * T + queries, mask=queries < T, other=float("inf"))
            # Slots by queries here, so that weights are where the products below want them.
            position = tl.load(scores + tl.minimum(queries, T - 1)[None, :] * L + slots[:, None])
            score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale + position.to(tl.float32) * scale
            if masked:
                seen = _visible(valid, segments, lane, queries[None, :], slots[:, None], T, N, HAS_SEGMENTS)
                score = tl.where(seen, score, HIDDEN)
            weights = tl.math.exp2(score - norm[None, :])
            if USAGE:
                received += tl.sum(weights, 1)
            else:
                do = _load(d_out + at_queries, queries, T, H * BLOCK_K, BLOCK_K)
                mean = tl.load(delta + lane_head * T + queries, mask=queries < T, other=0.0)
                dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
                ds = (weights * (tl.dot(x, tl.trans(do), input_precision="ieee") - mean[None, :])).to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee")
                tl.store(d_scores + queries[None, :] * L + slots[:, None], ds, mask=(queries < T)[None, :])
    if USAGE:
        tl.store(usage + lane_head * N + slots, received, mask=slots < N)
    else:
        at_slots = (lane * N * 2 * H + head) * BLOCK_K
        _store(d_key + at_slots, slots, N, 2 * H * BLOCK_K, dk * (scale * 0.6931471805599453), BLOCK_K)
        _store(d_value + at_slots, slots, N, 2 * H * BLOCK_K, dv, BLOCK_K)
