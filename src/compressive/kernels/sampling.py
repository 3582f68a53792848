"""`choose` as one Triton kernel, for small vocabularies: a dozen small ones else, after every step of a model.

Nothing is sorted. How many tokens are more likely than one, and how much they weigh together, is counted for each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_VOCAB = 1024
"""In larger vocabularies sorting is faster than holding every token against every other."""
CHUNK = 32
"""So many others are held against all tokens at a time."""


@triton.jit
def _choose(
    logits, noise, tokens, V, temperature, top_p, top_k, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * V
    at = tl.arange(0, BLOCK)
    score = tl.load(logits + row + at, mask=at < V, other=float("-inf")).to(tl.float32) / temperature
    largest = tl.max(score, 0)
    rank = tl.zeros([BLOCK], tl.int32)
    before = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, CHUNK):
        others = first + tl.arange(0, CHUNK)
        theirs = tl.load(logits + row + others, mask=others < V, other=float("-inf")).to(tl.float32) / temperature
        ahead = theirs[None, :] > score[:, None]
        ahead = ahead | ((theirs[None, :] == score[:, None]) & (others[None, :] < at[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
        before += tl.sum(tl.where(ahead, tl.exp(theirs - largest)[None, :], 0.0), 1)
    weight = tl.exp(score - largest)
    among = (at < V) & (rank < top_k)
    kept = among & (before < top_p * tl.sum(tl.where(among, weight, 0.0), 0))
    race = tl.where(kept, weight / tl.load(noise + row + at, mask=at < V, other=1.0), -1.0)
    tl.store(tokens + tl.program_id(0), tl.argmax(race, 0))


def choose(logits: Tensor, noise: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Draw as `choose` does, from logits (B, V)."""
    B, V = logits.shape
    if temperature == 0:
        temperature, top_k = 1.0, 1
    tokens = torch.empty(B, dtype=torch.long, device=logits.device)
    block = triton.next_power_of_2(V)
    _choose[(B,)](
        logits.contiguous(), noise.contiguous(), tokens, V, temperature,
        2.0 if top_p == 1 else top_p,  # all of it, however sums are rounded
        top_k or V, BLOCK=block, CHUNK=CHUNK, num_warps=max(1, block // 32),
    )  # fmt: skip
    return tokens
