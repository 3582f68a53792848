"""Fixtures of the kernels' tests."""

import pytest

from compressive.kernels import dispatch


@pytest.fixture(autouse=True)
def inside_their_operands(monkeypatch):
    """Interpreted kernels, in every test: they access nothing but their operands."""
    if not (dispatch.HAS_TRITON and dispatch.INTERPRETED):
        yield
        return
    from memory_bounds import Bounds

    bounds = Bounds()
    bounds.install(monkeypatch)
    yield bounds
    assert not bounds.outside, bounds.outside[:5]


@pytest.fixture
def kernels(monkeypatch):
    """The kernel module, with small tiles; without a GPU its kernels are interpreted (../conftest.py)."""
    from compressive.kernels import relative_attention

    small = {kernel: {128: (16, 16, 4, 1)} for kernel in relative_attention.TILES}
    monkeypatch.setattr(relative_attention, "TILES", small)
    monkeypatch.setattr(relative_attention, "ROW_ALIGNMENT", 16)
    return relative_attention
