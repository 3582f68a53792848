"""Clipping and Adam in one kernel against torch's, in Triton's interpreter: the same parameters and state."""

import pytest
import torch
from attention_helpers import DEVICE
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

pytest.importorskip("triton", reason="triton is not installed")

SIZES = ((3, 5), (1,), (40, 7), (64,)), ((16, 16), (2, 3, 4))  # of the parameters of two groups


@pytest.fixture
def adam(monkeypatch):
    """The kernel module; without a GPU its kernels are interpreted (conftest.py)."""
    from compressive.kernels import adam

    monkeypatch.setattr(adam, "BLOCK", 64)  # some parameters take several programs
    return adam


def optimised(capturable):
    """Two groups of parameters, the same at each call, and torch's Adam over all of them."""
    torch.manual_seed(0)
    groups = [[nn.Parameter(torch.randn(size, device=DEVICE)) for size in sizes] for sizes in SIZES]
    rate = torch.tensor(0.01, device=DEVICE) if capturable else 0.01
    parameters = [p for group in groups for p in group]
    optimiser = torch.optim.Adam(parameters, lr=rate, fused=True, capturable=capturable)
    for parameter in parameters:
        optimiser.state[parameter] = {
            "step": torch.zeros((), device=DEVICE),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return groups, optimiser


def set_gradients(groups, step, missing=False):
    """Random gradients. Those of the second group are too small to be clipped."""
    torch.manual_seed(step)
    for group, size in zip(groups, (3.0, 1e-4), strict=True):
        for parameter in group:
            parameter.grad = size * torch.randn(parameter.shape, device=DEVICE)
    if missing:
        groups[0][1].grad = None


def norms_of(groups):
    return [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]


def parameters_and_state(groups, optimiser):
    return [x for group in groups for p in group for x in (p.detach(), *optimiser.state[p].values())]


@pytest.mark.parametrize("missing", [False, True], ids=["all", "one without a gradient"])
def test_it_is_clipping_and_adam(adam, missing):
    groups, optimiser = optimised(capturable=DEVICE == "cuda")
    update = adam.ClippedAdam(optimiser, groups, 0.5)
    theirs, reference = optimised(capturable=False)
    for step in range(5):
        set_gradients(groups, step, missing)
        update(norms_of(groups), torch.tensor(True, device=DEVICE))
        set_gradients(theirs, step, missing)
        for group, norm in zip(theirs, norms_of(theirs), strict=True):
            clip_grads_with_norm_(group, 0.5, norm)
        reference.step()
    found, want = parameters_and_state(groups, optimiser), parameters_and_state(theirs, reference)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)


def test_a_step_that_is_not_good_changes_nothing(adam):
    groups, optimiser = optimised(capturable=DEVICE == "cuda")
    update = adam.ClippedAdam(optimiser, groups, 0.5)
    set_gradients(groups, 0)
    update(norms_of(groups), torch.tensor(True, device=DEVICE))
    before = [x.clone() for x in parameters_and_state(groups, optimiser)]
    groups[0][0].grad.fill_(torch.nan)
    update(norms_of(groups), torch.tensor(False, device=DEVICE))
    torch.testing.assert_close(parameters_and_state(groups, optimiser), before, rtol=0, atol=0)


def test_gradients_may_have_any_layout(adam):
    """Gradients that are transposed, or not aligned to 16 bytes, are copied."""
    found = []
    for odd in (False, True):
        groups, optimiser = optimised(capturable=DEVICE == "cuda")
        set_gradients(groups, 0)
        if odd:
            shifted = torch.zeros(65, device=DEVICE)[1:]
            groups[0][3].grad = shifted.copy_(groups[0][3].grad)
            groups[0][2].grad = groups[0][2].grad.T.contiguous().T
        adam.ClippedAdam(optimiser, groups, 0.5)(norms_of(groups), torch.tensor(True, device=DEVICE))
        found.append(parameters_and_state(groups, optimiser))
    torch.testing.assert_close(*found, rtol=0, atol=0)
