"""Fixtures of the kernels' tests."""

import pytest


@pytest.fixture
def kernels(monkeypatch):
    """The kernel module, with small tiles; without a GPU its kernels are interpreted (../conftest.py)."""
    from compressive.kernels import relative_attention

    small = {kernel: {128: (16, 16, 4, 1)} for kernel in relative_attention.TILES}
    monkeypatch.setattr(relative_attention, "TILES", small)
    monkeypatch.setattr(relative_attention, "ROW_ALIGNMENT", 16)
    return relative_attention
