"""The add_norm kernels against torch's layer norm of a sum, in Triton's interpreter: values and all gradients."""

import pytest
import torch
from attention_helpers import DEVICE
from helpers import build, tiny_config
from torch import nn

from compressive.model import transformer

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def kernels(monkeypatch):
    """The kernel module; without a GPU its kernels are interpreted (conftest.py)."""
    from compressive.kernels import add_norm

    monkeypatch.setattr(add_norm, "BACKWARD_WARPS", 3)  # few programs, so that each has several rows
    return add_norm


def case(shape, dtype=torch.float32):
    """A layer norm with random weight and bias, and two tensors to add."""
    torch.manual_seed(0)
    module = nn.LayerNorm(shape[-1], device=DEVICE)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    x, y = (3 + torch.randn(shape, device=DEVICE) for _ in range(2))
    return module, x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()


def with_gradients(out, *inputs):
    torch.manual_seed(1)
    return out, *torch.autograd.grad(out, inputs, torch.randn_like(out))


@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 16), (2, 31, 24), (70, 100)], ids=str)
def test_it_is_the_norm_of_the_sum(kernels, shape):
    module, x, y = case(shape)
    inputs = x, y, module.weight, module.bias
    found = with_gradients(kernels.add_norm(x, y, module.weight, module.bias, module.eps), *inputs)
    torch.testing.assert_close(found, with_gradients(module(x + y), *inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_half_precision_is_rounded_only_at_the_end(kernels, x_dtype):
    module, x, y = case((40, 64), torch.bfloat16)
    x = x.detach().to(x_dtype).requires_grad_()
    inputs = x, y, module.weight, module.bias
    found = with_gradients(kernels.add_norm(x, y, module.weight, module.bias, module.eps), *inputs)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, x_dtype, torch.bfloat16, torch.float32, torch.float32]
    torch.manual_seed(1)
    exact = module(x.float() + y.float())
    want = exact, *torch.autograd.grad(exact, inputs, torch.randn_like(found[0]).float())
    for ours, theirs in zip(found, want, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.004 * theirs.float().norm()


def test_shapes_are_known_without_running(kernels):
    module, x, y = case((2, 5, 16))
    real = with_gradients(
        kernels.add_norm(x, y, module.weight, module.bias, module.eps), x, y, module.weight, module.bias
    )
    with torch.device("meta"):
        meta = [torch.empty_like(z, device="meta") for z in (x, y, module.weight, module.bias)]
        out = kernels.norm(*meta, module.eps)
        d_sum, d_affine = kernels._norm_backward(*meta[:3], *out[1:], out[0])
    assert (out[0].shape, d_sum.shape, d_affine.shape) == (real[0].shape, real[2].shape, (2, 16))
    assert out[0].dtype == real[0].dtype


def test_a_model_is_the_same_with_it(kernels, monkeypatch):
    model = build(tiny_config(), dtype=torch.float32).to(DEVICE)
    x = torch.randn(2, model.config.window, model.config.d_model, device=DEVICE)
    memory = model.trunk.initial_memory(2)
    want = model.trunk(x, memory).hidden  # in float32 the dispatcher chooses the reference
    monkeypatch.setattr(transformer, "add_norm", kernels.add_norm)
    torch.testing.assert_close(model.trunk(x, memory).hidden, want, rtol=1e-4, atol=1e-5)
