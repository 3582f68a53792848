"""FLOPs of a model and peak FLOPs of GPUs, for utilisation."""

from compressive.config import AnyModelConfig

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "4090": 165e12, "3090": 71e12}
"""Dense bf16 peak rates from data sheets, by a part of the device's name."""


def peak_flops(device_name: str) -> float | None:
    """Return the bf16 peak rate of a GPU, None if it is not listed."""
    return next((rate for part, rate in PEAK_FLOPS.items() if part in device_name), None)


def training_flops_per_token(config: AnyModelConfig) -> float:
    """Count multiplications and additions per token of a training step: forward once, backward twice.

    Of the causal part only the half that is visible is counted, of a position code its content and position
    products; recomputation is not counted, as it is not the model's.
    """
    if config.architecture == "wavenet":
        R, S = config.residual, config.skip
        layer = 2 * (config.kernel * R * 2 * R + R * R + R * S)
        return 3 * (config.n_layers * layer - 2 * R * R + 2 * S * S + 2 * S * config.vocab_size)
    D, T, V = config.d_model, config.window, config.vocab_size
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
    return 3 * (total + 2 * D * V)
