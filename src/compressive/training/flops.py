"""FLOPs of a model and peak FLOPs of GPUs, for utilisation."""

import math
from itertools import pairwise

from compressive.config import AnyModelConfig, ModelConfig

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "4090": 165e12, "3090": 71e12}
"""Dense bf16 peak rates from data sheets, by a part of the device's name."""


def peak_flops(device_name: str) -> float | None:
    """Return the bf16 peak rate of a GPU, None if it is not listed."""
    return next((rate for part, rate in PEAK_FLOPS.items() if part in device_name), None)


def training_flops_per_token(config: AnyModelConfig) -> float:
    """Count multiplications and additions per token of a training step: forward once, backward twice.

    Of the causal part only the half that is visible is counted, of a position code its content and position
    products; recomputation is not counted, as it is not the model's. Words of adaptive bands are taken to follow Zipf's
    law.
    """
    if config.architecture == "wavenet":
        R, S = config.residual, config.skip
        layer = 2 * (config.kernel * R * 2 * R + R * R + R * S)
        return 3 * (config.n_layers * layer - 2 * R * R + 2 * S * S + 2 * S * config.vocab_size)
    D, T = config.d_model, config.window
    total = 0.0
    layers = zip(config.memory_sizes, config.compressed_sizes, config.compression_rates, strict=True)
    for recent, compressed, rate in layers:
        memory = recent + compressed
        slots = memory + T
        total += 2 * (2 * D * D + 2 * D * D * slots / T)  # query and output; keys and values of all slots
        total += 2 * 3 * D * (memory + T / 2)  # content scores, position scores, values
        total += 2 * 2 * D * config.d_ff
        if compressed:
            if config.compression == "conv":
                total += 2 * D * D
            if config.compression_loss == "attention":
                total += 2 * 2 * D * D / rate + 2 * 2 * D * (T + T / rate) / 3  # the target needs no backward
    return 3 * (total + _output_flops(config))


def zipf_shares(edges: tuple[int, ...]) -> list[float]:
    """The share of words in each band of ranks, between edges from 0 to the size V of the vocabulary.

    By Zipf's law: the rank r, counted from 0, has probability log((r + 2) / (r + 1)) / log(V + 1), nearly 1 / r.
    """
    return [math.log((high + 1) / (low + 1)) / math.log(edges[-1] + 1) for low, high in pairwise(edges)]


def _output_flops(config: ModelConfig) -> float:
    """Of the output layer, forward, per token; with bands also of what leads to them from their narrow tables."""
    D, V = config.d_model, config.vocab_size
    if not config.adaptive_cutoffs:
        return 2 * D * V
    edges = (0, *config.adaptive_cutoffs, V)
    sizes, shares = [high - low for low, high in pairwise(edges)], zipf_shares(edges)
    widths = [D // config.adaptive_factor**i for i in range(len(sizes))]
    total = 2.0 * D * (sizes[0] + len(sizes) - 1)
    total += 2 * D * D * 2 * config.first_band_projections
    for size, width, share in zip(sizes[1:], widths[1:], shares[1:], strict=True):
        total += 2 * D * width * 2 + 2 * width * size * share
    return total
