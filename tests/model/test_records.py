"""Records of tensors: moved, forked, joined, saved and restored as one."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from compressive.model.records import SHARED, TensorRecord


@dataclass(frozen=True)
class Inner(TensorRecord):
    flag: Tensor
    maybe: Tensor | None


@dataclass(frozen=True)
class Outer(TensorRecord):
    x: Tensor
    parts: tuple[Inner, ...]
    count: int
    on: bool
    table: Tensor = field(metadata=SHARED)
    scratch: list = field(default_factory=list, init=False)


def sample(rows=3):
    x = torch.arange(2.0 * rows).view(rows, 2)
    part = Inner(x[:, 0] > 2, x + 1)
    return Outer(x, (part, Inner(x[:, 0] > 9, None)), 7, True, torch.eye(2))


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_saved_and_restored(tmp_path):
    record = sample()
    names = {"x", "parts.0.flag", "parts.0.maybe", "parts.1.flag", "count", "on", "table"}
    assert set(record.state_dict()) == names
    record.save(tmp_path / "record.safetensors")
    restored = Outer.load(tmp_path / "record.safetensors")
    assert same(record, restored)
    assert restored.count == 7
    assert restored.on is True
    assert restored.parts[1].maybe is None


def test_restoring_from_something_else_says_what_is_missing():
    state = sample().state_dict()
    del state["parts.0.flag"]
    with pytest.raises(ValueError, match=r"'parts\.0\.flag' is missing"):
        Outer.from_state_dict(state)


def test_moving_changes_the_type_of_numbers_but_not_of_flags():
    record = sample().to(dtype=torch.float64)
    assert record.x.dtype == record.table.dtype == record.parts[0].maybe.dtype == torch.float64
    assert record.parts[0].flag.dtype == torch.bool


def test_rows_are_picked_forked_replaced_and_joined():
    record = sample()
    forked = record.select(torch.tensor([2, 2, 0]))
    assert torch.equal(forked.x, record.x[[2, 2, 0]])
    assert torch.equal(forked.table, record.table)
    assert same(Outer.join([record.select(torch.tensor([0])), record.select(torch.tensor([1, 2]))]), record)
    back = forked.put(torch.tensor([0, 1, 2]), record)
    assert same(back, record)
    assert not same(forked, record)


def test_clone_and_detach():
    record = sample().map(lambda x: x.requires_grad_() if x.is_floating_point() else x)
    assert not record.detach().x.requires_grad
    copy = record.detach().clone()
    copy.x.zero_()
    assert record.x.any()


def test_written_into_another_in_place():
    target, source = sample(), sample().map(lambda x: x.clone() if x.dtype == torch.bool else x + 1)
    held = target.state_dict()
    target.copy_(source)
    assert same(target, source)
    assert held["parts.0.maybe"].data_ptr() == target.parts[0].maybe.data_ptr()
    target.copy_(target)  # what is there already is left alone
    assert same(target, source)


def test_replaced_in_place_if_a_condition_holds():
    mine, other = sample(), sample().map(lambda x: torch.ones_like(x))
    held = mine.x
    assert mine.replace_(torch.tensor(False), other).x is held
    assert same(mine, sample())
    mine.replace_(torch.tensor(True), other)
    assert mine.x is held
    assert same(mine, other)
