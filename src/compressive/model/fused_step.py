"""`step_attention` as Triton kernels: every key, value and position code is read once, and no score leaves the chip.

One position attends to N slots, which is little work on much data. So that even a single lane keeps the whole device
busy, slots are divided into parts of BLOCK; the first kernel attends within each part, the second joins the parts.
Scores, maxima and sums are float32 from the products on.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressive.model.attention import Biases, Now, OnePosition, Positions

BLOCK = 64


@triton.jit
def _attend(
    query, new_key, new_value, key, value, near, far, content_bias, near_bias, far_bias, position, hidden,
    attended, maxima, sums, N, n_memory, n_compressed, stride_new, stride_hidden, scale,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SEPARATE: tl.constexpr,
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

    fresh_key = tl.load(new_key + at_new)[None, :].to(key.dtype.element_ty)
    keys = tl.where(is_own, fresh_key, tl.load(key + at_slots, mask=inside & ~is_own, other=0.0))
    tl.store(key + at_slots, keys, mask=is_own)
    fresh_value = tl.load(new_value + at_new)[None, :].to(value.dtype.element_ty)
    values = tl.where(is_own, fresh_value, tl.load(value + at_slots, mask=inside & ~is_own, other=0.0))
    tl.store(value + at_slots, values, mask=is_own)

    q = tl.load(query + at_new).to(tl.float32)
    at_bias = head * K + columns
    content = tl.sum(keys.to(tl.float32) * (q + tl.load(content_bias + at_bias).to(tl.float32))[None, :], axis=1)
    r = tl.load(near + at_rows, mask=inside, other=0.0).to(tl.float32)
    by_slot = tl.sum(r * (q + tl.load(near_bias + at_bias).to(tl.float32))[None, :], axis=1)
    if SEPARATE:
        r = tl.load(far + at_rows, mask=(slots < n_compressed)[:, None], other=0.0).to(tl.float32)
        by_far = tl.sum(r * (q + tl.load(far_bias + at_bias).to(tl.float32))[None, :], axis=1)
        by_slot = tl.where(slots < n_compressed, by_far, by_slot)
    unseen = tl.load(hidden + lane * stride_hidden + slots, mask=slots <= own, other=1) != 0
    scores = tl.where(unseen, float("-inf"), (content + by_slot) * scale)

    maximum = tl.max(scores, axis=0)
    weights = tl.exp(scores - tl.where(maximum == float("-inf"), 0.0, maximum))  # of a part none of which is seen: 0
    at_part = pair * parts + part
    tl.store(attended + at_part * K + columns, tl.sum(weights[:, None] * values.to(tl.float32), axis=0))
    tl.store(maxima + at_part, maximum)
    tl.store(sums + at_part, tl.sum(weights, axis=0))


@triton.jit
def _join(attended, maxima, sums, out, parts, K: tl.constexpr, PARTS: tl.constexpr):
    """All parts of one head of one lane, each weighed by its share of the whole sum."""
    pair, columns, part = tl.program_id(0), tl.arange(0, K), tl.arange(0, PARTS)
    at, inside = pair * parts + part, part < parts
    maximum = tl.load(maxima + at, mask=inside, other=float("-inf"))
    share = tl.exp(maximum - tl.max(maximum, axis=0))
    whole = tl.sum(share * tl.load(sums + at, mask=inside, other=0.0), axis=0)
    rows = tl.load(attended + at[:, None] * K + columns[None, :], mask=inside[:, None], other=0.0)
    joined = tl.sum(share[:, None] * rows, axis=0) / whole
    tl.store(out + pair * K + columns, joined.to(out.dtype.element_ty))


def fused_step_attention(
    new: OnePosition,
    key: Tensor,
    value: Tensor,
    biases: Biases,
    positions: Positions,
    now: Now,
    n_compressed: int,
    n_memory: int,
) -> tuple[Tensor, None]:
    """Write and attend as `step_attention` does; the weights are not to be had."""
    (B, H, K), N = new.query.shape, key.shape[2]
    # As `RelativeAttention.project_one`, `Layer.start_cache` and `CompressiveTransformer.step` lay them out.
    assert all(x.is_contiguous() for x in (key, value, *positions, *biases))
    assert all(x.stride() == (new.query.stride(0), K, 1) for x in new)
    assert now.hidden.stride(1) == 1
    parts = triton.cdiv(N, BLOCK)
    attended = new.query.new_empty(B * H, parts, K, dtype=torch.float32)
    maxima, sums = attended.new_empty(2, B * H, parts)
    out = torch.empty(B, H, K, dtype=new.query.dtype, device=new.query.device)
    _attend[(B * H, parts)](
        *new, key, value, *positions, *biases, now.position, now.hidden.view(torch.uint8), attended, maxima, sums,
        N, n_memory, n_compressed, new.query.stride(0), now.hidden.stride(0), 1 / math.sqrt(K),
        H=H, K=K, BLOCK=BLOCK, SEPARATE=positions.far is not positions.near,
    )  # fmt: skip
    _join[(B * H,)](attended, maxima, sums, out, parts, K=K, PARTS=triton.next_power_of_2(parts))
    return out, None
