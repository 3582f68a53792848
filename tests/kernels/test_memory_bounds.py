"""The fixture that looks for accesses outside of a kernel's operands, and kernels of real tiles under it."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl

from compressive.kernels import dispatch
from compressive.kernels.reconstruction import attention_reconstruction
from compressive.kernels.relative_attention import relative_attention

pytestmark = pytest.mark.skipif(not dispatch.INTERPRETED, reason="of interpreted kernels only")


@triton.jit
def _copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n, other=0.0), mask=offs < n)


@pytest.mark.parametrize(("n", "outside"), [(5, False), (6, True)])
def test_an_access_behind_the_last_element_is_found(inside_their_operands, n, outside):
    buffer = torch.zeros(64)
    _copy_kernel[(1,)](buffer[:5], buffer[32:37], n, BLOCK=8)
    found = inside_their_operands.outside.copy()
    inside_their_operands.outside.clear()
    assert bool(found) == outside
    assert all(access.startswith("_copy_kernel: create_masked_") for access in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "partly"),
    [
        ((1, 1, 384, 576, 384, 64), False),  # whole tiles of queries and slots, but not of rows of scores
        ((4, 1, 77, 5, 200, 128), True),
        ((1, 1, 130, 33, 100, 32), True),
    ],
)
def test_tiles_as_they_are_on_a_gpu(shape, partly):
    B, H, T, C, M, K = shape
    torch.manual_seed(0)
    shapes = [
        (B, H, T, K),
        (B, C + M + T, 2, H, K),
        (H, C + M + 2 * T, K),
        (H, K),
        (H, K),
        (H, C + M + 2 * T, K),
        (H, K),
    ]
    q, kv, r, u, v, r_far, v_far = leaves = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    valid = torch.rand(B, C + M) < (0.7 if partly else 2)
    segments = (torch.rand(B, T) < 0.02).long().cumsum(1) if partly else None
    far = {"r_far": r_far, "v_far": v_far, "n_compressed": C} if partly else {}
    out, _ = relative_attention(q, kv, r, u, v, valid, segments, **far, dropout=0.1 * partly, with_usage=partly)
    new = kv[:, : max(1, T // 3)]
    loss = attention_reconstruction(
        q.detach(), kv.detach()[:, :T], new, valid[:, :T].new_ones(B, T), valid.new_ones(B, new.shape[1])
    )
    gradients = torch.autograd.grad(out.float().sum() + loss.sum(), leaves, allow_unused=True)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
