"""The reconstruction loss in one kernel against torch's attention twice, in Triton's interpreter."""

import pytest
import torch

from compressive.model.reconstruction import attention_reconstruction

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def fused(monkeypatch):
    """The kernels; interpreted where there is no GPU, see conftest.py."""
    from compressive.kernels import reconstruction as fused_reconstruction

    small = {kernel: {128: (16, 16, 4, 1)} for kernel in fused_reconstruction.TILES}
    monkeypatch.setattr(fused_reconstruction, "TILES", small)
    return fused_reconstruction


def slots_of(B, H, T, n, rate, K, kind):
    """Queries, old and new slots; evicted slots lie among others."""
    draw = torch.Generator().manual_seed(n)

    def normal(*shape):
        return torch.randn(*shape, generator=draw).to(DEVICE, kind)

    return (
        normal(B, T, H, K).transpose(1, 2),
        normal(B, 2 * n + T, 2, H, K)[:, n : 2 * n],
        normal(B, n // rate, 2, H, K),
    )


@pytest.mark.parametrize("shape", [(2, 1, 16, 32, 2, 16), (3, 2, 21, 40, 4, 16), (2, 1, 5, 3, 3, 32)])
def test_it_agrees_with_torch(fused, shape):
    B, _, _, n, rate, _ = shape
    query, old, new = slots_of(*shape, torch.float32)
    old_valid, new_valid = (torch.ones(B, count, dtype=torch.bool, device=DEVICE) for count in (n, n // rate))
    old_valid[0, : n // 2] = False
    new_valid[0, : n // rate // 2] = False
    new_valid[1] = False  # a lane with nothing to see
    counts = torch.ones(B, dtype=torch.bool, device=DEVICE)
    new.requires_grad_()
    found = fused.attention_reconstruction(query, old, new, old_valid, new_valid)[new_valid.any(dim=1)].mean()
    double = (x.detach().double() for x in (query, old))
    want = attention_reconstruction(*double, new.double(), old_valid, new_valid, counts)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=0)
    gradients = [torch.autograd.grad(3 * loss, new)[0] for loss in (found, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * float(gradients[1].abs().max()))


def test_shapes_are_known_without_running(fused):
    with torch.device("meta"):
        query, old, new = torch.empty(2, 8, 3, 16), torch.empty(2, 12, 2, 3, 16), torch.empty(2, 4, 2, 3, 16)
        old_valid, new_valid = (torch.ones(2, n, dtype=torch.bool) for n in (12, 4))
        losses, *rest = fused.compare(query, old, new, old_valid, new_valid)
    assert losses.shape == (2,)
    assert [x.shape for x in rest] == [(2, 3, 8, 16), (2, 3, 8), (2, 3, 8)]
