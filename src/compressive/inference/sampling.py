"""From scores to a token: temperature, top-k and nucleus sampling (Holtzman et al. 2019), all on the device."""

import math
from typing import TypedDict

import torch
from torch import Tensor

from compressive.kernels.dispatch import operation
from compressive.model.attention import upcast

LOWEST_TEMPERATURE = 1e-30
"""Scores up to 1e8 divided by it are still finite in float32."""


class Sampling(TypedDict, total=False):
    """How to sample, as keyword arguments; defaults are those of `inference.generate.continue_from`."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample one token from each row, (B, V) to (B,); a temperature of 0 takes the most likely."""
    check_sampling(temperature, top_p, top_k)
    noise = torch.empty_like(upcast(logits)).exponential_(generator=generator)
    return choose(logits, noise, temperature=temperature, top_p=top_p, top_k=top_k)


@operation("sampling")
def choose(logits: Tensor, noise: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Sample as `sample` does, given noise (B, V) from the exponential distribution, so that a graph can capture it.

    A race: the token with the smallest noise / p wins, which happens with probability p.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    kept = filter_logits(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    return (kept.softmax(dim=-1) / noise).argmax(dim=-1)


def filter_logits(logits: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Scale logits (..., V) by the temperature, then set what may not be sampled to minus infinity.

    Of the top_k most likely tokens (0: of all) the smallest set whose probability among them reaches top_p stays;
    the most likely always does. Of equals the one with the lower number counts as more likely, so that the
    number kept is always that of the definition.
    """
    check_sampling(temperature, top_p, top_k)
    logits = upcast(logits)
    if temperature == 0:
        top_k = 1
    else:
        logits = logits / temperature
    if top_p == 1 and not 0 < top_k < logits.shape[-1]:
        return logits

    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ranked[..., top_k:] = -torch.inf
    if top_p < 1:
        reached = ranked.softmax(dim=-1).cumsum(dim=-1)
        ranked[..., 1:].masked_fill_(reached[..., :-1] >= top_p, -torch.inf)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def check_sampling(temperature: float, top_p: float, top_k: int) -> None:
    """Refuse settings that mean nothing, naming what was expected."""
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}: expected a number of at least 0; 0 takes the most likely token")
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature={temperature}: expected 0 or at least {LOWEST_TEMPERATURE}, below which float32 overflows; "
            "0 takes the most likely token"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: expected a probability above 0, up to 1; 1 cuts nothing off")
    if top_k < 0:
        raise ValueError(f"top_k={top_k}: expected a whole number of at least 0; 0 cuts nothing off")
