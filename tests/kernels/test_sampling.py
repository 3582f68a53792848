"""Sampling as one kernel against torch's, in Triton's interpreter: the same tokens from the same noise."""

import pytest
import torch
from attention_helpers import DEVICE

from compressive.inference.sampling import choose as reference_choose
from compressive.inference.sampling import filter_logits

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def choose():
    """The kernel; without a GPU it is interpreted (conftest.py)."""
    from compressive.kernels.sampling import choose

    return choose


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("V", [1, 7, 64, 100])
@pytest.mark.parametrize("settings", [
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
    {"temperature": 0.7, "top_p": 0.83, "top_k": 0},
    {"temperature": 1.3, "top_p": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.61, "top_k": 9},
    {"temperature": 0.0, "top_p": 0.9, "top_k": 0},
], ids=["all", "nucleus", "top-k", "both", "most likely"])  # fmt: skip
def test_the_same_tokens_are_sampled(choose, V, dtype, settings):
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, V)).round(decimals=1).to(dtype).to(DEVICE)  # many are equal
    noise = torch.empty(64, V, device=DEVICE).exponential_()
    found = choose(logits, noise, **settings)
    want = reference_choose(logits.cpu(), noise.cpu(), **settings)  # on a CPU the dispatcher chooses the reference
    assert found.dtype == want.dtype
    assert found.tolist() == want.tolist()


def test_excluded_tokens_are_never_sampled_even_where_noise_favours_them(choose):
    torch.manual_seed(0)
    logits = torch.randn(200, 20, device=DEVICE)
    kept = filter_logits(logits, top_p=0.5, top_k=6) > -torch.inf
    noise = torch.where(kept, 1e6, 1e-6)  # excluded tokens would win every race
    tokens = choose(logits, noise, temperature=1.0, top_p=0.5, top_k=6)
    assert kept.gather(1, tokens[:, None]).all()


def test_a_token_of_probability_zero_is_never_sampled(choose):
    logits = torch.full((4, 8), -torch.inf, device=DEVICE)
    logits[:, 3] = 1.0
    noise = torch.ones(4, 8, device=DEVICE)
    assert choose(logits, noise, temperature=1.0, top_p=0.98, top_k=0).tolist() == [3] * 4
