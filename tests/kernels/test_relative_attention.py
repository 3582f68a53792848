"""The fused kernels against the reference attention, in Triton's interpreter: any shape, both schemes, all masks."""

import pytest
import torch
from attention_helpers import DEVICE, SHAPES, assert_agree, compare
from helpers import build, tiny_config

from compressive.kernels import dispatch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def fused(monkeypatch):
    """The kernels; interpreted where there is no GPU, see conftest.py."""
    from compressive.kernels import relative_attention as fused

    monkeypatch.setattr(fused, "TILES", {kernel: {128: (16, 16, 4, 1)} for kernel in fused.TILES})  # more in less time
    monkeypatch.setattr(fused, "ALIGNED", 16)
    return fused


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("segmented", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_the_reference_attention(fused, name, segmented, separate):
    assert_agree(*compare(fused.relative_attention, name, segmented, separate))


@pytest.mark.parametrize("name", ["odd", "no recent", "nothing remembered"])
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_scores_that_nobody_may_see_can_be_anything(fused, monkeypatch, name, separate):
    """They are not computed: what memory held before is reckoned with, and then not looked at.

    Kernels read what others have written, in tiles of other sizes: so there is something that was not.
    """
    large = {"forward": (32, 32, 4, 1), "content": (32, 32, 4, 1), "positions": (16, 32, 4, 1), "table": (16, 32, 4, 1)}
    for kernel, tile in large.items():
        monkeypatch.setitem(fused.TILES, kernel, {128: tile})
    monkeypatch.setattr(fused, "ALIGNED", 32)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2).isnan().all()  # what memory held before, from here on
        found = compare(fused.relative_attention, name, True, separate)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_agree(*found)


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_queries_that_are_scored_together_fill_several_tiles(fused, monkeypatch, lanes):
    monkeypatch.setitem(SHAPES, "long", (lanes, 1, 75, 20, 30, 16))
    assert_agree(*compare(fused.relative_attention, "long", False, lanes == 4))


def test_lanes_are_shared_out_among_programs_where_rows_and_heads_are_few(fused, monkeypatch):
    monkeypatch.setitem(SHAPES, "lanes", (5, 1, 3, 2, 1, 16))
    monkeypatch.setattr(fused, "PROGRAMS", 12)  # of 4 programs with all lanes: 2 lanes each, 1 for the last
    assert_agree(*compare(fused.relative_attention, "lanes", False, False))


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("size", [1.0, 40.0], ids=["small scores", "large scores"])
def test_half_precision(fused, size, separate):
    """What position scores and gradients of 16 bits cost, up to scores of some hundreds, as trained models have them.

    In float16, as the interpreter multiplies bfloat16 wrongly.
    """
    found, expected = compare(fused.relative_attention, "odd", False, separate, torch.float16, size)
    for part, want in expected.items():
        assert (found[part] - want).norm() < 0.02 * want.norm(), part


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_a_hidden_score_is_exact_when_scaled(fused, width):
    """GPUs round a product and a difference once, together: equal scores must leave no error of rounding behind."""
    assert width in fused.HEAD_WIDTHS
    hidden, scale = torch.tensor(fused.HIDDEN.value), torch.tensor(width**-0.5 * fused.LOG2_E)
    assert float(hidden * scale) == float(hidden) * float(scale)
    assert float(hidden * scale) < -1e20


def test_shapes_are_known_without_running(fused):
    with torch.device("meta"):
        q, k, r = (torch.empty(shape) for shape in ((2, 8, 3, 16), (2, 20, 2, 3, 16), (28, 3, 16)))
        valid = torch.ones(2, 12, dtype=torch.bool)
        inputs = (q, q, q, k, r, r, valid, valid[:, 0], None, 4, False)
        out, lse = fused.attend(q, q[0, :3], *inputs)
        received = fused.attention_received(*inputs, lse)
    assert (out.shape, lse.shape) == ((2, 8, 3, 16), (3, 2, 8))
    assert received.shape == (2, 20)


@pytest.mark.parametrize("model", [
    {}, {"compression": "most_used", "compression_loss": "none"}, {"compressed_positions": "separate", "norm": "pre"},
])  # fmt: skip
def test_a_model_is_the_same_with_either(fused, model):
    """Losses, gradients and memories over some windows, a document starting in the middle of one."""
    config = tiny_config(d_model=16, n_heads=1, window=12, memory_size=12, compressed_size=6, **model)
    tokens = torch.randint(config.vocab_size, (2, 49), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    starts = torch.zeros(2, 12, dtype=torch.bool, device=DEVICE)
    starts[1, 5] = True
    found = []
    for form in ("reference", "fused"):
        with dispatch.using(form):
            found.append(read(build(config).float().to(DEVICE), tokens, starts))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def read(model, tokens, starts):
    """Losses, memories and gradients of windows of twelve tokens."""
    memory, total = model.initial_memory(2), 0.0
    for i in range(0, 48, 12):
        out = model(tokens[:, i : i + 12], memory, tokens[:, i + 1 : i + 13], starts if i == 24 else None)
        memory, total = out.memory.detach(), total + out.nll.mean() + out.compression_loss
    total.backward()
    return total, memory.state_dict(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"d_model": 24, "n_heads": 2}, "heads are 12 wide, the kernel takes 16, 32, 64, 128"),
        (
            {"d_model": 32, "n_heads": 2, "attention_dropout": 0.1},
            "attention_dropout is 0.1, the kernel has no dropout",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(values, reason):
    config = tiny_config(**values)
    model = build(config).train()
    with dispatch.using("fused"), pytest.raises(ValueError, match=f"attention='fused': {reason}; use auto, or ref"):
        model(torch.zeros(2, 4, dtype=torch.long), model.initial_memory(2))
