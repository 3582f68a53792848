"""Relative attention over [compressed, recent, window] in Triton: position scores first, then flash attention.

Formula. A query t of the window gives slot j the score

    s[t, j] = ((q[t] + u) · k[j] + (q[t] + v) · r[m]) / sqrt(K),        m = j - t + T-1,

where row m of r is the position code of the distance N-1 - m, and u and v are learned biases. The output is the
softmax of s[t] over the visible slots, times their values.

The relative shift. Query t meets row T-1-t of r at slot 0, one row earlier than the query before it. For T = 3 queries
and N = 6 slots, three of them memory, each entry is the row m of r:

            slot j          0   1   2 | 3   4   5
                              memory  |   window
            query t = 0     2   3   4 | 5   .   .       "." is the future, which is masked
                  t = 1     1   2   3 | 4   5   .
                  t = 2     0   1   2 | 3   4   5

The product of two queries with the rows m0, m0+1, ... of r belongs at different slots for each query:

            query t         at slots  j0, j0+1, ...         j0 = m0 + t - (T-1)
            query t+4       at slots  j0+4, j0+5, ...

Tiles that read or write this relative-shifted layout take queries 4 or 16 apart, so that rows are shifted by whole
8-byte words or 32-byte sectors, and the shift costs no extra memory traffic (`strided_query_tile`).

Layouts, all contiguous. B batch rows, H heads, T queries, N = C + M + T slots, K the head width:

    q, out, do, dq      (B, T, H, K)        as the projection leaves them
    kv, dkv             (B, N, 2, H, K)     keys and values, as one projection leaves them
    r, dr               (N or more, H, K)
    scores, ds          (H, B, T, L)        L is N rounded up to 128, so that rows start at whole tiles
    lse, delta          (H, B, T)           float32
    valid               (B, C + M)          bool
    fully_visible       (B,)                bool: all memory is valid and no document starts in the window
    segments            (B, T)              int32

Plan. Forward: `position_scores_kernel` writes (q + v) · r, relative-shifted, and `forward_kernel` reads them as flash
attention reads an additive bias. Backward: position scores are computed again; `backward_kv_kernel` writes dk, dv and
ds, the gradient of the scores; three plain products of ds are left: with k (dq by content), with r (dq by position),
with q (dr). Where compressed slots have position codes of their own (r_far, v_far), the kernels that read r or write dr
run twice, once for each range of slots. Attention weights are never materialised.

Cost. A product of all queries and slots takes 2 B H T N K flops: three forward, eight backward. `scores` takes 2 bytes
per query and slot, `ds` as many, for one layer at a time: 264 MB each at the paper's size. Measured there on an H200,
in µs: position scores 102, forward 181, backward kv 324, q by content 92, q by position 86, r 113. Shifting the scores
in registers needs no memory, but too many registers for heads of 128: 2.34 ms a layer against 1.28 (docs/log.md).

Precision. q + u and q + v are rounded to the type of q. Position scores are float16, finer than the bf16 of their
factors; every accumulator and the softmax are float32. With float32 inputs nothing is rounded.

Dropout of the attention weights. Masks are not stored: `forward_kernel` and `backward_kv_kernel` both compute them, by
Philox, from a seed, the batch row, head, query and slot (`dropout_mask`). The seed is a tensor on the device, sampled
by torch's generator in each call. So a captured step has new masks with each replay, a layer that is computed again for
activation checkpointing has the same ones, and a run that goes on from a checkpoint, RNG state included, repeats them.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compressive.kernels.relative_attention_kernels import (
    LOG2_E,
    QUERY_STEP,
    backward_kv_kernel,
    backward_q_content_kernel,
    backward_q_position_kernel,
    backward_r_kernel,
    delta_kernel,
    forward_kernel,
    position_scores_kernel,
)

# --- Constants and tiles --------------------------------------------------------------------------

HEAD_WIDTHS = (16, 32, 64, 128)
"""The head widths that the kernels take: powers of two, as tile sizes are."""
ROW_ALIGNMENT = 128
"""Rows of `scores` and `ds` have a length that is a multiple of it."""
NO_DROPOUT = (None, None, None)
"""What kernels get in place of seed, threshold and scale."""
MIN_PROGRAMS = 256
"""`backward_r_kernel` splits the batch until it has about this many programs, which keep a GPU busy."""

Tile = tuple[int, int, int, int]
"""BLOCK_Q, BLOCK_N, num_warps, num_stages."""
TILES: dict[str, dict[int, Tile]] = {
    "position_scores": {64: (64, 64, 4, 4), 128: (64, 64, 4, 4)},
    "forward": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3)},
    "backward_kv": {64: (32, 64, 4, 3), 128: (32, 64, 4, 3)},
    "backward_q_content": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)},
    "backward_q_position": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)},
    "backward_r": {64: (32, 128, 4, 4), 128: (32, 128, 4, 3)},
}
"""The tile of each kernel, for heads up to a width: the fastest on an H200 (`benchmarks/attention.py --tune`)."""


def tile_options(tiles: dict[int, Tile], head_width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes and launch options of a kernel, for heads of a width and inputs of a type."""
    block_q, block_n, num_warps, num_stages = next(tile for width, tile in tiles.items() if width >= head_width)
    if dtype == torch.float32:  # twice the bytes: smaller tiles, no pipelining
        block_q, block_n, num_stages = min(block_q, 32), min(block_n, 32), 1
    return {
        "BLOCK_Q": block_q, "BLOCK_N": block_n, "BLOCK_K": head_width, "num_warps": num_warps, "num_stages": num_stages
    }  # fmt: skip


# --- Launches -------------------------------------------------------------------------------------


def _descriptor(x: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A TMA descriptor of x (matrices, rows, columns) for tiles of one matrix, (block_rows, block_columns)."""
    return TensorDescriptor.from_tensor(x, [1, block_rows, block_columns])


class _Launcher:
    """The contiguous operands of one call and their sizes; launches the kernels that several operators need."""

    def __init__(
        self, q_content: Tensor, q_position: Tensor, q_far: Tensor | None, kv: Tensor, r: Tensor, r_far: Tensor | None,
        valid: Tensor, fully_visible: Tensor, segments: Tensor | None, n_compressed: int,
        seed: Tensor | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        self.B, self.N, _, self.H, self.K = kv.shape
        self.T = self.N - valid.shape[1]
        self.L = triton.cdiv(self.N, ROW_ALIGNMENT) * ROW_ALIGNMENT
        self.block_b = next(n for n in (4, 2, 1) if self.B % n == 0)  # batch rows in a tile of strided queries
        self.dtype = kv.dtype
        self.scale = 1 / math.sqrt(self.K)
        self.q_content, self.kv = q_content.contiguous(), kv.contiguous()
        self.k_and_v = (self.kv, self.kv[:, :, 1])  # pointers to the first key and to the first value
        self.kv_strides = self.kv.stride()[:2]
        # Position schemes: queries with their bias, r, and the range of slots, begin <= j < end, that they are for.
        near = (q_position.contiguous(), r.contiguous())
        self.schemes: list[tuple[Tensor, Tensor, int, int]] = [(*near, 0, self.L)]
        if q_far is not None and r_far is not None:
            far = (q_far.contiguous(), r_far.contiguous())
            self.schemes = [(*near, n_compressed, self.L), (*far, 0, n_compressed)]
        self.has_segments = segments is not None
        ids = valid if segments is None else segments.to(torch.int32).contiguous()  # not read without segments
        self.masks = (valid.contiguous(), fully_visible, ids)
        # Seed, threshold and scale of `dropout_mask`. Without dropout they are None, and no code is compiled for it.
        self.dropout: tuple[Tensor | None, int | None, float | None] = NO_DROPOUT
        if seed is not None:
            self.dropout = (seed, min(round(dropout * 2**32), 2**32 - 1) - 2**31, 1 / (1 - dropout))

    def options(self, kernel: str) -> dict[str, Any]:
        """Block sizes and launch options of a kernel."""
        return tile_options(TILES[kernel], self.K, self.dtype)

    def grid(self, n: int, block: int) -> tuple[int, int]:
        """One program per block of n, head and batch row."""
        return triton.cdiv(n, block), self.H * self.B

    def strided_grid(self, block_q: int) -> tuple[int, int]:
        """One program per tile of `strided_query_tile`."""
        step = QUERY_STEP.value
        return step * self.block_b * triton.cdiv(self.T, step * block_q), self.H * self.B // self.block_b

    def position_scores(self) -> Tensor:
        """Launch `position_scores_kernel` for each scheme: (H, B, T, L), scaled by LOG2_E / sqrt(K)."""
        dtype = torch.float32 if self.dtype == torch.float32 else torch.float16
        scores = self.q_content.new_empty(self.H, self.B, self.T, self.L, dtype=dtype)
        options = self.options("position_scores")
        for q, r, begin, end in self.schemes:
            position_scores_kernel[self.strided_grid(options["BLOCK_Q"])](
                q, r, scores, self.B, self.H, self.T, self.N, self.L, begin, end,
                self.scale * LOG2_E, BLOCK_B=self.block_b, **options,
            )  # fmt: skip
        return scores

    def backward_kv(self, lse: Tensor, do: Tensor, delta: Tensor, dkv: Tensor, ds: Tensor) -> None:
        """Launch `backward_kv_kernel` for gradients: writes dkv and ds."""
        self._by_slot(lse, do, delta, dkv, ds, None)

    def usage(self, lse: Tensor, usage: Tensor) -> None:
        """Launch `backward_kv_kernel` for usage: writes the attention that each slot received, (H, B, N)."""
        self._by_slot(lse, self.q_content, lse, self.kv, None, usage)  # operands of gradients are not read

    def _by_slot(
        self, lse: Tensor, do: Tensor, delta: Tensor, dkv: Tensor, ds: Tensor | None, usage: Tensor | None
    ) -> None:
        options = self.options("backward_kv")
        block_q, block_n = options["BLOCK_Q"], options["BLOCK_N"]
        scores = _descriptor(self.position_scores().flatten(0, 1), block_q, block_n)
        backward_kv_kernel[self.grid(self.N, block_n)](
            _descriptor(self.q_content.flatten(2), block_q, self.K),
            _descriptor(self.kv.flatten(2), block_n, self.K),
            scores, *self.masks, lse, delta,
            _descriptor(do.flatten(2), block_q, self.K),
            _descriptor(dkv.flatten(2), block_n, self.K),
            scores if ds is None else _descriptor(ds.flatten(0, 1), block_q, block_n), usage,
            *(self.dropout if usage is None else NO_DROPOUT),
            self.B, self.H, self.T, self.N, self.scale * LOG2_E,
            HAS_SEGMENTS=self.has_segments, USAGE=usage is not None, **options,
        )  # fmt: skip


# --- Torch operators and autograd -----------------------------------------------------------------


@torch.library.custom_op("compressive::attend", mutates_args=())
def attend(
    q: Tensor, biases: Tensor,
    q_content: Tensor, q_position: Tensor, q_far: Tensor | None, kv: Tensor, r: Tensor, r_far: Tensor | None,
    valid: Tensor, fully_visible: Tensor, segments: Tensor | None, n_compressed: int,
    seed: Tensor | None, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend: out (B, T, H, K), and lse (H, B, T), the log2 of each query's sum of exponentials.

    q_content, q_position and q_far are q + u, q + v and q + v_far, (B, T, H, K); the other operands as in the layouts
    above. q (B, T, H, K) and biases, u, v and v_far stacked, are not read: they receive the gradients, which the sums
    do not. q_far and r_far are None where compressed slots share the position scheme of the others. seed (1,), int64,
    is None without dropout.
    """
    launcher = _Launcher(
        q_content, q_position, q_far, kv, r, r_far, valid, fully_visible, segments, n_compressed, seed, dropout
    )
    B, H, T, N, L = launcher.B, launcher.H, launcher.T, launcher.N, launcher.L
    out = torch.empty_like(launcher.q_content)
    lse = q_content.new_empty(H, B, T, dtype=torch.float32)
    options = launcher.options("forward")
    forward_kernel[launcher.grid(T, options["BLOCK_Q"])](
        launcher.q_content, *launcher.k_and_v, launcher.position_scores(), *launcher.masks, out, lse,
        *launcher.dropout, B, H, T, N, L, *launcher.kv_strides, launcher.scale * LOG2_E,
        HAS_SEGMENTS=launcher.has_segments, **options,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("compressive::attend_backward", mutates_args=())
def _attend_backward(
    q_content: Tensor, q_position: Tensor, q_far: Tensor | None, kv: Tensor, r: Tensor, r_far: Tensor | None,
    valid: Tensor, fully_visible: Tensor, segments: Tensor | None, n_compressed: int,
    seed: Tensor | None, dropout: float, out: Tensor, lse: Tensor, do: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients: dq, of the stacked biases, dkv, dr, and of r_far where it is given."""
    launcher = _Launcher(
        q_content, q_position, q_far, kv, r, r_far, valid, fully_visible, segments, n_compressed, seed, dropout
    )
    sizes = B, H, T, N, L = launcher.B, launcher.H, launcher.T, launcher.N, launcher.L
    do, delta = do.contiguous(), torch.empty_like(lse)
    options = launcher.options("backward_q_content")
    delta_kernel[launcher.grid(T, options["BLOCK_Q"])](out, do, delta, B, H, T, **options)

    dkv = torch.empty_like(launcher.kv)
    ds = q_content.new_empty(H, B, T, L)
    launcher.backward_kv(lse, do, delta, dkv, ds)

    dq = torch.empty_like(launcher.q_content)
    d_biases = lse.new_zeros(1 + len(launcher.schemes), H, launcher.K)
    backward_q_content_kernel[launcher.grid(T, options["BLOCK_Q"])](
        ds, launcher.kv, dq, d_biases[0], *sizes, *launcher.kv_strides, launcher.scale, **options
    )
    dr_of_schemes = []
    for (q, r, begin, end), dv_bias in zip(launcher.schemes, d_biases[1:], strict=True):
        options = launcher.options("backward_q_position")
        backward_q_position_kernel[launcher.strided_grid(options["BLOCK_Q"])](
            ds, r, dq, dv_bias, *sizes, begin, end, launcher.scale, BLOCK_B=launcher.block_b, **options
        )
        dr = lse.new_zeros(r.shape)
        options = launcher.options("backward_r")
        tiles = QUERY_STEP.value * triton.cdiv(N + QUERY_STEP.value, options["BLOCK_N"])
        batch_per_program = triton.cdiv(B * tiles * H, max(MIN_PROGRAMS, tiles * H))
        backward_r_kernel[(tiles, H, triton.cdiv(B, batch_per_program))](
            ds, q, dr, *sizes, begin, end, batch_per_program, launcher.scale, **options
        )
        dr_of_schemes.append(dr.to(r.dtype))
    return [dq, d_biases, dkv, *dr_of_schemes]


@torch.library.custom_op("compressive::attention_received", mutates_args=())
def attention_received(
    q_content: Tensor, q_position: Tensor, q_far: Tensor | None, kv: Tensor, r: Tensor, r_far: Tensor | None,
    valid: Tensor, fully_visible: Tensor, segments: Tensor | None, n_compressed: int, lse: Tensor,
) -> Tensor:  # fmt: skip
    """The mean over heads and queries of the attention that each slot received before dropout, (B, N)."""
    launcher = _Launcher(q_content, q_position, q_far, kv, r, r_far, valid, fully_visible, segments, n_compressed)
    received = lse.new_empty(launcher.H, launcher.B, launcher.N)
    launcher.usage(lse, received)
    return received.mean(dim=0) / launcher.T


@attend.register_fake
def _(q: Tensor, biases: Tensor, q_content: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _K = q_content.shape
    return torch.empty_like(q_content).contiguous(), q_content.new_empty(H, B, T, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    q_content: Tensor, q_position: Tensor, q_far: Tensor | None, kv: Tensor, r: Tensor, r_far: Tensor | None, *_: Any
) -> list[Tensor]:
    of_r = [r] if r_far is None else [r, r_far]
    d_biases = q_content.new_empty(1 + len(of_r), *q_content.shape[2:], dtype=torch.float32)
    return [q_content.new_empty(q_content.shape), d_biases, *(x.new_empty(x.shape) for x in (kv, *of_r))]


@attention_received.register_fake
def _(q_content: Tensor, q_position: Tensor, q_far: Tensor | None, kv: Tensor, *_: Any) -> Tensor:
    return kv.new_empty(*kv.shape[:2], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _q, _biases, *tensors, n_compressed, seed, dropout = inputs
    ctx.save_for_backward(*tensors, seed, *output)
    ctx.n_compressed, ctx.dropout = n_compressed, dropout
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, do: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *operands, seed, out, lse = ctx.saved_tensors
    dq, d_biases, dkv, dr, *dr_far = _attend_backward(*operands, ctx.n_compressed, seed, ctx.dropout, out, lse, do)
    d_queries_with_bias = [None] * 3  # q and biases have all of it
    return dq, d_biases, *d_queries_with_bias, dkv, dr, *(dr_far or [None]), *[None] * 6


attend.register_autograd(_backward, setup_context=_setup_context)


# --- The public function --------------------------------------------------------------------------


def dropout_seed(device: torch.device) -> Tensor:
    """Sample a seed, (1,), int64, on the device: from torch's generator, whose state checkpoints hold."""
    # Triton 3.6 silently makes 0 of a larger bound where the compiler writes it as an int32.
    return torch.randint(2**31 - 1, (1,), device=device)


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
    dropout: float = 0.0,
    with_usage: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from a window of T queries to all N = C + M + T slots.

    Args:
        q: (B, H, T, K), queries; K is one of HEAD_WIDTHS.
        kv: (B, N, 2, H, K), keys and values of all slots, in the type of q.
        r: (H, D', K), position codes of the distances N-1 downwards. D' is at least N; further rows are not read.
        u: (H, K), the bias of queries that meet keys.
        v: (H, K), the bias of queries that meet position codes.
        valid: (B, C + M), bool, memory slots that may be seen.
        segments: (B, T), integers, the document that each position belongs to, 0 for the one that memory belongs to.
            None if no document starts in the window.
        r_far: (H, D', K), position codes for the n_compressed oldest slots, if they have a scheme of their own.
        v_far: (H, K), the bias that goes with r_far.
        n_compressed: C, read only with r_far.
        dropout: the probability that an attention weight is dropped; the others are scaled by 1 / (1 - dropout).
        with_usage: also return usage, at the cost of one more pass.

    Returns:
        The attention output (B, H, T, K) in the type of q, and usage (B, N), float32, without a gradient: the mean over
        heads and queries of the attention that each slot received before dropout. None unless it was asked for.

    """
    assert (r_far is None) == (v_far is None)
    q = q.transpose(1, 2)  # (B, T, H, K), as the projection lies in memory
    biases = (u, v) if v_far is None else (u, v, v_far)
    # Added here, where torch.compile fuses them with what comes before. Gradients go to q and the biases directly.
    q_content, q_position, *q_far = [(q + bias).detach().to(q.dtype) for bias in biases]
    N = kv.shape[1]
    tables = [None if x is None else x[:, :N].transpose(0, 1).to(q.dtype) for x in (r, r_far)]
    operands = (q_content, q_position, q_far[0] if q_far else None, kv, *tables)
    fully_visible = valid.all(dim=1)
    if segments is not None:
        fully_visible = fully_visible & (segments[:, -1] == 0)
    masks = (valid, fully_visible, segments, n_compressed)
    seed = dropout_seed(q.device) if dropout else None
    out, lse = attend(q, torch.stack(biases), *operands, *masks, seed, dropout)
    usage = None
    if with_usage:
        usage = attention_received(*(None if x is None else x.detach() for x in operands), *masks, lse)
    return out.transpose(1, 2), usage
