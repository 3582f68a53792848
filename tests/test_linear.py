"""Linear maps against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compressive.model.linear import _LinearReLU, autocasted, frozen_linear, linear_relu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def gradients(out, *inputs):
    torch.manual_seed(1)
    return torch.autograd.grad(out, inputs, torch.randn_like(out), allow_unused=True)


@pytest.mark.parametrize("n_frozen", [0, 3, 7])
def test_frozen_rows_get_no_gradient_and_all_else_the_same(n_frozen):
    torch.manual_seed(0)
    x, weight = normal(2, 7, 5), normal(4, 5)
    out, want = frozen_linear(x, weight, n_frozen), F.linear(x, weight)
    torch.testing.assert_close(out, want)
    (d_x, d_weight), (want_x, want_weight) = gradients(out, x, weight), gradients(want, x, weight)
    torch.testing.assert_close(d_weight, want_weight)
    torch.testing.assert_close(d_x[:, n_frozen:], want_x[:, n_frozen:])
    assert d_x[:, :n_frozen].eq(0).all()


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=["rows", "windows"])
def test_the_relu_that_a_product_takes_along(shape):
    torch.manual_seed(0)
    x, weight, bias = normal(*shape), normal(4, 5), normal(4)
    out, want = _LinearReLU.apply(x, weight, bias), F.relu(F.linear(x, weight, bias))
    assert 0 < want.eq(0).sum() < want.numel()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(gradients(out, x, weight, bias), gradients(want, x, weight, bias))


def test_it_is_in_the_type_that_autocast_gives():
    torch.manual_seed(0)
    linear, x = nn.Linear(5, 4, device=DEVICE), torch.randn(2, 3, 5, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, want = linear_relu(x, linear), F.relu(linear(x))
        assert [tensor.dtype for tensor in autocasted(x, linear.weight)] == [torch.bfloat16] * 2
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want)
    assert [tensor.dtype for tensor in autocasted(x, linear.weight)] == [torch.float32] * 2
