"""A layer's step as few Triton kernels: `step_attention`, and linear maps with what comes before and after them.

A step of one position is little work on much data, and as many kernels each takes longer to begin than to run.

Attention: every key, value and position code is read once, and no score leaves the chip. So that even a single lane
keeps the whole device busy, slots are divided into parts of BLOCK; the first kernel attends within each part, the
second joins the parts. Scores, maxima and sums are float32 from the products on.

Linear maps: a kernel each, with the layer norm before, the ReLU or the skip connection after. Every program norms its
lanes for itself, in place of a kernel that does it once for all.

On GPUs that can do so, a kernel begins while the one before it runs, and reads weights, keys and values meanwhile.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK, ATTENDING = 32, 1
"""Slots of a part, and warps that attend to them."""
LANES, COLUMNS, WARPS = (16, 32), 16, 4
"""The tile of a linear map, for few lanes and for many: small, so that many programs share the weights' reading."""
HELD = 16384
"""So many numbers of rows that are normed fit into registers."""
INNER = 512
"""How much of a row a product takes at a time, where it is not normed."""
MAX_WIDTH = 1024
"""Of wider models torch finishes a step: a layer norm holds as many rows in registers as a tile has lanes."""


@functools.cache
def _launch() -> dict[str, Any]:
    """How kernels are launched here: one may begin before the one before it has ended, where a GPU can do that."""
    nvidia = torch.cuda.is_available() and torch.version.cuda is not None
    overlap = nvidia and torch.cuda.get_device_capability() >= (9, 0)  # Hopper and later
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


@triton.jit
def _wait(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one to end.

    That one, too, has waited before it let this one begin: so all that kernels before it have written can be read
    without waiting, and nothing that it writes itself.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _attend(
    query, new_key, new_value, key, value, near, far, content_bias, near_bias, far_bias, position, hidden,
    attended, maxima, sums, N, n_memory, n_compressed, stride_new, stride_hidden, scale,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SEPARATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of one head of one lane; the part that holds the lane's position also writes its key and value."""
    pair, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lane, head = pair // H, pair % H
    columns = tl.arange(0, K)
    slots = part * BLOCK + tl.arange(0, BLOCK)
    own = n_memory + tl.load(position + lane).to(tl.int32)
    inside = (slots <= own)[:, None]  # what is still to come need not be read
    is_own = (slots == own)[:, None]
    at_new = lane * stride_new + head * K + columns
    at_slots = (pair.to(tl.int64) * N + slots)[:, None] * K + columns[None, :]
    at_rows = (head * N + tl.maximum(own - slots, 0))[:, None] * K + columns[None, :]

    # All this is older than the projections of the new position, which the kernel before is still busy with.
    keys = tl.load(key + at_slots, mask=inside & ~is_own, other=0.0)
    r = tl.load(near + at_rows, mask=inside, other=0.0)
    values = tl.load(value + at_slots, mask=inside & ~is_own, other=0.0)
    unseen = tl.load(hidden + lane * stride_hidden + slots, mask=slots <= own, other=1)
    _wait(OVERLAP)
    q = tl.load(query + at_new).to(tl.float32)
    fresh_key = tl.load(new_key + at_new).to(keys.dtype)
    fresh_value = tl.load(new_value + at_new).to(values.dtype)
    keys = tl.where(is_own, fresh_key[None, :], keys)
    values = tl.where(is_own, fresh_value[None, :], values)
    if own // BLOCK == part:
        at_own = (pair.to(tl.int64) * N + own) * K + columns
        tl.store(key + at_own, fresh_key)
        tl.store(value + at_own, fresh_value)

    at_bias = head * K + columns
    content = tl.sum(keys.to(tl.float32) * (q + tl.load(content_bias + at_bias).to(tl.float32))[None, :], axis=1)
    by_slot = tl.sum(r.to(tl.float32) * (q + tl.load(near_bias + at_bias).to(tl.float32))[None, :], axis=1)
    if SEPARATE:
        r = tl.load(far + at_rows, mask=(slots < n_compressed)[:, None], other=0.0).to(tl.float32)
        by_far = tl.sum(r * (q + tl.load(far_bias + at_bias).to(tl.float32))[None, :], axis=1)
        by_slot = tl.where(slots < n_compressed, by_far, by_slot)
    scores = tl.where(unseen != 0, float("-inf"), (content + by_slot) * scale)

    maximum = tl.max(scores, axis=0)
    weights = tl.exp(scores - tl.where(maximum == float("-inf"), 0.0, maximum))  # of a part none of which is seen: 0
    at_part = pair * parts + part
    tl.store(attended + at_part * K + columns, tl.sum(weights[:, None] * values.to(tl.float32), axis=0))
    tl.store(maxima + at_part, maximum)
    tl.store(sums + at_part, tl.sum(weights, axis=0))


@triton.jit
def _join(attended, maxima, sums, out, parts, K: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr):
    """All parts of one head of one lane, each weighed by its share of the whole sum."""
    _wait(OVERLAP)
    pair, columns, part = tl.program_id(0), tl.arange(0, K), tl.arange(0, PARTS)
    at, inside = pair * parts + part, part < parts
    maximum = tl.load(maxima + at, mask=inside, other=float("-inf"))
    share = tl.exp(maximum - tl.max(maximum, axis=0))
    whole = tl.sum(share * tl.load(sums + at, mask=inside, other=0.0), axis=0)
    rows = tl.load(attended + at[:, None] * K + columns[None, :], mask=inside[:, None], other=0.0)
    joined = tl.sum(share[:, None] * rows, axis=0) / whole
    tl.store(out + pair * K + columns, joined.to(out.dtype.element_ty))


def relative_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    r: Tensor,
    u: Tensor,
    v_bias: Tensor,
    position: Tensor,
    hidden: Tensor,
    *,
    r_far: Tensor | None = None,
    v_far: Tensor | None = None,
    n_compressed: int = 0,
    n_memory: int,
) -> Tensor:
    """Write k and v of the new position into the caches, and attend from it: (B, H, K).

    q, k, v (B, H, K): of the new position; slices of one projection (B, 3, H, K). keys, values (B, H, N, K): caches.
    r (H, N, K): position codes of the distances 0 to N-1. u, v_bias (H, K): biases. position (B,): index in the window.
    hidden (B, N), bool: slots that may not be seen. r_far (H, N, K), v_far (H, K): for the n_compressed oldest slots
    where they have a scheme of their own. n_memory: slots before the window.
    """
    (B, H, K), N = q.shape, keys.shape[2]
    separate = r_far is not None
    if r_far is None or v_far is None:
        r_far, v_far = r, v_bias
    assert all(x.is_contiguous() for x in (keys, values, r, r_far, u, v_bias, v_far))
    assert all(x.stride() == (q.stride(0), K, 1) for x in (q, k, v))
    assert hidden.stride(1) == 1
    parts = triton.cdiv(N, BLOCK)
    attended = q.new_empty(B * H, parts, K, dtype=torch.float32)
    maxima, sums = attended.new_empty(2, B * H, parts)
    out = torch.empty(B, H, K, dtype=q.dtype, device=q.device)
    _attend[(B * H, parts)](
        q, k, v, keys, values, r, r_far, u, v_bias, v_far, position, hidden.view(torch.uint8), attended, maxima, sums,
        N, n_memory, n_compressed, q.stride(0), hidden.stride(0), 1 / math.sqrt(K),
        H=H, K=K, BLOCK=BLOCK, SEPARATE=separate, num_warps=ATTENDING, **_launch(),
    )  # fmt: skip
    _join[(B * H,)](attended, maxima, sums, out, parts, K=K, PARTS=triton.next_power_of_2(parts), **_launch())
    return out


@triton.jit
def _load(x, rows, n_rows, columns, n_columns):
    """Some of a matrix, zeros beyond its ends."""
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    return tl.load(x + rows[:, None] * n_columns + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _normed(x, weight, bias, rows, B, D, columns, EPSILON: tl.constexpr, BLOCK: tl.constexpr):
    """Some columns of layer-normed rows; BLOCK is at least a whole row."""
    everything = tl.arange(0, BLOCK)
    row = _load(x, rows, B, everything, D).to(tl.float32)
    mean = tl.sum(row, axis=1) / D
    off = tl.where((everything < D)[None, :], row - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(off * off, axis=1) / D + EPSILON)
    part = _load(x, rows, B, columns, D).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=columns < D, other=0.0).to(tl.float32)
    return (part - mean[:, None]) * inverse[:, None] * scale[None, :] + shift[None, :]


@triton.jit
def _linear(
    x, weight, bias, norm_weight, norm_bias, residual, out, B, K, N,
    EPSILON: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    RESIDUAL: tl.constexpr, RESIDUAL_NORM: tl.constexpr, OVERLAP: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Some columns of a linear map of some lanes."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * LANES + tl.arange(0, LANES)
    total = tl.zeros([LANES, COLUMNS], tl.float32)
    inner = tl.arange(0, INNER)
    w = _load(weight, columns, N, inner, K)
    _wait(OVERLAP)
    for at in range(0, K, INNER):  # a single turn where rows are normed
        if NORM:
            a = _normed(x, norm_weight, norm_bias, rows, B, K, inner, EPSILON, INNER)
        else:
            a = _load(x, rows, B, at + inner, K)
        later = _load(weight, columns, N, at + INNER + inner, K)
        total = tl.dot(a.to(w.dtype), tl.trans(w), total, input_precision="ieee")
        w = later
    if BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    inside = (rows < B)[:, None] & (columns < N)[None, :]
    at_out = rows[:, None] * N + columns[None, :]
    if RESIDUAL_NORM:
        total += _normed(residual, norm_weight, norm_bias, rows, B, N, columns, EPSILON, BLOCK_N)
    elif RESIDUAL:
        total += tl.load(residual + at_out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at_out, total.to(out.dtype.element_ty), mask=inside)


def linear_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: nn.LayerNorm | None = None,
    relu: bool = False,
    residual: Tensor | None = None,
    residual_norm: nn.LayerNorm | None = None,
) -> Tensor:
    """A linear map of x (B, K), layer-normed first, through a ReLU, and added to a residual (B, N), normed or not.

    Products are in the weight's type, all else is float32; the result is of the residual's type, or the weight's.
    """
    assert norm is None or residual_norm is None
    assert all(t.is_contiguous() for t in (x, weight, residual) if t is not None)
    (B, K), N, normed = x.shape, weight.shape[0], norm or residual_norm
    norms = (weight, weight) if normed is None else (normed.weight, normed.bias)  # not read where there is none
    inner = max(16, triton.next_power_of_2(K))
    width = 0 if normed is None else triton.next_power_of_2(normed.normalized_shape[0])
    lanes = LANES[LANES[0] < B and width * LANES[1] <= HELD]
    out = x.new_empty(B, N, dtype=weight.dtype if residual is None else residual.dtype)
    _linear[(triton.cdiv(N, COLUMNS), triton.cdiv(B, lanes))](
        x, weight, weight if bias is None else bias, *norms, weight if residual is None else residual, out, B, K, N,
        EPSILON=0.0 if normed is None else normed.eps, NORM=norm is not None, BIAS=bias is not None, RELU=relu,
        RESIDUAL=residual is not None, RESIDUAL_NORM=residual_norm is not None, LANES=lanes, COLUMNS=COLUMNS,
        INNER=inner if norm is not None else min(inner, INNER), BLOCK_N=triton.next_power_of_2(N), num_warps=WARPS,
        num_stages=1, **_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _norm(x, weight, bias, out, D, EPSILON: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One row, layer-normed."""
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    _wait(OVERLAP)
    at = tl.program_id(0) * D + columns
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    off = tl.where(inside, row - tl.sum(row, axis=0) / D, 0.0)
    normed = off * tl.rsqrt(tl.sum(off * off, axis=0) / D + EPSILON) * scale + shift
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


def norm_step(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The layer norm of x (B, D)."""
    out, (B, D) = torch.empty_like(x), x.shape
    _norm[(B,)](
        x, norm.weight, norm.bias, out, D, EPSILON=norm.eps, BLOCK=triton.next_power_of_2(D), **_launch()
    )  # fmt: skip
    return out
