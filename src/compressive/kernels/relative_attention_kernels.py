"""Device code of relative attention: the `@triton.jit` functions that `relative_attention` launches.

The formula, the picture of the relative shift, the memory layouts and the plan are in `relative_attention`.

    helpers     load_rows, load_vector, store_rows, visible_mask, philox, dropout_mask, strided_query_tile
    forward     position_scores_kernel, forward_kernel
    backward    delta_kernel, backward_kv_kernel, backward_q_content_kernel, backward_q_position_kernel,
                backward_r_kernel

Sizes, in every kernel: B batch rows, H heads, T queries, N slots (memory, then the window), L the row length of
`scores` and `ds` (N, rounded up). BLOCK_Q, BLOCK_N and BLOCK_K are the tile sizes over queries, slots and the head
width; BLOCK_K is the whole head width. `bh` = head * B + batch indexes everything of shape (H, B, ...).

Most kernels have two loops over tiles, written once under `for masked in tl.static_range(2)`. One covers the tiles in
which every query sees every slot and every load is in bounds, without masks; the other covers the rest, with masks.
Masking only the tiles that need it brought the forward kernel from 204 to 181 µs at the paper's size (docs/log.md).
"""

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
"""Scores are scaled by it, so that exp(x) is exp2(x * LOG2_E): exp2 is what the hardware has."""
LN_2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-(2.0**100))
"""The score of a slot that is masked. A power of two, so that HIDDEN times a scale is exact.

The compiler contracts a product and a subtraction into one FMA, which rounds once. With an inexact product two equal
hidden scores would differ by a rounding error, which at this magnitude makes exp2 overflow or vanish.
"""
QUERY_STEP = tl.constexpr(4)
"""Distance between the queries of a tile that reads or writes the relative-shifted layout (times BLOCK_B, see
`strided_query_tile`). Neighbouring tile rows are then shifted by a multiple of 4 elements, a whole 8-byte word."""
PHILOX_ROUNDS = tl.constexpr(7)
"""The fewest rounds with which Philox-4x32 passes all tests of its authors (Salmon et al. 2011)."""


# --- Helpers --------------------------------------------------------------------------------------


@triton.jit
def load_rows(ptr, offs, n_rows, stride_row, MASKED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the rows `offs` of a matrix with BLOCK_K columns. MASKED: rows from n_rows on are zeros, else all exist."""
    if MASKED:
        offs_k = tl.arange(0, BLOCK_K)
        tile = tl.load(ptr + offs[:, None] * stride_row + offs_k[None, :], mask=(offs < n_rows)[:, None], other=0.0)
    else:
        tile = tl.load(ptr + offs[:, None] * stride_row + tl.arange(0, BLOCK_K)[None, :])
    return tile


@triton.jit
def load_vector(ptr, offs, n, other, MASKED: tl.constexpr):
    """Load the elements `offs` of a vector. MASKED: elements from n on are `other`, else all exist."""
    return tl.load(ptr + offs, mask=offs < n, other=other) if MASKED else tl.load(ptr + offs)


@triton.jit
def store_rows(ptr, offs, n_rows, stride_row, tile, BLOCK_K: tl.constexpr):
    """Store a tile as the rows `offs` of a matrix, those before n_rows, in the matrix's type."""
    ptrs = ptr + offs[:, None] * stride_row + tl.arange(0, BLOCK_K)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=(offs < n_rows)[:, None])


@triton.jit
def visible_mask(valid_ptr, segments_ptr, batch, offs_q, offs_n, T, N, HAS_SEGMENTS: tl.constexpr):
    """Which slots each query sees. offs_q and offs_n broadcast against each other, in either orientation.

    A memory slot is visible if it is valid and no document has started in the window up to the query. A slot of the
    window is visible from itself onwards, within its own document.
    """
    n_memory = N - T
    in_memory = offs_n < n_memory
    memory_mask = tl.load(valid_ptr + batch * n_memory + offs_n, mask=in_memory, other=0) != 0
    window_mask = offs_n - n_memory <= offs_q
    if HAS_SEGMENTS:
        segment_q = tl.load(segments_ptr + batch * T + offs_q, mask=offs_q < T, other=0)
        in_window = (offs_n >= n_memory) & (offs_n < N)
        segment_n = tl.load(segments_ptr + batch * T + offs_n - n_memory, mask=in_window, other=-1)
        memory_mask = memory_mask & (segment_q == 0)
        window_mask = window_mask & (segment_q == segment_n)
    return tl.where(in_memory, memory_mask, window_mask) & (offs_n < N)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """`tl.philox` of 32-bit counters. Products are whole, not in halves: fewer instructions and registers."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32)
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def dropout_mask(seed, bh, t, n, rows_q, rows_n, threshold):
    """Which attention weights of a tile dropout keeps: those of the queries t + rows_q and the slots n + rows_n.

    t and n are multiples of 16. rows_q and rows_n broadcast against each other, in either orientation. A weight is kept
    if its 32 random bits, as a signed integer, are at least `threshold`. They depend on the seed, bh, the query and the
    slot alone, so that every kernel finds the same mask, whatever its tiles. Philox gives four numbers at a time: they
    are for two queries and two slots, each 8 apart. In the layout of a product's result one thread has all four, in
    either orientation, and the compiler merges their computation into one.
    """
    group_q = (t // 2 + rows_q // 16 * 8 + rows_q % 8).to(tl.uint32)
    group_n = (n // 2 + rows_n // 16 * 8 + rows_n % 8).to(tl.uint32)
    r00, r01, r10, r11 = philox(seed, group_q, group_n, bh.to(tl.uint32), group_q * 0)
    second_q, second_n = rows_q % 16 >= 8, rows_n % 16 >= 8
    bits = tl.where(second_q, tl.where(second_n, r11, r10), tl.where(second_n, r01, r00))
    return bits.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def strided_query_tile(pid_bh, B, T, H, BLOCK_B: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The queries of a tile that reads or writes the relative-shifted layout.

    The tile has the same BLOCK_Q // BLOCK_B queries of each of BLOCK_B batch rows. They are QUERY_STEP * BLOCK_B apart:

        tile row    batch row    query
        0           b            t0
        1           b            t0 + STEP
        2           b            t0 + 2 STEP
        ...
        BLOCK_Q-1   b+BLOCK_B-1  t0 + (BLOCK_Q/BLOCK_B - 1) STEP        STEP = QUERY_STEP * BLOCK_B

    All of them are multiplied with the same rows of r. The products of a query t belong at slots that are shifted
    right by t - t0 (see the picture in `relative_attention`). With BLOCK_B = 4 shifts are multiples of 32 bytes, a
    whole sector of memory: 61 in place of 82 µs for the position scores at base size (docs/log.md).

    Returns the first query t0, the offset of each tile row's query from it, the head, and for each tile row its row in
    (B, T, H, K) and its row in (H, B, T, L).
    """
    QUERIES: tl.constexpr = BLOCK_Q // BLOCK_B  # per batch row
    STEP: tl.constexpr = QUERY_STEP * BLOCK_B
    pid_q = tl.program_id(0)
    t0 = pid_q // STEP * STEP * QUERIES + pid_q % STEP
    head = pid_bh // (B // BLOCK_B)
    tile_row = tl.arange(0, BLOCK_Q)
    batch = (pid_bh % (B // BLOCK_B) * BLOCK_B + tile_row // QUERIES).to(tl.int64)
    steps = tile_row % QUERIES * STEP
    q_rows = (batch * T + t0 + steps) * H + head
    score_rows = (head * B + batch) * T + t0 + steps
    return t0, steps, head, q_rows, score_rows


# --- Forward --------------------------------------------------------------------------------------


@triton.jit
def position_scores_kernel(
    q_ptr, r_ptr, scores_ptr, B, H, T, N, L, slot_begin, slot_end, scale,
    BLOCK_B: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write position scores, q·r * scale, relative-shifted: scores[head, batch, t, j] = q[t] · r[j - t + T-1] * scale.

    Reads q (B, T, H, K), with its bias v added, and r (N, H, K). Writes the slots slot_begin <= j < slot_end of scores
    (H, B, T, L). Tiles of future slots only are left unwritten.
    Grid: (strided query tiles, H * B / BLOCK_B).
    """
    t0, steps, head, q_rows, score_rows = strided_query_tile(tl.program_id(1), B, T, H, BLOCK_B, BLOCK_Q)
    mask_q = (t0 + steps < T)[:, None]
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] * BLOCK_K + offs_k, mask=mask_q, other=0.0)
    r_ptr += head * BLOCK_K
    scores_ptr += score_rows[:, None] * L
    # The first tile starts so far left that the last tile row, shifted by the most, still covers slot_begin.
    n_start = slot_begin // (QUERY_STEP * BLOCK_B) * (QUERY_STEP * BLOCK_B) - QUERY_STEP * (BLOCK_Q - BLOCK_B)
    for n in range(n_start, tl.minimum(slot_end, N - T + t0 + 1), BLOCK_N):
        n = tl.multiple_of(n, QUERY_STEP * BLOCK_B)
        offs_n0 = n + tl.arange(0, BLOCK_N)  # slots of tile row 0
        # Rows outside of r belong to slots that do not exist or are in the future: never read, so any row will do.
        offs_r = tl.minimum(tl.maximum(offs_n0 - t0 + T - 1, 0), N - 1)
        r = load_rows(r_ptr, offs_r, N, H * BLOCK_K, False, BLOCK_K)
        offs_n = offs_n0[None, :] + steps[:, None]
        s = tl.dot(q, tl.trans(r), input_precision="ieee") * scale
        mask = (offs_n >= slot_begin) & (offs_n < slot_end) & mask_q
        tl.store(scores_ptr + offs_n, s.to(scores_ptr.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, scores_ptr, valid_ptr, fully_visible_ptr, segments_ptr, out_ptr, lse_ptr,
    seed_ptr, threshold, keep_scale, B, H, T, N, L, stride_kv_b, stride_kv_n, scale,
    HAS_SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Flash attention with the position scores as an additive bias.

    Reads q (B, T, H, K), with its bias u added, k and v, position scores (H, B, T, L) and the masks. Writes out
    (B, T, H, K) and lse (H, B, T), the log2 of each query's sum of exponentials. `scale` includes LOG2_E.
    Dropout, unless seed_ptr is None: weights of `dropout_mask` only, times keep_scale, 1 / (1 - rate).
    Grid: (T / BLOCK_Q, H * B).
    """
    t0 = tl.program_id(0) * BLOCK_Q
    bh = tl.num_programs(1) - 1 - tl.program_id(1)  # last written scores first: they may still be in the cache
    batch, head = (bh % B).to(tl.int64), bh // B
    q_offset = (batch * T * H + head) * BLOCK_K
    offs_q = t0 + tl.arange(0, BLOCK_Q)
    k_ptr += batch * stride_kv_b + head * BLOCK_K
    v_ptr += batch * stride_kv_b + head * BLOCK_K
    # Queries after the last read the scores of the last, so that the load needs no mask.
    scores_ptr += (bh.to(tl.int64) * T + tl.minimum(offs_q, T - 1)[:, None]) * L
    q = load_rows(q_ptr + q_offset, offs_q, T, H * BLOCK_K, True, BLOCK_K)

    m_i = tl.full([BLOCK_Q], HIDDEN, tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    n_masked = 0  # the first slot whose tile needs a mask
    if tl.load(fully_visible_ptr + batch) != 0:
        n_masked = (N - T + t0 + 1) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        n_end = tl.minimum(N, N - T + t0 + BLOCK_Q) if masked else n_masked
        for n in range(n_masked if masked else 0, n_end, BLOCK_N):
            offs_n = n + tl.arange(0, BLOCK_N)
            k = load_rows(k_ptr, offs_n, N, stride_kv_n, masked, BLOCK_K)
            v = load_rows(v_ptr, offs_n, N, stride_kv_n, masked, BLOCK_K)
            position = tl.load(scores_ptr + offs_n[None, :])
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + position.to(tl.float32)
            if masked:
                mask = visible_mask(
                    valid_ptr, segments_ptr, batch, offs_q[:, None], offs_n[None, :], T, N, HAS_SEGMENTS
                )
                s = tl.where(mask, s, HIDDEN)
            # A query that has seen no slot yet has p = 1 everywhere; its first visible score makes alpha 0.
            m_new = tl.maximum(m_i, tl.max(s, 1))
            p = tl.math.exp2(s - m_new[:, None])
            alpha = tl.math.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, 1)
            if seed_ptr is not None:
                rows_q, rows_n = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_N)[None, :]
                p *= tl.where(dropout_mask(seed, bh, t0, n, rows_q, rows_n, threshold), keep_scale, 0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
            m_i = m_new
    store_rows(out_ptr + q_offset, offs_q, T, H * BLOCK_K, acc / l_i[:, None], BLOCK_K)
    tl.store(lse_ptr + bh * T + offs_q, m_i + tl.math.log2(l_i), mask=offs_q < T)


# --- Backward -------------------------------------------------------------------------------------


@triton.jit
def delta_kernel(
    out_ptr, do_ptr, delta_ptr, B, H, T, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write delta (H, B, T), the inner product of each output row with its gradient; both (B, T, H, K).

    Grid: (T / BLOCK_Q, H * B).
    """
    bh = tl.program_id(1)
    q_offset = ((bh % B).to(tl.int64) * T * H + bh // B) * BLOCK_K
    offs_q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    out = load_rows(out_ptr + q_offset, offs_q, T, H * BLOCK_K, True, BLOCK_K).to(tl.float32)
    do = load_rows(do_ptr + q_offset, offs_q, T, H * BLOCK_K, True, BLOCK_K).to(tl.float32)
    tl.store(delta_ptr + bh * T + offs_q, tl.sum(out * do, 1), mask=offs_q < T)


@triton.jit
def backward_kv_kernel(
    q_desc, kv_desc, scores_desc, valid_ptr, fully_visible_ptr, segments_ptr, lse_ptr, delta_ptr, do_desc,
    dkv_desc, ds_desc, usage_ptr, seed_ptr, threshold, keep_scale, B, H, T, N, scale,
    HAS_SEGMENTS: tl.constexpr, USAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, values and scores; or, with USAGE, only the attention that each slot received.

    Reads q, kv, position scores, masks, lse, and for gradients delta and do. Writes dkv (B, N, 2, H, K) and ds
    (H, B, T, L), the gradient of the scores before their factor 1/sqrt(K), which the kernels that read ds apply at the
    end. With USAGE it writes the sum over queries of p, before dropout, usage (H, B, N). Dropout is that of
    `forward_kernel`; delta needs no mask, as the output that it was computed from had one.
    Grid: (N / BLOCK_N, H * B).

    Tiles are transposed, slots by queries, so that p and ds are where the products for dv and dk need them. Operands
    with a tile per batch row and head are tensor descriptors: the TMA unit copies the tiles and fills in zeros out of
    bounds, 346 in place of 390 µs at the paper's size (docs/log.md).
    """
    bh = tl.num_programs(1) - 1 - tl.program_id(1)  # last written scores first: they may still be in the cache
    batch, head = bh % B, bh // B
    n = tl.program_id(0) * BLOCK_N
    offs_n = n + tl.arange(0, BLOCK_N)
    k = kv_desc.load([batch, n, head * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
    v = kv_desc.load([batch, n, (H + head) * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
    dk = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    usage = tl.zeros([BLOCK_N], tl.float32)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    # Queries before t_begin see none of these slots. From t_full on every query exists and sees all of them.
    t_begin = tl.maximum(n - (N - T), 0) // BLOCK_Q * BLOCK_Q
    t_end = tl.cdiv(T, BLOCK_Q) * BLOCK_Q
    t_full = tl.minimum(tl.cdiv(tl.maximum(n + BLOCK_N - 1 - (N - T), 0), BLOCK_Q) * BLOCK_Q, t_end)
    mask_n = (tl.load(valid_ptr + batch * (N - T) + offs_n, mask=offs_n < N - T, other=1) != 0) & (offs_n < N)
    if (tl.min(mask_n.to(tl.int32), 0) == 0) | (t_end > T):
        t_full = t_end
    if HAS_SEGMENTS:  # noqa: SIM102  # the outer `if` is resolved at compile time, the inner one at run time
        if tl.load(fully_visible_ptr + batch) == 0:
            t_full = t_end
    for masked in tl.static_range(1, -1, -1):
        for t in range(t_begin if masked else t_full, t_full if masked else T, BLOCK_Q):
            offs_q = t + tl.arange(0, BLOCK_Q)
            q = q_desc.load([batch, t, head * BLOCK_K]).reshape(BLOCK_Q, BLOCK_K)
            lse = load_vector(lse_ptr + bh * T, offs_q, T, float("inf"), masked)
            position = tl.trans(scores_desc.load([bh, t, n]).reshape(BLOCK_Q, BLOCK_N))
            s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale + position.to(tl.float32)
            if masked:
                mask = visible_mask(
                    valid_ptr, segments_ptr, batch, offs_q[None, :], offs_n[:, None], T, N, HAS_SEGMENTS
                )
                s = tl.where(mask, s, HIDDEN)
            p = tl.math.exp2(s - lse[None, :])
            if USAGE:
                usage += tl.sum(p, 1)
            else:
                do = do_desc.load([batch, t, head * BLOCK_K]).reshape(BLOCK_Q, BLOCK_K)
                delta = load_vector(delta_ptr + bh * T, offs_q, T, 0.0, masked)
                if seed_ptr is not None:
                    rows_q, rows_n = tl.arange(0, BLOCK_Q)[None, :], tl.arange(0, BLOCK_N)[:, None]
                    kept = tl.where(dropout_mask(seed, bh, t, n, rows_q, rows_n, threshold), keep_scale, 0.0)
                    dv = tl.dot((p * kept).to(do.dtype), do, dv, input_precision="ieee")
                    dp = tl.dot(v, tl.trans(do), input_precision="ieee") * kept
                    ds = (p * (dp - delta[None, :])).to(q.dtype)
                else:
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
                    ds = (p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])).to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee")
                ds_desc.store([bh, t, n], tl.trans(ds).reshape(1, BLOCK_Q, BLOCK_N))
    if USAGE:
        tl.store(usage_ptr + bh * N + offs_n, usage, mask=offs_n < N)
    else:
        dk = (dk * (scale * LN_2)).to(dkv_desc.dtype)  # scale * ln 2 is 1/sqrt(K)
        dkv_desc.store([batch, n, head * BLOCK_K], dk.reshape(1, BLOCK_N, BLOCK_K))
        dkv_desc.store([batch, n, (H + head) * BLOCK_K], dv.to(dkv_desc.dtype).reshape(1, BLOCK_N, BLOCK_K))


@triton.jit
def backward_q_content_kernel(
    ds_ptr, k_ptr, dq_ptr, du_ptr, B, H, T, N, L, stride_kv_b, stride_kv_n, factor,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The part of dq that comes through the content scores, ds · k * factor, and du, its sum over queries.

    Reads ds (H, B, T, L) and k. Writes dq (B, T, H, K) and adds to du (H, K). Grid: (T / BLOCK_Q, H * B).
    """
    t0 = tl.program_id(0) * BLOCK_Q
    bh = tl.program_id(1)
    batch, head = (bh % B).to(tl.int64), bh // B
    offs_q = t0 + tl.arange(0, BLOCK_Q)
    ds_ptr += (bh.to(tl.int64) * T + tl.minimum(offs_q, T - 1)[:, None]) * L
    k_ptr += batch * stride_kv_b + head * BLOCK_K
    dq = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    n_masked = (N - T + t0 + 1) // BLOCK_N * BLOCK_N  # from here on ds has elements that were never written
    for masked in tl.static_range(2):
        n_end = tl.minimum(N, N - T + t0 + BLOCK_Q) if masked else n_masked
        # Tiles with a mask, two at most, are not pipelined. ptxas before 13.3 overwrites a factor in registers, as the
        # mask makes ds one, while the product of the tile before still reads it (triton-lang/triton#9433).
        for n in tl.range(n_masked if masked else 0, n_end, BLOCK_N, num_stages=1 if masked else None):
            offs_n = n + tl.arange(0, BLOCK_N)
            ds = tl.load(ds_ptr + offs_n[None, :])
            if masked:
                ds = tl.where(offs_n[None, :] - (N - T) <= offs_q[:, None], ds, 0.0)
            k = load_rows(k_ptr, offs_n, N, stride_kv_n, masked, BLOCK_K)
            dq = tl.dot(ds, k, dq, input_precision="ieee")
    dq *= factor
    store_rows(dq_ptr + (batch * T * H + head) * BLOCK_K, offs_q, T, H * BLOCK_K, dq, BLOCK_K)
    du = tl.sum(tl.where((offs_q < T)[:, None], dq, 0.0), 0)
    tl.atomic_add(du_ptr + head * BLOCK_K + tl.arange(0, BLOCK_K), du, sem="relaxed")


@triton.jit
def backward_q_position_kernel(
    ds_ptr, r_ptr, dq_ptr, dv_bias_ptr, B, H, T, N, L, slot_begin, slot_end, factor,
    BLOCK_B: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The part of dq that comes through the position scores, ds · r * factor, and its sum over queries, for the bias v.

    Reads ds (H, B, T, L), relative-shifted, for the slots slot_begin <= j < slot_end, and r (N, H, K). Adds to dq
    (B, T, H, K), which `backward_q_content_kernel` has written, and to dv_bias (H, K). Tiles and grid are those of
    `position_scores_kernel`.
    """
    # Last batch rows and heads first: the kernel before this one read their ds last.
    pid_bh = tl.num_programs(1) - 1 - tl.program_id(1)
    t0, steps, head, q_rows, score_rows = strided_query_tile(pid_bh, B, T, H, BLOCK_B, BLOCK_Q)
    mask_q = (t0 + steps < T)[:, None]
    r_ptr += head * BLOCK_K
    ds_ptr += score_rows[:, None] * L
    dq = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    n_start = slot_begin // (QUERY_STEP * BLOCK_B) * (QUERY_STEP * BLOCK_B) - QUERY_STEP * (BLOCK_Q - BLOCK_B)
    n_end = tl.minimum(slot_end, N - T + t0 + 1)
    n_masked = n_start + tl.maximum(n_end - n_start, 0) // BLOCK_N * BLOCK_N  # the tile on the diagonal
    for masked in tl.static_range(2):
        begin, end = n_masked if masked else n_start, n_end if masked else n_masked
        for n in tl.range(begin, end, BLOCK_N, num_stages=1 if masked else None):  # see `backward_q_content_kernel`
            n = tl.multiple_of(n, QUERY_STEP * BLOCK_B)
            offs_n0 = n + tl.arange(0, BLOCK_N)  # slots of tile row 0
            offs_n = offs_n0[None, :] + steps[:, None]
            ds = tl.load(ds_ptr + offs_n, mask=(offs_n >= slot_begin) & (offs_n < slot_end) & mask_q, other=0.0)
            if masked:
                ds = tl.where((offs_n0 <= N - T + t0)[None, :], ds, 0.0)
            offs_r = tl.minimum(tl.maximum(offs_n0 - t0 + T - 1, 0), N - 1)
            r = load_rows(r_ptr, offs_r, N, H * BLOCK_K, False, BLOCK_K)
            dq = tl.dot(ds, r, dq, input_precision="ieee")
    dq *= factor
    dq_ptrs = dq_ptr + q_rows[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(dq_ptrs, (dq + tl.load(dq_ptrs, mask=mask_q, other=0.0)).to(dq_ptr.dtype.element_ty), mask=mask_q)
    dv_bias = tl.sum(dq, 0)  # tile rows without a query are zeros
    tl.atomic_add(dv_bias_ptr + head * BLOCK_K + tl.arange(0, BLOCK_K), dv_bias, sem="relaxed")


@triton.jit
def backward_r_kernel(
    ds_ptr, q_ptr, dr_ptr, B, H, T, N, L, slot_begin, slot_end, batch_per_program, factor,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of r: dr[m] = sum over queries t and batch rows of ds[t, m + t - (T-1)] * q[t] * factor.

    Reads ds (H, B, T, L), relative-shifted, for the slots slot_begin <= j < slot_end, and q (B, T, H, K). Adds to dr
    (N, H, K), float32. A program has BLOCK_N rows of r, one head, `batch_per_program` batch rows, and the queries t
    with t % QUERY_STEP == phase. The first row of r depends on the phase, so that every tile of ds starts at a whole
    8-byte word; programs of all QUERY_STEP phases add to the same rows.
    Grid: (QUERY_STEP * tiles of rows, H, B / batch_per_program).
    """
    phase = tl.program_id(0) % QUERY_STEP
    head = tl.program_id(1)
    m = tl.program_id(0) // QUERY_STEP * BLOCK_N + T % QUERY_STEP - 1 - phase
    offs_r = m + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_Q) * QUERY_STEP
    q_ptr += head * BLOCK_K
    dr = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    # Queries before t_begin meet none of these rows.
    t_begin = tl.maximum(T - m - BLOCK_N, 0) // (QUERY_STEP * BLOCK_Q) * QUERY_STEP * BLOCK_Q + phase
    tiles_per_batch = tl.cdiv(tl.maximum(T - t_begin, 0), QUERY_STEP * BLOCK_Q)
    in_bounds = (m - (T - 1) + t_begin >= slot_begin) & (m + BLOCK_N <= slot_end) & (T % (QUERY_STEP * BLOCK_Q) == 0)
    batch = (tl.program_id(2) * batch_per_program).to(tl.int64)
    t = t_begin
    # One flat loop over (batch row, query tile), either all masked or all unmasked.
    for masked in tl.static_range(2):
        n_tiles = tl.minimum(batch_per_program, B - tl.program_id(2) * batch_per_program) * tiles_per_batch
        for _ in range(0 if in_bounds == masked else n_tiles):
            offs_q = t + steps
            n = tl.multiple_of(m - (T - 1) + t, QUERY_STEP)
            offs_n = n + steps[:, None] + tl.arange(0, BLOCK_N)[None, :]
            ds_ptrs = ds_ptr + (head * B + batch) * T * L + offs_q[:, None] * L + offs_n
            if masked:
                mask = (offs_n >= slot_begin) & (offs_n < slot_end) & (offs_q < T)[:, None]
                ds = tl.load(ds_ptrs, mask=mask, other=0.0)
            else:
                ds = tl.load(ds_ptrs)
            q = load_rows(q_ptr + batch * T * H * BLOCK_K, offs_q, T, H * BLOCK_K, masked, BLOCK_K)
            dr = tl.dot(tl.trans(ds), q, dr, input_precision="ieee")
            t += QUERY_STEP * BLOCK_Q
            batch += tl.where(t < T, 0, 1)
            t = tl.where(t < T, t, t_begin)
    dr_ptrs = dr_ptr + (offs_r[:, None] * H + head) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.atomic_add(dr_ptrs, dr * factor, mask=((offs_r >= 0) & (offs_r < N))[:, None], sem="relaxed")
