"""The arithmetic that a model needs, against torch's own count of what it does."""

from typing import Any

import pytest
import torch
from helpers import random_tokens
from torch.utils.flop_counter import FlopCounterMode

from compressive import CompressiveLM, ModelConfig
from compressive.architectures import build_model
from compressive.config import RunConfig
from compressive.training.flops import peak_flops, training_flops_per_token, zipf_shares


@pytest.mark.parametrize("compressed", [0, 128])
def test_count_is_near_what_torch_counts(compressed):
    config = ModelConfig(vocab_size=512, n_layers=2, d_model=128, n_heads=2, d_ff=512, window=128, memory_size=128,
                         compressed_size=compressed, compression_rate=4)  # fmt: skip
    model, B = CompressiveLM(config), 8
    tokens = random_tokens(config, B, 128)
    with FlopCounterMode(display=False) as counter:
        out = model(tokens, model.initial_memory(B))
        torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens.flatten()).backward()
    done = counter.get_total_flops() / tokens.numel()
    # Torch also counts masked scores, position codes beyond the slots, and here no loss of compression's own.
    assert 0.75 < training_flops_per_token(config) / done < 1.1


def test_bands_cost_what_their_words_need():
    sizes: dict[str, Any] = {"vocab_size": 5000, "n_layers": 1, "d_model": 64, "n_heads": 2, "d_ff": 64, "window": 64}
    sizes |= {"memory_size": 0, "compressed_size": 0}
    plain, bands = ModelConfig(**sizes), ModelConfig(**sizes, adaptive_cutoffs=(500, 2000))
    shares = zipf_shares((0, 500, 2000, 5000))
    assert sum(shares) == pytest.approx(1)
    less = training_flops_per_token(plain) - training_flops_per_token(bands)
    narrow = 2 * 64 * (16 + 4)  # projected to and from
    assert less == pytest.approx(6 * (64 * 4498 - narrow - 16 * 1500 * shares[1] - 4 * 3000 * shares[2]))


def test_peak_rates():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("a toaster") is None


def test_a_wavenet_multiplies_each_of_its_weights_once():
    config = RunConfig.from_preset("speech-wavenet").model
    with torch.device("meta"):
        model = build_model(config)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n != "embedding.table.weight")
    assert training_flops_per_token(config) == 3 * 2 * matrices
