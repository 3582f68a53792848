"""The fused kernels against the reference attention, in Triton's interpreter: any shape, both schemes, all masks."""

import pytest
import torch
from attention_helpers import DEVICE, SHAPES, assert_agree, compare
from helpers import build, tiny_config

from compressive.kernels import dispatch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("segmented", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize(
    "name", [name if name in ("odd", "tiny") else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def test_kernels_agree_with_the_reference_attention(kernels, name, segmented, separate):
    assert_agree(*compare(kernels.relative_attention, name, segmented, separate))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "no recent", "nothing remembered"])
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_scores_of_future_slots_can_be_anything(kernels, monkeypatch, name, separate):
    """They are never written; kernels load whatever the memory held before, and must mask it.

    Kernels that read scores have larger tiles here than those that write them, so that they do load such elements.
    """
    large = {
        "forward": (32, 32, 4, 1), "backward_q_content": (32, 32, 4, 1),
        "backward_q_position": (16, 32, 4, 1), "backward_r": (16, 32, 4, 1),
    }  # fmt: skip
    for kernel, tile in large.items():
        monkeypatch.setitem(kernels.TILES, kernel, {128: tile})
    monkeypatch.setattr(kernels, "ROW_ALIGNMENT", 32)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2).isnan().all()  # new memory is full of NaN from here on
        found = compare(kernels.relative_attention, name, True, separate)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_agree(*found)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 3, 4])
def test_strided_queries_fill_several_tiles(kernels, monkeypatch, batch):
    monkeypatch.setitem(SHAPES, "long", (batch, 1, 66, 17, 1, 16))  # a tile of 16 queries, 4 apart, spans 64
    assert_agree(*compare(kernels.relative_attention, "long", False, batch == 4))


@pytest.mark.slow
def test_the_batch_is_split_among_programs_where_rows_of_r_and_heads_are_few(kernels, monkeypatch):
    monkeypatch.setitem(SHAPES, "batch", (5, 1, 3, 2, 1, 16))
    monkeypatch.setattr(kernels, "MIN_PROGRAMS", 12)  # 4 programs for the whole batch: now 2 rows each, 1 for the last
    assert_agree(*compare(kernels.relative_attention, "batch", False, False))


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("size", [1.0, 40.0], ids=["small scores", "large scores"])
def test_half_precision(kernels, size, separate):
    """The error of 16-bit position scores and gradients stays below 2 %, up to scores of some hundreds.

    Trained models have such scores. In float16, because the interpreter multiplies bfloat16 wrongly.
    """
    found, expected = compare(kernels.relative_attention, "odd", False, separate, torch.float16, size)
    for part, want in expected.items():
        assert (found[part] - want).norm() < 0.02 * want.norm(), part


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_a_hidden_score_is_exact_when_scaled(kernels, width):
    """A fused multiply-add rounds once: the difference of two equal hidden scores must still be zero."""
    from compressive.kernels.relative_attention_kernels import HIDDEN, LOG2_E

    assert width in kernels.HEAD_WIDTHS
    hidden, scale = torch.tensor(HIDDEN.value), torch.tensor(width**-0.5 * LOG2_E)
    assert float(hidden * scale) == float(hidden) * float(scale)
    assert float(hidden * scale) < -1e20


def test_shapes_are_known_without_running(kernels):
    with torch.device("meta"):
        q, k, r = (torch.empty(shape) for shape in ((2, 8, 3, 16), (2, 20, 2, 3, 16), (28, 3, 16)))
        valid = torch.ones(2, 12, dtype=torch.bool)
        inputs = (q, q, None, k, r, None, valid, valid[:, 0], None, 4)
        out, lse = kernels.attend(q, q[0, :2], *inputs, torch.empty(1, dtype=torch.long), 0.1)
        received = kernels.attention_received(*inputs, lse)
    assert (out.shape, lse.shape) == ((2, 8, 3, 16), (3, 2, 8))
    assert received.shape == (2, 20)


@pytest.mark.slow
@pytest.mark.parametrize("model", [
    {}, {"compression": "most_used", "compression_loss": "none"},
    {"compressed_positions": "from_window", "norm": "pre"},
])  # fmt: skip
def test_a_model_is_the_same_with_either(kernels, model):
    """Losses, gradients and memories over some windows, a document starting in the middle of one."""
    sizes = {"window": 12, "memory_size": 12, "compressed_size": 6}  # 30 slots: two tiles
    config = tiny_config(d_model=16, n_heads=1, **sizes, **model)
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
    memory, total = model.initial_memory(2), torch.zeros((), device=DEVICE)
    for i in range(0, 48, 12):
        out = model(tokens[:, i : i + 12], memory, tokens[:, i + 1 : i + 13], starts if i == 24 else None)
        memory, total = out.memory.detach(), total + out.nll.mean() + out.compression_loss
    total.backward()
    return total, memory.state_dict(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(("width", "heads"), [(24, 2), (96, 1)])
def test_what_it_cannot_do_is_refused(width, heads):
    model = build(tiny_config(d_model=width, n_heads=heads)).train()
    reason = f"heads are {width // heads} wide, the kernel takes 16, 32, 64, 128"
    with dispatch.using("fused"), pytest.raises(ValueError, match=f"attention='fused': {reason}; use auto, or ref"):
        model(torch.zeros(2, 4, dtype=torch.long), model.initial_memory(2))
