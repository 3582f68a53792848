"""The attention-reconstruction loss (Algorithm 2, lines 6 and 8) in Triton: one kernel forward, one backward.

The loss compares content attention over the evicted ("old") slots with content attention over the compressed ("new")
ones: softmax(q · k / sqrt(K)) v, without u, v or position codes. All T queries see all valid slots.

Forward: `_forward_kernel` attends to both sets of slots for a tile of queries and keeps only the difference of the two
outputs, what backward needs besides, and the loss. Backward: only the keys and values of the new slots have a
gradient, so `_backward_kernel` computes just those. Torch would attend twice, store both outputs, and go back through
all of it.

Layouts, for B batch rows, H heads, T queries, n slots and head width K:

    q                   (B, T, H, K), any strides over B and T
    old, new, d_new     (B, n, 2, H, K), keys and values; any strides over B and n in old and new
    difference          (B, H, T, K)
    lse, delta          (B, H, T), float32
    losses, d_losses    (B,), float32
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressive.kernels.relative_attention import Tile, tile_options
from compressive.kernels.relative_attention_kernels import HIDDEN, LN_2, LOG2_E, load_rows

TILES: dict[str, dict[int, Tile]] = {
    "forward": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3)},
    "backward": {64: (64, 64, 4, 3), 128: (32, 64, 4, 3)},
}
"""The tile of each kernel, for heads up to a width."""


# --- Kernels --------------------------------------------------------------------------------------


@triton.jit
def _attend(
    q, kv_ptr, n_slots, stride_b, stride_n, valid_ptr, batch, head, H, scale,
    MAX_SLOTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Flash attention of a tile of queries over all n_slots slots: the output tile and its lse, to base 2.

    If all slots of the batch row are valid, only the last tile needs a mask: 75 in place of 89 µs (docs/log.md).
    MAX_SLOTS is at least n_slots. A batch row without a valid slot attends to all slots equally and stays finite.
    """
    k_ptr = kv_ptr + batch * stride_b + head * BLOCK_K
    offs_valid = tl.arange(0, MAX_SLOTS)
    valid = tl.load(valid_ptr + batch * n_slots + offs_valid, mask=offs_valid < n_slots, other=1) != 0
    all_valid = tl.min(valid.to(tl.int32), 0)
    n_masked = all_valid * (n_slots // BLOCK_N * BLOCK_N)  # the first slot whose tile needs a mask
    m_i = tl.full([BLOCK_Q], HIDDEN, tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for masked in tl.static_range(2):
        for n in range(n_masked if masked else 0, n_slots if masked else n_masked, BLOCK_N):
            offs_n = n + tl.arange(0, BLOCK_N)
            k = load_rows(k_ptr, offs_n, n_slots, stride_n, masked, BLOCK_K)
            v = load_rows(k_ptr + H * BLOCK_K, offs_n, n_slots, stride_n, masked, BLOCK_K)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if masked:
                mask_n = tl.load(valid_ptr + batch * n_slots + offs_n, mask=offs_n < n_slots, other=0) != 0
                s = tl.where(mask_n[None, :], s, HIDDEN)
            m_new = tl.maximum(m_i, tl.max(s, 1))
            p = tl.math.exp2(s * scale - (m_new * scale)[:, None])
            alpha = tl.math.exp2((m_i - m_new) * scale)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
            m_i = m_new
    return acc / l_i[:, None], m_i * scale + tl.math.log2(l_i)


@triton.jit
def _forward_kernel(
    q_ptr, old_ptr, new_ptr, old_valid_ptr, new_valid_ptr, difference_ptr, lse_ptr, delta_ptr, losses_ptr,
    H, T, n_old, n_new, stride_q_b, stride_q_t, stride_old_b, stride_old_n, stride_new_b, stride_new_n, scale,
    mean_factor, MAX_SLOTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend to new and to old slots; write the difference, and lse and delta = difference · new output for backward.

    Adds the squared differences times mean_factor, 1 / (T H K), to losses. Grid: (T / BLOCK_Q, B * H).
    """
    bh = tl.program_id(1)
    batch, head = (bh // H).to(tl.int64), bh % H
    offs_q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = load_rows(q_ptr + batch * stride_q_b + head * BLOCK_K, offs_q, T, stride_q_t, True, BLOCK_K)
    old, _ = _attend(
        q, old_ptr, n_old, stride_old_b, stride_old_n, old_valid_ptr, batch, head, H, scale,
        MAX_SLOTS, BLOCK_Q, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    new, lse = _attend(
        q, new_ptr, n_new, stride_new_b, stride_new_n, new_valid_ptr, batch, head, H, scale,
        MAX_SLOTS, BLOCK_Q, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    difference = tl.where((offs_q < T)[:, None], new - old, 0.0)
    ptrs = difference_ptr + (bh.to(tl.int64) * T + offs_q[:, None]) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(ptrs, difference.to(difference_ptr.dtype.element_ty), mask=(offs_q < T)[:, None])
    tl.store(lse_ptr + bh * T + offs_q, lse, mask=offs_q < T)
    tl.store(delta_ptr + bh * T + offs_q, tl.sum(difference * new, 1), mask=offs_q < T)
    tl.atomic_add(losses_ptr + batch, tl.sum(tl.sum(difference * difference, 1), 0) * mean_factor, sem="relaxed")


@triton.jit
def _backward_kernel(
    q_ptr, new_ptr, new_valid_ptr, difference_ptr, lse_ptr, delta_ptr, d_losses_ptr, d_new_ptr,
    H, T, n_new, stride_q_b, stride_q_t, stride_new_b, stride_new_n, scale, mean_factor,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write d_new, the gradients of keys and values of the new slots. Tiles are transposed, slots by queries.

    The gradient of the attention output is difference * d_loss * mean_factor, with mean_factor 2 / (T H K). The
    difference is used alone inside the loop; the other factors, the same for a batch row, are applied at the end.
    Grid: (n_new / BLOCK_N, B * H).
    """
    bh = tl.program_id(1)
    batch, head = (bh // H).to(tl.int64), bh % H
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_ptr = new_ptr + batch * stride_new_b + head * BLOCK_K
    k = load_rows(k_ptr, offs_n, n_new, stride_new_n, True, BLOCK_K)
    v = load_rows(k_ptr + H * BLOCK_K, offs_n, n_new, stride_new_n, True, BLOCK_K)
    mask_n = tl.load(new_valid_ptr + batch * n_new + offs_n, mask=offs_n < n_new, other=0) != 0
    q_ptr += batch * stride_q_b + head * BLOCK_K
    difference_ptr += bh.to(tl.int64) * T * BLOCK_K
    dk = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for t in range(0, T, BLOCK_Q):
        offs_q = t + tl.arange(0, BLOCK_Q)
        q = load_rows(q_ptr, offs_q, T, stride_q_t, True, BLOCK_K)
        do = load_rows(difference_ptr, offs_q, T, BLOCK_K, True, BLOCK_K)
        lse = tl.load(lse_ptr + bh * T + offs_q, mask=offs_q < T, other=float("inf"))
        delta = tl.load(delta_ptr + bh * T + offs_q, mask=offs_q < T, other=0.0)
        s = tl.where(mask_n[:, None], tl.dot(k, tl.trans(q), input_precision="ieee"), HIDDEN)
        p = tl.math.exp2(s * scale - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    factor = tl.load(d_losses_ptr + batch) * mean_factor
    ptrs = d_new_ptr + ((batch * n_new + offs_n[:, None]) * 2 * H + head) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = (offs_n < n_new)[:, None]
    dtype = d_new_ptr.dtype.element_ty
    tl.store(ptrs, (dk * (factor * scale * LN_2)).to(dtype), mask=mask)  # scale * ln 2 is 1/sqrt(K)
    tl.store(ptrs + H * BLOCK_K, (dv * factor).to(dtype), mask=mask)


# --- Torch operators and autograd -----------------------------------------------------------------


def _scale(head_width: int) -> float:
    return LOG2_E / math.sqrt(head_width)


@torch.library.custom_op("compressive::compare", mutates_args=())
def compare(
    q: Tensor, old: Tensor, new: Tensor, old_valid: Tensor, new_valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of each batch row, (B,), and what backward needs: difference, lse, delta. q is (B, T, H, K)."""
    B, T, H, K = q.shape
    options = tile_options(TILES["forward"], K, q.dtype)
    losses = q.new_zeros(B, dtype=torch.float32)
    difference = q.new_empty(B, H, T, K)
    lse, delta = losses.new_empty(B, H, T), losses.new_empty(B, H, T)
    _forward_kernel[(triton.cdiv(T, options["BLOCK_Q"]), B * H)](
        q, old, new, old_valid.contiguous(), new_valid.contiguous(), difference, lse, delta, losses,
        H, T, old.shape[1], new.shape[1], *q.stride()[:2], *old.stride()[:2], *new.stride()[:2], _scale(K),
        1 / (T * H * K), MAX_SLOTS=triton.next_power_of_2(max(old.shape[1], new.shape[1])), **options,
    )  # fmt: skip
    return losses, difference, lse, delta


@torch.library.custom_op("compressive::compare_backward", mutates_args=())
def _compare_backward(
    q: Tensor, new: Tensor, new_valid: Tensor, difference: Tensor, lse: Tensor, delta: Tensor, d_losses: Tensor
) -> Tensor:
    """The gradient of `new`."""
    B, T, H, K = q.shape
    options = tile_options(TILES["backward"], K, q.dtype)
    d_new = q.new_empty(new.shape)
    _backward_kernel[(triton.cdiv(new.shape[1], options["BLOCK_N"]), B * H)](
        q, new, new_valid.contiguous(), difference, lse, delta, d_losses.contiguous(), d_new,
        H, T, new.shape[1], *q.stride()[:2], *new.stride()[:2], _scale(K), 2 / (T * H * K), **options,
    )  # fmt: skip
    return d_new


@compare.register_fake
def _(q: Tensor, old: Tensor, new: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, H, K = q.shape
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    return lse.new_empty(B), q.new_empty(B, H, T, K), lse, torch.empty_like(lse)


@_compare_backward.register_fake
def _(q: Tensor, new: Tensor, *_: Tensor) -> Tensor:
    return q.new_empty(new.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    q, _, new, _, new_valid = inputs
    ctx.save_for_backward(q, new, new_valid, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, d_losses: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return None, None, _compare_backward(*ctx.saved_tensors, d_losses), None, None


compare.register_autograd(_backward, setup_context=_setup_context)


# --- The public function --------------------------------------------------------------------------


def attention_reconstruction(q: Tensor, old: Tensor, new: Tensor, old_valid: Tensor, new_valid: Tensor) -> Tensor:
    """Mean squared difference between content attention over new and over old slots, for each batch row.

    Args:
        q: (B, H, T, K), queries.
        old: (B, n_old, 2, H, K), keys and values of the evicted slots.
        new: (B, n_new, 2, H, K), keys and values of the compressed slots; the only operand that gets a gradient.
        old_valid: (B, n_old), bool, old slots that may be seen.
        new_valid: (B, n_new), bool, new slots that may be seen.

    Returns:
        (B,), float32. A row without a valid slot attends to all slots equally: its loss is finite but means nothing.

    """
    losses: Tensor = compare(q.transpose(1, 2), old, new, old_valid, new_valid)[0]
    return losses
