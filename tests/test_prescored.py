"""Attention with position scores beforehand against the readable attention, in Triton's interpreter."""

import pytest
import torch
from attention_helpers import SHAPES, assert_agree, compare
from helpers import benchmark

pytest.importorskip("triton", reason="triton is not installed")
# Scores that nobody may see are not computed: what memory held before is calculated with, and then not looked at.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (add|multiply|cast|subtract|matmul):RuntimeWarning")


@pytest.fixture
def prescored(monkeypatch):
    module = benchmark("prescored")
    monkeypatch.setattr(module, "TILES", {key: {128: (16, 16, 4, 1)} for key in module.TILES})  # more in less time
    monkeypatch.setattr(module, "ALIGNED", 16)
    return module


@pytest.mark.parametrize(
    ("name", "segmented", "separate"),
    [*((name, False, False) for name in SHAPES), ("odd", True, False), ("odd", True, True), ("no recent", False, True)],
)
def test_it_agrees_with_the_readable_attention(prescored, name, segmented, separate):
    assert_agree(*compare(prescored.fused_attention, name, segmented, separate))


def test_several_groups_of_queries(prescored, monkeypatch):
    monkeypatch.setitem(SHAPES, "long", (2, 1, 139, 20, 30, 16))
    assert_agree(*compare(prescored.fused_attention, "long", False, False))


def test_half_precision(prescored):
    found, expected = compare(prescored.fused_attention, "odd", False, True, torch.float16, 40.0)
    for part, want in expected.items():
        assert (found[part] - want).norm() < 0.02 * want.norm(), part
