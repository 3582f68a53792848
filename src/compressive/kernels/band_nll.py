"""-log softmax over one band of an adaptive softmax, for the rows whose target is in the band, in Triton.

Which rows these are, only the device knows. They are packed there: `rows` names them first, `count` says how many they
are. Grids have programs for all rows; those beyond the count end at once. So shapes do not depend on the data, the host
never waits, a step can be captured as a CUDA graph, and a band still costs its own tokens only.

Logits are never stored: forward keeps the log of each row's sum of exponentials, and backward computes them again, once
for the gradient of the input and once for that of the weights. Programs split the words of a band, or a few rows would
leave most of a GPU idle; each writes a sum of its own, so that results do not depend on the order of programs.

Layouts, for n rows, V words and width K:

    h                   (n, K)
    weight, dweight     (V, K); bias, dbias (V,)
    target, rows        (n,), int64; target is -1 outside the band
    count               (), int64
    lse, dh             (splits, n) and (splits, n, K), float32, one sum for each part of the words
    nll, d_nll          (n,), float32
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressive.kernels.linear import autocasted

MAX_WIDTH = 256
"""The widest band: the weights' gradient is summed in registers."""
PARTIAL_SUMS = 2**25
"""How many elements of unfinished sums of dh are held: with fewer rows the words are split among more programs."""
MAX_SPLITS = 32

Tile = tuple[int, int, int, int]
"""BLOCK_N, BLOCK_V, num_warps, num_stages."""
TILES: dict[str, dict[int, Tile]] = {
    "forward": {64: (64, 128, 4, 3), 256: (64, 64, 8, 2)},
    "backward_h": {64: (64, 128, 4, 3), 256: (32, 64, 8, 3)},
    "backward_weight": {64: (64, 64, 4, 3), 256: (32, 64, 8, 3)},
}
"""The tile of each kernel, for bands up to a width: in bf16 none spills registers in its loop
(benchmarks/machine_code.py)."""


# --- Kernels --------------------------------------------------------------------------------------


@triton.jit
def _load_rows(rows_ptr, first, count, BLOCK_N: tl.constexpr):
    """Which rows of the input a tile has, and its mask."""
    offs = first + tl.arange(0, BLOCK_N)
    return tl.load(rows_ptr + offs, mask=offs < count, other=0), offs < count


@triton.jit
def _load_tile(ptr, rows, mask, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Some rows of a matrix with K columns; zeros out of bounds."""
    offs_k = tl.arange(0, BLOCK_K)
    mask = mask[:, None] & (offs_k < K)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * K + offs_k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_words(weight_ptr, bias_ptr, first, V, K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    """Words of a tile, their weights and their biases; a word out of bounds gets a logit of -inf."""
    words = first + tl.arange(0, BLOCK_V)
    bias = tl.load(bias_ptr + words, mask=words < V, other=float("-inf")).to(tl.float32)
    return words, _load_tile(weight_ptr, words, words < V, K, BLOCK_K), bias


@triton.jit
def _load_loss(target_ptr, lse_ptr, d_nll_ptr, rows, mask):
    """Target, lse and incoming gradient of rows. Out of bounds lse is inf: all gradients are 0."""
    target = tl.load(target_ptr + rows, mask=mask, other=-1)
    lse = tl.load(lse_ptr + rows, mask=mask, other=float("inf"))
    return target, lse, tl.load(d_nll_ptr + rows, mask=mask, other=0.0)


@triton.jit
def _d_logits(logits, words, target, lse, d_nll):
    """The gradient of a tile of logits: (p - [word is the target]) * d_nll."""
    p = tl.exp(logits - lse)
    return tl.where(words == target, p - 1.0, p) * d_nll


@triton.jit
def _forward_kernel(
    h_ptr, weight_ptr, bias_ptr, target_ptr, rows_ptr, count_ptr, lse_ptr, nll_ptr, n, V, n_words,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write lse over n_words words for the rows of the band; the first split also writes -logit of the target to nll.

    Grid: (n / BLOCK_N, splits).
    """
    first, count = tl.program_id(0) * BLOCK_N, tl.load(count_ptr)
    if first < count:
        rows, mask = _load_rows(rows_ptr, first, count, BLOCK_N)
        h = _load_tile(h_ptr, rows, mask, K, BLOCK_K)
        m_i = tl.full([BLOCK_N], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_N], tl.float32)
        begin = tl.program_id(1) * n_words
        for v in range(begin, min(begin + n_words, V), BLOCK_V):
            _, w, bias = _load_words(weight_ptr, bias_ptr, v, V, K, BLOCK_V, BLOCK_K)
            logits = tl.dot(h, tl.trans(w), input_precision="ieee") + bias[None, :]
            m_new = tl.maximum(m_i, tl.max(logits, 1))
            l_i = l_i * tl.exp(m_i - m_new) + tl.sum(tl.exp(logits - m_new[:, None]), 1)
            m_i = m_new
        tl.store(lse_ptr + tl.program_id(1) * n + rows, m_i + tl.log(l_i), mask=mask)
        if begin == 0:
            target = tl.load(target_ptr + rows, mask=mask, other=0)
            w = _load_tile(weight_ptr, target, mask, K, BLOCK_K)
            logit = tl.sum(h.to(tl.float32) * w.to(tl.float32), 1) + tl.load(bias_ptr + target)
            tl.store(nll_ptr + rows, -logit, mask=mask)


@triton.jit
def _backward_h_kernel(
    h_ptr, weight_ptr, bias_ptr, target_ptr, rows_ptr, count_ptr, lse_ptr, d_nll_ptr, dh_ptr, n, V, n_words,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the part of dh that comes from n_words words, for the rows of the band. Grid: (n / BLOCK_N, splits)."""
    first, count = tl.program_id(0) * BLOCK_N, tl.load(count_ptr)
    if first < count:
        rows, mask = _load_rows(rows_ptr, first, count, BLOCK_N)
        h = _load_tile(h_ptr, rows, mask, K, BLOCK_K)
        target, lse, d_nll = _load_loss(target_ptr, lse_ptr, d_nll_ptr, rows, mask)
        dh = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        begin = tl.program_id(1) * n_words
        for v in range(begin, min(begin + n_words, V), BLOCK_V):
            words, w, bias = _load_words(weight_ptr, bias_ptr, v, V, K, BLOCK_V, BLOCK_K)
            logits = tl.dot(h, tl.trans(w), input_precision="ieee") + bias[None, :]
            ds = _d_logits(logits, words[None, :], target[:, None], lse[:, None], d_nll[:, None])
            dh = tl.dot(ds.to(w.dtype), w, dh, input_precision="ieee")
        offs_k = tl.arange(0, BLOCK_K)
        ptrs = dh_ptr + (tl.program_id(1).to(tl.int64) * n + rows)[:, None] * K + offs_k[None, :]
        tl.store(ptrs, dh, mask=mask[:, None] & (offs_k < K)[None, :])


@triton.jit
def _backward_weight_kernel(
    h_ptr, weight_ptr, bias_ptr, target_ptr, rows_ptr, count_ptr, lse_ptr, d_nll_ptr, dweight_ptr, dbias_ptr, V,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write dweight and dbias of a tile of words, summed over the rows of the band.

    Tiles are transposed, words by rows. Grid: (V / BLOCK_V,).
    """
    count = tl.load(count_ptr)
    words, w, bias = _load_words(weight_ptr, bias_ptr, tl.program_id(0) * BLOCK_V, V, K, BLOCK_V, BLOCK_K)
    dweight = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    dbias = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, count, BLOCK_N):
        rows, mask = _load_rows(rows_ptr, first, count, BLOCK_N)
        h = _load_tile(h_ptr, rows, mask, K, BLOCK_K)
        target, lse, d_nll = _load_loss(target_ptr, lse_ptr, d_nll_ptr, rows, mask)
        logits = tl.dot(w, tl.trans(h), input_precision="ieee") + bias[:, None]
        ds = _d_logits(logits, words[:, None], target[None, :], lse[None, :], d_nll[None, :])
        dweight = tl.dot(ds.to(h.dtype), h, dweight, input_precision="ieee")
        dbias += tl.sum(ds, 1)
    offs_k = tl.arange(0, BLOCK_K)
    ptrs = dweight_ptr + words.to(tl.int64)[:, None] * K + offs_k[None, :]
    tl.store(ptrs, dweight, mask=(words < V)[:, None] & (offs_k < K)[None, :])
    tl.store(dbias_ptr + words, dbias, mask=words < V)


# --- Torch operators and autograd -----------------------------------------------------------------


def tile_options(kernel: str, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes and launch options of a kernel, for a band of a width and inputs of a type."""
    block_n, block_v, num_warps, num_stages = next(tile for widest, tile in TILES[kernel].items() if widest >= width)
    if dtype == torch.float32:  # twice the bytes: smaller tiles, no pipelining
        block_n, block_v, num_stages = min(block_n, 32), min(block_v, 32), 1
    block_k = max(16, triton.next_power_of_2(width))
    return {
        "K": width, "BLOCK_N": block_n, "BLOCK_V": block_v, "BLOCK_K": block_k,
        "num_warps": num_warps, "num_stages": num_stages,
    }  # fmt: skip


def _split(n_rows: int, V: int, K: int, block_v: int) -> tuple[int, int]:
    """Into how many parts to split the words, and the words of a part, a multiple of block_v."""
    splits = max(1, min(MAX_SPLITS, PARTIAL_SUMS // max(1, n_rows * K)))
    n_words = triton.cdiv(triton.cdiv(V, block_v), splits) * block_v
    return triton.cdiv(V, n_words), n_words


@torch.library.custom_op("compressive::band_nll", mutates_args=())
def _band_nll(
    h: Tensor, weight: Tensor, bias: Tensor, target: Tensor, rows: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """-log p, 0 outside the band, and lse, both (n,)."""
    (n, K), V = h.shape, len(weight)
    h, weight, bias = h.contiguous(), weight.to(h.dtype), bias.to(h.dtype)
    options = tile_options("forward", K, h.dtype)
    splits, n_words = _split(n, V, K, options["BLOCK_V"])
    lse, nll = h.new_zeros(splits, n, dtype=torch.float32), h.new_zeros(n, dtype=torch.float32)
    _forward_kernel[(triton.cdiv(n, options["BLOCK_N"]), splits)](
        h, weight, bias, target, rows, count, lse, nll, n, V, n_words, **options
    )
    total = lse.logsumexp(dim=0)
    return torch.where(target >= 0, total + nll, 0), total


@torch.library.custom_op("compressive::band_nll_backward", mutates_args=())
def _band_nll_backward(
    h: Tensor, weight: Tensor, bias: Tensor, target: Tensor, rows: Tensor, count: Tensor, lse: Tensor, d_nll: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of h, of weight and of bias, each in its own type."""
    (n, K), V = h.shape, len(weight)
    dweight, dbias = (torch.empty_like(x, dtype=torch.float32) for x in (weight, bias))
    inputs = h.contiguous(), weight.to(h.dtype), bias.to(h.dtype), target, rows, count, lse, d_nll.contiguous()
    options = tile_options("backward_h", K, h.dtype)
    splits, n_words = _split(n, V, K, options["BLOCK_V"])
    dh = h.new_zeros(splits, n, K, dtype=torch.float32)
    _backward_h_kernel[(triton.cdiv(n, options["BLOCK_N"]), splits)](*inputs, dh, n, V, n_words, **options)
    options = tile_options("backward_weight", K, h.dtype)
    _backward_weight_kernel[(triton.cdiv(V, options["BLOCK_V"]),)](*inputs, dweight, dbias, V, **options)
    return dh.sum(dim=0).to(h.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)


@_band_nll.register_fake
def _(h: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    nll = h.new_empty(len(h), dtype=torch.float32)
    return nll, torch.empty_like(nll)


@_band_nll_backward.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_nll: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_band_nll_backward(*ctx.saved_tensors, d_nll), None, None, None


_band_nll.register_autograd(_backward, setup_context=_setup_context)


# --- The public function --------------------------------------------------------------------------


def band_nll(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """Return -log softmax(hidden·weightᵀ + bias)[target], 0 where the target is -1: (n,), float32.

    hidden is (n, K), K at most MAX_WIDTH, in half precision or float32; weight (V, K), bias (V,), target (n,), int64.
    Products have the type that autocast gives, logits are float32.
    """
    (h,) = autocasted(hidden)
    inside = target >= 0
    rows = torch.argsort(~inside, stable=True)  # the rows of the band first
    nll: Tensor = _band_nll(h, weight, bias, target, rows, inside.sum())[0]
    return nll
