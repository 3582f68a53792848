"""Clipping and Adam as one kernel against torch's, in Triton's interpreter: the same numbers and state."""

import pytest
import torch
from attention_helpers import DEVICE
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

pytest.importorskip("triton", reason="triton is not installed")

SIZES = ((3, 5), (1,), (40, 7), (64,)), ((16, 16), (2, 3, 4))  # of two groups


@pytest.fixture
def adam(monkeypatch):
    """The module; interpreted where there is no GPU, see conftest.py."""
    from compressive.kernels import adam

    monkeypatch.setattr(adam, "BLOCK", 64)  # so that some parameters take several programs
    return adam


def optimised(capturable):
    """Two groups of parameters, the same each time, and torch's Adam for all of them."""
    torch.manual_seed(0)
    groups = [[nn.Parameter(torch.randn(size, device=DEVICE)) for size in sizes] for sizes in SIZES]
    rate = torch.tensor(0.01, device=DEVICE) if capturable else 0.01
    every = [p for group in groups for p in group]
    optimiser = torch.optim.Adam(every, lr=rate, fused=True, capturable=capturable)
    for parameter in every:
        optimiser.state[parameter] = {
            "step": torch.zeros((), device=DEVICE),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return groups, optimiser


def give_gradients(groups, step, missing=False):
    """Gradients of the second group are small enough not to be clipped."""
    torch.manual_seed(step)
    for group, size in zip(groups, (3.0, 1e-4), strict=True):
        for parameter in group:
            parameter.grad = size * torch.randn(parameter.shape, device=DEVICE)
    if missing:
        groups[0][1].grad = None


def norms_of(groups):
    return [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]


def everything(groups, optimiser):
    return [x for group in groups for p in group for x in (p.detach(), *optimiser.state[p].values())]


@pytest.mark.parametrize("missing", [False, True], ids=["all", "one without a gradient"])
def test_it_is_clipping_and_adam(adam, missing):
    groups, optimiser = optimised(capturable=DEVICE == "cuda")
    update = adam.ClippedAdam(optimiser, groups, 0.5)
    theirs, reference = optimised(capturable=False)
    for step in range(5):
        give_gradients(groups, step, missing)
        update(norms_of(groups), torch.tensor(True, device=DEVICE))
        give_gradients(theirs, step, missing)
        for group, norm in zip(theirs, norms_of(theirs), strict=True):
            clip_grads_with_norm_(group, 0.5, norm)
        reference.step()
    torch.testing.assert_close(everything(groups, optimiser), everything(theirs, reference), rtol=1e-5, atol=1e-7)


def test_a_step_that_is_no_good_changes_nothing(adam):
    groups, optimiser = optimised(capturable=DEVICE == "cuda")
    update = adam.ClippedAdam(optimiser, groups, 0.5)
    give_gradients(groups, 0)
    update(norms_of(groups), torch.tensor(True, device=DEVICE))
    before = [x.clone() for x in everything(groups, optimiser)]
    groups[0][0].grad.fill_(torch.nan)
    update(norms_of(groups), torch.tensor(False, device=DEVICE))
    torch.testing.assert_close(everything(groups, optimiser), before, rtol=0, atol=0)


def test_gradients_may_lie_anywhere(adam):
    """Not at a multiple of 16 bytes, or transposed: they are copied."""
    found = []
    for odd in (False, True):
        groups, optimiser = optimised(capturable=DEVICE == "cuda")
        give_gradients(groups, 0)
        if odd:
            shifted = torch.zeros(65, device=DEVICE)[1:]
            groups[0][3].grad = shifted.copy_(groups[0][3].grad)
            groups[0][2].grad = groups[0][2].grad.T.contiguous().T
        adam.ClippedAdam(optimiser, groups, 0.5)(norms_of(groups), torch.tensor(True, device=DEVICE))
        found.append(everything(groups, optimiser))
    torch.testing.assert_close(*found, rtol=0, atol=0)
