"""The reconstruction loss in one kernel against the reference, which attends twice, in Triton's interpreter."""

import pytest
import torch

from compressive.model.reconstruction import attention_reconstruction

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def kernels(monkeypatch):
    """The kernel module, with small tiles; without a GPU its kernels are interpreted (conftest.py)."""
    from compressive.kernels import reconstruction

    monkeypatch.setattr(reconstruction, "TILES", {name: {128: (16, 16, 4, 1)} for name in reconstruction.TILES})
    return reconstruction


def random_inputs(B, H, T, n, rate, K):
    """Queries, old and new slots; old ones are a slice of a larger tensor, as evicted slots are."""
    generator = torch.Generator().manual_seed(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    return (
        normal(B, T, H, K).transpose(1, 2),
        normal(B, 2 * n + T, 2, H, K)[:, n : 2 * n],
        normal(B, n // rate, 2, H, K),
    )


@pytest.mark.parametrize("shape", [(2, 1, 16, 32, 2, 16), (3, 2, 21, 40, 4, 16), (2, 1, 5, 3, 3, 32)])
def test_it_agrees_with_torch(kernels, shape):
    B, _, _, n, rate, _ = shape
    q, old, new = random_inputs(*shape)
    old_valid, new_valid = (torch.ones(B, count, dtype=torch.bool, device=DEVICE) for count in (n, n // rate))
    old_valid[0, : n // 2] = False
    new_valid[0, : n // rate // 2] = False
    new_valid[1] = False  # a row without a valid slot: its loss is finite, and does not count
    new.requires_grad_()
    per_row = kernels.attention_reconstruction(q, old, new, old_valid, new_valid)
    assert per_row.isfinite().all()
    counts = new_valid.any(dim=1)
    found = per_row[counts]
    want = attention_reconstruction(q.double(), old.double(), new.double(), old_valid, new_valid)[counts]
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=0)
    weights = 3 + torch.arange(len(found), device=DEVICE)  # rows have gradients of their own
    gradients = [torch.autograd.grad((weights * loss).sum(), new)[0] for loss in (found, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * float(gradients[1].abs().max()))


def test_shapes_are_known_without_running(kernels):
    with torch.device("meta"):
        q, old, new = torch.empty(2, 8, 3, 16), torch.empty(2, 12, 2, 3, 16), torch.empty(2, 4, 2, 3, 16)
        old_valid, new_valid = (torch.ones(2, n, dtype=torch.bool) for n in (12, 4))
        losses, *rest = kernels.compare(q, old, new, old_valid, new_valid)
    assert losses.shape == (2,)
    assert [x.shape for x in rest] == [(2, 3, 8, 16), (2, 3, 8), (2, 3, 8)]
