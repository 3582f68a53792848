"""The mixture of logistics: a distribution over all codes, exact far out, trained."""

import itertools
import math

import pytest
import torch
from helpers import tiny_config

from compressive import CompressiveLM
from compressive.model.mixture import LEAST_LOG_SCALE, LogisticMixture


def head_with(means, log_scales, vocab_size=65_536, dtype=torch.float64):
    """A head that gives this mixture, equal weights, whatever it reads."""
    head = LogisticMixture(vocab_size, 4, 4, len(means)).to(dtype)
    with torch.no_grad():
        head.output.weight.zero_()
        head.output.bias.copy_(torch.tensor([0.0] * len(means) + list(means) + list(log_scales)))
    return head


@pytest.mark.parametrize(
    ("means", "log_scales"),
    [
        ([0.0], [-3.0]),
        ([0.3, -0.6, 0.01], [-9.0, -2.0, -11.0]),
        ([5.0, -7.0], [-1.0, 2.0]),  # mostly beyond the extremes, which own what lies there
        ([0.5], [-30.0]),  # sharper than a step: the scale is held
    ],
)
def test_all_65536_probabilities_sum_to_one(means, log_scales):
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
        logits = head_with(means, log_scales, dtype=dtype).logits(torch.zeros(4, dtype=dtype))
        assert logits.shape == (65_536,)
        assert logits.double().exp().sum().item() == pytest.approx(1, abs=tolerance)


def test_random_heads_are_distributions_too():
    torch.manual_seed(0)
    head = LogisticMixture(65_536, 8, 8, 10).double()
    torch.testing.assert_close(
        head.logits(3 * torch.randn(2, 8).double()).exp().sum(-1), torch.ones(2, dtype=torch.float64)
    )


def test_only_the_extreme_codes_own_what_lies_beyond_them():
    head = head_with([0.0], [0.0], vocab_size=8)
    found = head.logits(torch.zeros(4, dtype=torch.float64)).exp()
    edges = [-math.inf, *((code + 0.5 - 4) / 4 for code in range(7)), math.inf]
    distribution = [1 / (1 + math.exp(-edge)) for edge in edges]
    expected = torch.tensor([b - a for a, b in itertools.pairwise(distribution)])
    torch.testing.assert_close(found, expected.double())


def test_far_targets_cost_much_but_never_infinitely_and_have_gradients():
    head = head_with([-1.0], [LEAST_LOG_SCALE], dtype=torch.float32)
    hidden = torch.zeros(1, 1, 4, requires_grad=True)
    nll = head.nll(hidden, torch.tensor([[65_535]]))
    nll.sum().backward()
    assert nll.isfinite().all()
    assert nll.item() > 1e5
    assert head.output.bias.grad.isfinite().all()
    assert head.output.bias.grad.abs().max() > 0


def test_scores_of_targets_are_those_of_all_codes():
    torch.manual_seed(0)
    head = LogisticMixture(512, 6, 6, 3).double()
    hidden, targets = torch.randn(2, 5, 6).double(), torch.randint(512, (2, 5))
    all_of_them = head.logits(hidden).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(head.nll(hidden, targets), -all_of_them)


def test_half_precision_does_not_reach_the_mixture():
    torch.manual_seed(0)
    head = LogisticMixture(65_536, 16, 16, 4)
    hidden, targets = torch.randn(1, 3, 16), torch.randint(65_536, (1, 3))
    with torch.autocast("cpu", torch.bfloat16):
        half = head.nll(hidden, targets)
    torch.testing.assert_close(half, head.nll(hidden, targets))


def test_codes_that_differ_in_either_byte_are_embedded_apart():
    head = LogisticMixture(65_536, 4, 4, 2)
    codes = torch.tensor([0, 1, 256, 257, 65_535])
    assert len({tuple(row.tolist()) for row in head(codes)}) == len(codes)


def test_a_language_model_can_have_it_and_learns():
    torch.manual_seed(0)
    config = tiny_config(vocab_size=65_536, head="logistics", mixtures=2)
    model = CompressiveLM(config)
    tokens = 32_768 + (8000 * torch.sin(torch.arange(5.0))).long()[None].repeat(3, 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = model(tokens[:, :-1], model.initial_memory(3), targets=tokens[:, 1:]).nll.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    logits, _ = model.step(tokens[:, 0], model.decoding_state(model.initial_memory(3)))
    assert logits.shape == (3, 65_536)


@pytest.mark.parametrize("values", [{"vocab_size": 11}, {"vocab_size": 65_538}])
def test_codes_that_are_no_samples_are_refused(values):
    with pytest.raises(ValueError, match="expected an even number of ordered codes"):
        tiny_config(head="logistics", **values)
