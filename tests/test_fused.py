"""The fused kernels against the readable attention, in Triton's interpreter: any shape, both schemes, all masks."""

import pytest
import torch
from helpers import build, tiny_config

from compressive.model.attention import KERNEL_WIDTHS, Biases, Positions, Projected, relative_attention

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def fused(monkeypatch):
    """The kernels; interpreted where there is no GPU, see conftest.py."""
    from compressive.model import fused

    monkeypatch.setattr(fused, "BLOCK", 16)  # more tiles in less time
    return fused


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # lanes, heads, window, compressed, recent, width of a head
    "blocks": (2, 1, 32, 16, 16, 16),
    "odd": (2, 2, 19, 13, 18, 16),
    "no compressed": (2, 1, 33, 0, 19, 16),
    "no memory": (2, 1, 17, 0, 0, 32),
    "no recent": (2, 1, 16, 35, 0, 16),
    "tiny": (2, 1, 3, 2, 1, 16),
    "nothing remembered": (2, 1, 17, 16, 20, 64),
}


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("segmented", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_the_readable_attention(fused, name, segmented, separate):
    B, H, T, C, M, K = SHAPES[name]
    N, draw = C + M + T, torch.Generator().manual_seed(len(name))

    def leaf(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    query, key_value = leaf(B, T, H, K), leaf(B, N, 2, H, K)
    u, v_near, r_near = leaf(H, K), leaf(H, K), leaf(N + T, H, K)
    v_far, r_far = (leaf(H, K), leaf(N + T, H, K)) if separate else (v_near, r_near)
    leaves = [query, key_value, u, v_near, r_near] + [v_far, r_far] * separate
    valid = torch.rand(B, C + M, generator=draw) > 0.3
    valid[0] = True  # a lane that sees all of its memory
    valid[1] &= name != "nothing remembered"  # whole tiles of which nothing is seen
    ids = (torch.rand(B, T, generator=draw) < 0.15).cumsum(dim=1) if segmented else None
    if ids is not None:
        ids[0] = 0  # and in which no document starts

    def heads(x):
        return x.transpose(-3, -2)

    want, usage = relative_attention(
        Projected(heads(query), key_value), Biases(u, v_near, v_far),
        Positions(heads(r_near), heads(r_far)), valid, ids, C, with_usage=True,
    )  # fmt: skip
    gradient = torch.randn(want.shape, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(want, leaves, gradient)

    inputs = [x.float().to(DEVICE) for x in (query, key_value, u, v_near, v_far, r_near, r_far)]
    open_lanes = valid.all(dim=1) & (torch.tensor(True) if ids is None else ids[:, -1] == 0)
    masks = [None if x is None else x.to(DEVICE) for x in (valid, open_lanes, ids)]
    rest = (*masks, C, separate)
    got, *kept = fused.attend(*inputs, *rest)
    torch.testing.assert_close(heads(got).double().cpu(), want, rtol=1e-5, atol=1e-5)
    received = fused.attention_received(inputs[1], *inputs[-2:], *rest, *kept)
    torch.testing.assert_close(received.double().cpu(), usage, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(got, leaves, heads(gradient).float().to(DEVICE))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("size", [1.0, 40.0], ids=["small scores", "large scores"])
def test_half_precision(fused, size, separate):
    """What packing 16-bit numbers costs, up to scores of some hundreds, as trained models have them.

    In float16, as the interpreter multiplies bfloat16 wrongly.
    """
    B, H, T, C, M, K = 2, 1, 21, 13, 18, 16
    N, draw = C + M + T, torch.Generator().manual_seed(0)

    def leaf(*shape, size=1.0):
        return (size * torch.randn(*shape, generator=draw)).half().double().requires_grad_()

    query, key_value = leaf(B, T, H, K, size=size), leaf(B, N, 2, H, K)
    u, v_near, r_near = leaf(H, K), leaf(H, K), leaf(N + T, H, K)
    v_far, r_far = (leaf(H, K), leaf(N + T, H, K)) if separate else (v_near, r_near)
    leaves = [query, key_value, u, v_near, r_near] + [v_far, r_far] * separate
    valid = torch.ones(B, C + M, dtype=torch.bool)
    valid[1, : C + 3] = False
    tables = Positions(*(x.transpose(0, 1) for x in (r_near, r_far)))
    want, _ = relative_attention(
        Projected(query.transpose(1, 2), key_value), Biases(u, v_near, v_far), tables, valid, None, C
    )
    gradient = torch.randn(want.shape, generator=draw).half().double()
    expected = [want, *torch.autograd.grad(want, leaves, gradient)]
    inputs = [x.half() if x.ndim > 2 else x.float() for x in (query, key_value, u, v_near, v_far, r_near, r_far)]
    inputs = [x.to(DEVICE) for x in (*inputs, valid, valid.all(dim=1))]
    got, *_ = fused.attend(*inputs, None, C, separate)
    given = torch.autograd.grad(got, leaves, gradient.transpose(1, 2).half().to(DEVICE))
    found = [got.transpose(1, 2).cpu(), *given]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("width", KERNEL_WIDTHS)
def test_a_hidden_score_is_exact_when_scaled(fused, width):
    """GPUs round a product and a difference once, together: equal scores must leave no error of rounding behind."""
    hidden, scale = torch.tensor(fused.HIDDEN.value), torch.tensor(width**-0.5 * fused.LOG2_E)
    assert float(hidden * scale) == float(hidden) * float(scale)
    assert float(hidden * scale) < -1e20


def test_shapes_are_known_without_running(fused):
    with torch.device("meta"):
        q, k, u, r = (torch.empty(shape) for shape in ((2, 8, 3, 16), (2, 20, 2, 3, 16), (3, 16), (28, 3, 16)))
        valid = torch.ones(2, 12, dtype=torch.bool)
        out, lse, queries = fused.attend(q, k, u, u, u, r, r, valid, valid[:, 0], None, 4, False)
        received = fused.attention_received(k, r, r, valid, valid[:, 0], None, 4, False, lse, queries)
    assert (out.shape, lse.shape, queries.shape) == ((2, 8, 3, 16), (2, 3, 8), (2, 2, 8, 3, 16))
    assert received.shape == (2, 20)


@pytest.mark.parametrize("model", [
    {}, {"compression": "most_used", "compression_loss": "none"}, {"compressed_positions": "separate", "norm": "pre"},
])  # fmt: skip
def test_a_model_is_the_same_with_either(fused, model):
    """Losses, gradients and memories over some windows, a document starting in the middle of one."""
    config = tiny_config(d_model=16, n_heads=1, window=12, memory_size=12, compressed_size=6, **model)
    readable, other = build(config).float().to(DEVICE), build(config).float().to(DEVICE)
    other.trunk.use_attention("fused")
    chosen = [m.trunk.layers[0].attention.chosen(torch.device(DEVICE), torch.float32) for m in (readable, other)]
    assert chosen == ["readable", "fused"]
    tokens = torch.randint(config.vocab_size, (2, 49), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    starts = torch.zeros(2, 12, dtype=torch.bool, device=DEVICE)
    starts[1, 5] = True
    found = []
    for model_ in (readable, other):
        memory, total = model_.initial_memory(2), 0.0
        for i in range(0, 48, 12):
            out = model_(tokens[:, i : i + 12], memory, tokens[:, i + 1 : i + 13], starts if i == 24 else None)
            memory, total = out.memory.detach(), total + out.nll.mean() + out.compression_loss
        total.backward()
        found.append((total, memory.state_dict(), {n: p.grad for n, p in model_.named_parameters()}))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_what_it_cannot_do_is_refused(fused):
    for values in ({"d_model": 24, "n_heads": 2}, {"d_model": 32, "n_heads": 2, "attention_dropout": 0.1}):
        with pytest.raises(ValueError, match=r"attention='fused': heads are 1[26] wide.*or readable"):
            build(tiny_config(**values)).trunk.use_attention("fused")
