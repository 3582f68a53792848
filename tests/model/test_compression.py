"""Each compression function on its own; their arithmetic is checked against the reference."""

import pytest
import torch
from helpers import COMPRESSIONS, TRAINABLE, tiny_config
from torch import nn

from compressive import CompressiveTransformer
from compressive.model.compression import COMPRESSORS
from compressive.model.memory import Evicted


def make(kind, rate=3, d_model=8, spanning="hidden"):
    torch.manual_seed(0)
    config = tiny_config(compression=kind, d_model=d_model, window=12, compression_rate=1, spanning_slots=spanning)
    return COMPRESSORS[kind](config, rate).double()


def evicted(n, batch=2, valid=None, usage=None):
    torch.manual_seed(1)
    valid = torch.ones(batch, n, dtype=torch.bool) if valid is None else valid
    slots = torch.randn(batch, n, 8, dtype=torch.float64)
    return Evicted(slots * valid[..., None], valid, torch.rand(batch, n) if usage is None else usage)


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 12])
def test_gives_floor_n_over_c_slots(kind, n):
    new, valid = make(kind)(evicted(n))
    assert new.shape == (2, n // 3, 8)
    assert valid.shape == (2, n // 3)
    assert valid.all()


@pytest.mark.parametrize("kind", [kind for kind in COMPRESSIONS if kind != "most_used"])
def test_a_group_with_an_invisible_member_is_invisible(kind):
    valid = torch.ones(1, 9, dtype=torch.bool)
    valid[0, :4] = False
    assert make(kind)(evicted(9, 1, valid))[1].tolist() == [[False, False, True]]


@pytest.mark.parametrize("kind", [kind for kind in COMPRESSIONS if kind != "most_used"])
def test_a_partial_slot_is_made_of_its_visible_members(kind):
    valid = torch.ones(1, 9, dtype=torch.bool)
    valid[0, :4] = False
    old, compressor = evicted(9, 1, valid), make(kind, spanning="partial")
    new, seen = compressor(old)
    assert seen.tolist() == [[False, True, True]]
    assert new.isfinite().all()
    changed = Evicted(old.slots.clone(), valid, None)
    changed.slots[0, 4] += 1
    assert not torch.equal(compressor(changed)[0][0, 1], new[0, 1])  # the visible member counts
    want = {"max": old.slots[0, 4:6].amax(dim=0), "mean": old.slots[0, 4:6].mean(dim=0)}
    if kind in want:
        torch.testing.assert_close(new[0, 1], want[kind])


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_only_the_learned_ones_have_parameters(kind):
    assert bool(list(make(kind).parameters())) == (kind in TRAINABLE)


def test_convolution_is_a_convolution():
    compressor, old = make("conv"), evicted(7)
    conv = nn.Conv1d(8, 8, 3, stride=3).double()
    conv.weight.data = torch.unflatten(compressor.kernel.weight.data, 1, (3, 8)).transpose(1, 2)
    assert conv.bias is not None
    conv.bias.data = compressor.kernel.bias.data
    torch.testing.assert_close(compressor(old)[0], conv(old.slots.transpose(1, 2)).transpose(1, 2))


def test_dilated_looks_beyond_its_group():
    compressor, old = make("dilated"), evicted(12)
    changed = Evicted(old.slots.clone(), old.valid, None)
    changed.slots[:, 11] += 1
    moved = (compressor(changed)[0] != compressor(old)[0]).any(dim=2)
    assert moved[0].tolist() == [False, True, True, True]  # 1 + 2 + 4 slots to either side


def test_most_used_keeps_time_order_and_prefers_older_and_visible():
    compressor = make("most_used", rate=2)
    usage = torch.tensor([[0.1, 0.9, 0.5, 0.5, 0.5, 0.7], [0.0] * 6])
    old = evicted(6, usage=usage)
    new, _ = compressor(old)
    assert torch.equal(new[0], old.slots[0, [1, 2, 5]])
    assert torch.equal(new[1], old.slots[1, [0, 1, 2]])
    valid = torch.tensor([[True, False, True, True, True, True], [False, False, False, False, True, True]])
    new, seen = compressor(Evicted(old.slots, valid, usage))
    assert torch.equal(new[0], old.slots[0, [2, 3, 5]])
    assert torch.equal(new[1], old.slots[1, [0, 4, 5]])
    assert seen.tolist() == [[True] * 3, [False, True, True]]


def test_attention_pooling_starts_as_a_mean_of_values():
    compressor, old = make("attention"), evicted(6)
    value = compressor.key_value(old.slots)[..., 8:]
    mean = torch.unflatten(value, 1, (2, 3)).mean(dim=2)
    torch.testing.assert_close(compressor(old)[0], compressor.output(mean))


def test_of_many_equals_the_older_are_kept():
    slots = torch.arange(4096.0)[None, :, None].expand(1, -1, 8)
    old = Evicted(slots, torch.ones(1, 4096, dtype=torch.bool), torch.zeros(1, 4096))
    assert torch.equal(make("most_used", rate=2)(old)[0][0, :, 0], torch.arange(2048.0))


@pytest.mark.parametrize("kind", ["conv", "dilated"])
def test_convolutions_start_at_the_scale_of_their_input(kind):
    config = tiny_config(compression=kind, d_model=64, n_heads=2, window=12, compression_rate=3, n_layers=9)
    torch.manual_seed(0)
    compressor = CompressiveTransformer(config).layers[0].compression
    assert compressor is not None
    new, _ = compressor(Evicted(torch.randn(8, 48, 64), torch.ones(8, 48, dtype=torch.bool), None))
    assert 0.5 < new.std() < 1.5
