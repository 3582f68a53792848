"""Sampling of the next token as one Triton kernel, for small vocabularies: temperature, top-k, top-p and the choice.

No sort: rank and preceding mass of each token are counted pairwise, O(V²), V <= 1024. In torch it is a dozen kernels, a
sort among them, about 50 of the 945 µs of a decoding step at base size and batch 32 (docs/log.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_VOCAB = 1024
"""The largest vocabulary. Beyond it sorting is faster than comparing all pairs."""
CHUNK = 32
"""Tokens that are compared with all others at a time."""


@triton.jit
def _choose_kernel(
    logits_ptr, noise_ptr, tokens_ptr, V, temperature, top_p, top_k, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sample one token for one row of logits (B, V). Grid: (B,).

    p is the softmax numerator. A token is kept if fewer than top_k tokens rank before it, and if the tokens that rank
    before it have less than top_p of the mass that top-k leaves. Of equal logits the lower index ranks first. Among
    kept tokens the largest p / noise wins, which with exponential noise is a sample from p.
    """
    row_offset = tl.program_id(0).to(tl.int64) * V
    offs_v = tl.arange(0, BLOCK_V)
    s = tl.load(logits_ptr + row_offset + offs_v, mask=offs_v < V, other=float("-inf")).to(tl.float32) / temperature
    s_max = tl.max(s, 0)
    rank = tl.zeros([BLOCK_V], tl.int32)
    mass_before = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, CHUNK):
        offs_c = start + tl.arange(0, CHUNK)
        s_c = tl.load(logits_ptr + row_offset + offs_c, mask=offs_c < V, other=float("-inf"))
        s_c = s_c.to(tl.float32) / temperature
        before = s_c[None, :] > s[:, None]
        before = before | ((s_c[None, :] == s[:, None]) & (offs_c[None, :] < offs_v[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
        mass_before += tl.sum(tl.where(before, tl.exp(s_c - s_max)[None, :], 0.0), 1)
    p = tl.exp(s - s_max)
    in_top_k = (offs_v < V) & (rank < top_k)
    kept = in_top_k & (mass_before < top_p * tl.sum(tl.where(in_top_k, p, 0.0), 0))
    race = tl.where(kept, p / tl.load(noise_ptr + row_offset + offs_v, mask=offs_v < V, other=1.0), -1.0)
    tl.store(tokens_ptr + tl.program_id(0), tl.argmax(race, 0))


def choose(logits: Tensor, noise: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Sample a token for each row of logits: (B,), int64.

    Args:
        logits: (B, V), V at most MAX_VOCAB, of any floating type but float64.
        noise: (B, V), float32, samples of the exponential distribution.
        temperature: divides the logits; 0 chooses the most likely token.
        top_p: keep the most likely tokens up to this mass; 1 keeps all.
        top_k: keep this many of the most likely tokens; 0 keeps all.

    """
    B, V = logits.shape
    if temperature == 0:
        temperature, top_k = 1.0, 1
    tokens = torch.empty(B, dtype=torch.long, device=logits.device)
    block_v = triton.next_power_of_2(V)
    _choose_kernel[(B,)](
        logits.contiguous(), noise.contiguous(), tokens, V, temperature,
        2.0 if top_p == 1 else top_p,  # 2: keep all, however the sums are rounded
        top_k or V, BLOCK_V=block_v, CHUNK=CHUNK, num_warps=max(1, block_v // 32),
    )  # fmt: skip
    return tokens
