"""The attention-reconstruction loss as Triton kernels: one forward, one backward.

One kernel attends to old and to new slots and keeps the difference alone; on the way back another computes what alone
has a gradient, keys and values of new slots. Torch would attend twice, store both, and go all the way back.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressive.kernels.relative_attention import HIDDEN, LOG2_E, Tile, _load, _load_slots, compiled_for

TILES: dict[str, dict[int, Tile]] = {  # by width of a head, up to
    "compare": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3)},
    "backward": {64: (64, 64, 4, 3), 128: (32, 64, 4, 3)},
}


@triton.jit
def _attend(
    q, slots_of, n, batch_stride, stride, seen, lane, head, H, scale,
    FLAGS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What queries attend to among slots, and the logarithm to base 2 of their sums of weights.

    There are at most FLAGS slots. Where all of a lane's are seen, only the last few need a mask.
    """
    key = slots_of + lane * batch_stride + head * BLOCK_K
    flags = tl.arange(0, FLAGS)
    every = tl.min((tl.load(seen + lane * n + flags, mask=flags < n, other=1) != 0).to(tl.int32), 0)
    middle = every * (n // BLOCK_N * BLOCK_N)
    largest = tl.full([BLOCK_Q], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for masked in tl.static_range(2):
        for at in range(middle if masked else 0, n if masked else middle, BLOCK_N):
            slots = at + tl.arange(0, BLOCK_N)
            k = _load_slots(key, slots, n, stride, masked, BLOCK_K)
            x = _load_slots(key + H * BLOCK_K, slots, n, stride, masked, BLOCK_K)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if masked:
                visible = tl.load(seen + lane * n + slots, mask=slots < n, other=0) != 0
                scores = tl.where(visible[None, :], scores, HIDDEN)
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.math.exp2(scores * scale - (new_largest * scale)[:, None])
            shrink = tl.math.exp2((largest - new_largest) * scale)
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(x.dtype), x, sums * shrink[:, None], input_precision="ieee")
            largest = new_largest
    return sums / total[:, None], largest * scale + tl.math.log2(total)


@triton.jit
def _compare(
    query, old, new, seen_old, seen_new, difference, lse, delta, losses,
    H, T, n_old, n_new, query_batch, query_stride, old_batch, old_stride, new_batch, new_stride, scale, share,
    FLAGS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The difference between attention to new and to old slots, and the mean of its squares over a lane."""
    lane_head = tl.program_id(1)
    lane, head = (lane_head // H).to(tl.int64), lane_head % H
    queries = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = _load(query + lane * query_batch + head * BLOCK_K, queries, T, query_stride, BLOCK_K)
    target, _ = _attend(
        q, old, n_old, old_batch, old_stride, seen_old, lane, head, H, scale, FLAGS, BLOCK_Q, BLOCK_N, BLOCK_K
    )
    found, norm = _attend(
        q, new, n_new, new_batch, new_stride, seen_new, lane, head, H, scale, FLAGS, BLOCK_Q, BLOCK_N, BLOCK_K
    )
    off = tl.where((queries < T)[:, None], found - target, 0.0)
    to = difference + (lane_head.to(tl.int64) * T + queries[:, None]) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(to, off.to(difference.dtype.element_ty), mask=(queries < T)[:, None])
    tl.store(lse + lane_head * T + queries, norm, mask=queries < T)
    tl.store(delta + lane_head * T + queries, tl.sum(off * found, 1), mask=queries < T)
    tl.atomic_add(losses + lane, tl.sum(tl.sum(off * off, 1), 0) * share, sem="relaxed")


@triton.jit
def _backward(
    query, new, seen_new, difference, lse, delta, d_losses, d_new,
    H, T, n_new, query_batch, query_stride, new_batch, new_stride, scale, factor,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values of new slots."""
    lane_head = tl.program_id(1)
    lane, head = (lane_head // H).to(tl.int64), lane_head % H
    slots = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = new + lane * new_batch + head * BLOCK_K
    k = _load(key, slots, n_new, new_stride, BLOCK_K)
    x = _load(key + H * BLOCK_K, slots, n_new, new_stride, BLOCK_K)
    visible = tl.load(seen_new + lane * n_new + slots, mask=slots < n_new, other=0) != 0
    query += lane * query_batch + head * BLOCK_K
    difference += lane_head.to(tl.int64) * T * BLOCK_K
    dk = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, T, BLOCK_Q):
        queries = first + tl.arange(0, BLOCK_Q)
        q = _load(query, queries, T, query_stride, BLOCK_K)
        off = _load(difference, queries, T, BLOCK_K, BLOCK_K)
        norm = tl.load(lse + lane_head * T + queries, mask=queries < T, other=float("inf"))
        mean = tl.load(delta + lane_head * T + queries, mask=queries < T, other=0.0)
        scores = tl.where(visible[:, None], tl.dot(k, tl.trans(q), input_precision="ieee"), HIDDEN)
        weights = tl.math.exp2(scores * scale - norm[None, :])
        dv = tl.dot(weights.to(off.dtype), off, dv, input_precision="ieee")
        ds = weights * (tl.dot(x, tl.trans(off), input_precision="ieee") - mean[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    weight = tl.load(d_losses + lane) * factor
    to = d_new + ((lane * n_new + slots[:, None]) * 2 * H + head) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (slots < n_new)[:, None]
    kind = d_new.dtype.element_ty
    tl.store(to, (dk * (weight * scale * 0.6931471805599453)).to(kind), mask=inside)
    tl.store(to + H * BLOCK_K, (dv * weight).to(kind), mask=inside)


def _scale(K: int) -> float:
    return LOG2_E / math.sqrt(K)


@torch.library.custom_op("compressive::compare", mutates_args=())
def compare(
    query: Tensor, old: Tensor, new: Tensor, seen_old: Tensor, seen_new: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean squared difference per lane, (B,), of queries (B, T, H, K) attending to old or to new slots.

    Keys and values (B, n, 2, H, K), of which only new ones get a gradient; seen (B, n). Also what the way back needs.
    """
    B, T, H, K = query.shape
    options = compiled_for(TILES["compare"], K, query.dtype)
    losses = query.new_zeros(B, dtype=torch.float32)
    difference = query.new_empty(B, H, T, K)
    lse, delta = losses.new_empty(B, H, T), losses.new_empty(B, H, T)
    _compare[(triton.cdiv(T, options["BLOCK_Q"]), B * H)](
        query, old, new, seen_old.contiguous(), seen_new.contiguous(), difference, lse, delta, losses,
        H, T, old.shape[1], new.shape[1], *query.stride()[:2], *old.stride()[:2], *new.stride()[:2], _scale(K),
        1 / (T * H * K), FLAGS=triton.next_power_of_2(max(old.shape[1], new.shape[1])), **options,
    )  # fmt: skip
    return losses, difference, lse, delta


@torch.library.custom_op("compressive::compare_backward", mutates_args=())
def _compare_backward(
    query: Tensor, new: Tensor, seen_new: Tensor, difference: Tensor, lse: Tensor, delta: Tensor, d_losses: Tensor
) -> Tensor:
    B, T, H, K = query.shape
    options = compiled_for(TILES["backward"], K, query.dtype)
    d_new = query.new_empty(new.shape)
    _backward[(triton.cdiv(new.shape[1], options["BLOCK_N"]), B * H)](
        query, new, seen_new.contiguous(), difference, lse, delta, d_losses.contiguous(), d_new,
        H, T, new.shape[1], *query.stride()[:2], *new.stride()[:2], _scale(K), 2 / (T * H * K), **options,
    )  # fmt: skip
    return d_new


@compare.register_fake
def _(query: Tensor, old: Tensor, new: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, H, K = query.shape
    lse = query.new_empty(B, H, T, dtype=torch.float32)
    return lse.new_empty(B), query.new_empty(B, H, T, K), lse, torch.empty_like(lse)


@_compare_backward.register_fake
def _(query: Tensor, new: Tensor, *_: Tensor) -> Tensor:
    return query.new_empty(new.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    query, _, new, _, seen_new = inputs
    ctx.save_for_backward(query, new, seen_new, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, d_losses: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return None, None, _compare_backward(*ctx.saved_tensors, d_losses), None, None


compare.register_autograd(_differentiate, setup_context=_keep)


def attention_reconstruction(q: Tensor, old: Tensor, new: Tensor, old_valid: Tensor, new_valid: Tensor) -> Tensor:
    """Mean squared difference per row, (B,), between attention over new slots and over old slots.

    q (B, H, T, K); old and new: keys and values, (B, n, 2, H, K); old_valid and new_valid (B, n), bool. Only `new` gets
    a gradient. A row without any valid slot attends to all of them equally.
    """
    losses, *_ = compare(q.transpose(1, 2), old, new, old_valid, new_valid)
    return losses
