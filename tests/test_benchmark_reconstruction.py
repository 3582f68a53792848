"""The reconstruction loss in one kernel against torch's attention twice, in Triton's interpreter."""

import pytest
import torch
from helpers import benchmark

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(2, 1, 16, 32, 2, 16), (3, 2, 21, 40, 4, 16), (2, 1, 5, 3, 3, 32)])
def test_it_agrees_with_torch(monkeypatch, shape):
    *_, n, rate, _ = shape
    module = benchmark("reconstruction")
    monkeypatch.setattr(module, "TILES", {kernel: {128: (16, 16, 4, 1)} for kernel in module.TILES})
    case = module.Case(*shape, DEVICE, torch.float32)
    case.valid[0][0, : n // 2] = False
    case.valid[1][0, : n // rate // 2] = False
    case.valid[1][1] = False  # a lane with nothing to see
    want, found = case.torch(torch.float64), case.fused()
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=0)
    gradients = [torch.autograd.grad(3 * loss, case.new)[0] for loss in (found, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * float(gradients[1].abs().max()))
