"""Linear maps against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compressive.kernels.linear import autocasted
from compressive.kernels.linear import linear as kernel
from compressive.model.linear import Linear, linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def gradients(out, *inputs):
    torch.manual_seed(1)
    return torch.autograd.grad(out, inputs, torch.randn_like(out))


@pytest.mark.parametrize("n_frozen", [0, 3, 7])
def test_frozen_rows_get_no_gradient_and_all_else_the_same(n_frozen):
    torch.manual_seed(0)
    x, weight = normal(2, 7, 5), normal(4, 5)
    out, want = linear(x, weight, n_frozen=n_frozen), F.linear(x, weight)
    torch.testing.assert_close(out, want)
    (d_x, d_weight), (want_x, want_weight) = gradients(out, x, weight), gradients(want, x, weight)
    torch.testing.assert_close(d_weight, want_weight)
    torch.testing.assert_close(d_x[:, n_frozen:], want_x[:, n_frozen:])
    assert d_x[:, :n_frozen].eq(0).all()


@pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])
@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=["rows", "windows"])
def test_maps_and_their_gradients(shape, relu):
    torch.manual_seed(0)
    x, weight, bias = normal(*shape), normal(4, 5), normal(4)
    out, want = kernel(x, weight, bias, relu=relu), F.linear(x, weight, bias)
    if relu:
        want = F.relu(want)
        assert 0 < want.eq(0).sum() < want.numel()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(gradients(out, x, weight, bias), gradients(want, x, weight, bias))
    x.requires_grad_(False)
    torch.testing.assert_close(
        gradients(kernel(x, weight, bias), weight, bias), gradients(F.linear(x, weight, bias), weight, bias)
    )
    torch.testing.assert_close(gradients(kernel(x, weight), weight), gradients(F.linear(x, weight), weight))


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in a thread that has done nothing on the GPU yet
@pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])
def test_products_are_in_the_type_that_autocast_gives_and_gradients_in_that_of_weights(relu):
    torch.manual_seed(0)
    module, x = Linear(64, 32, device=DEVICE), torch.randn(2, 300, 64, device=DEVICE).requires_grad_()
    inputs = x, module.weight, module.bias
    with torch.autocast(DEVICE, torch.bfloat16):
        out = kernel(x, module.weight, module.bias, relu=relu)
        want = F.linear(*inputs)
        want = F.relu(want) if relu else want
        assert [tensor.dtype for tensor in autocasted(x, module.weight)] == [torch.bfloat16] * 2
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want)
    found, exact = gradients(out, *inputs), gradients(want, *inputs)
    assert [tensor.dtype for tensor in found] == [torch.float32] * 3
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
    assert [tensor.dtype for tensor in autocasted(x, module.weight)] == [torch.float32] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_of_weights_are_not_rounded_on_a_gpu():
    torch.manual_seed(0)
    module, x = Linear(64, 32, device=DEVICE), torch.randn(600, 64, device=DEVICE).bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = module(x)
    gradient = torch.randn_like(out)
    (d_weight,) = torch.autograd.grad(out, module.weight, gradient)
    exact = gradient.double().T @ x.double()
    assert (d_weight - exact).norm() < 1e-5 * exact.norm()


def test_what_is_called_is_the_same_everywhere():
    torch.manual_seed(0)
    module, plain = Linear(5, 4, device=DEVICE), nn.Linear(5, 4, device=DEVICE)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 3, 5, device=DEVICE)
    for kind in (torch.float32, torch.bfloat16):
        with torch.autocast(DEVICE, kind, enabled=kind == torch.bfloat16):
            torch.testing.assert_close(module(x), plain(x))
            torch.testing.assert_close(linear(x, module.weight, module.bias, relu=True), F.relu(plain(x)))
