"""The kernels that read position scores ahead against the readable attention, in Triton's interpreter."""

import pytest
from attention_helpers import SHAPES, assert_agree, compare
from helpers import benchmark

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize(
    ("name", "segmented", "separate"), [*((name, False, False) for name in SHAPES), ("odd", True, True)]
)
def test_it_agrees_with_the_readable_attention(monkeypatch, name, segmented, separate):
    from compressive.model import fused

    contender = benchmark("prefetched")
    for kernel in ("_forward", "_backward_slots"):
        monkeypatch.setattr(fused, kernel, getattr(contender, kernel))
    monkeypatch.setattr(fused, "TILES", {kernel: {128: (16, 16, 4, 1)} for kernel in fused.TILES})
    monkeypatch.setattr(fused, "ALIGNED", 16)
    assert_agree(*compare(fused.fused_attention, name, segmented, separate))
