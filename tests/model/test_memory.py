"""The two FIFOs: what enters, what leaves, what may be seen; resizing, resetting, saving."""

import pytest
import torch
from helpers import build, random_tokens, run_windows, tiny_config, windows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from compressive import CompressiveTransformer, Memory
from compressive.model.memory import Segments, after_attention, entering, evict, fifo_in, fifo_out, push_recent


@given(size=st.integers(0, 6), pushes=st.lists(st.integers(0, 8), max_size=6))
@settings(deadline=None)
def test_a_fifo_gives_back_everything_in_order(size, pushes):
    slots, stream, left, clock = torch.full((1, size), -1), [], [], 0
    for count in pushes:
        new = torch.arange(clock, clock + count)[None]
        clock += count
        out, slots = fifo_out(slots, new), fifo_in(slots, new)
        assert out.shape[1] == count
        assert slots.shape[1] == size
        left += out[0].tolist()
    stream = [-1] * size + list(range(clock))
    assert left + slots[0].tolist() == stream


def filled(config, batch=2, windows=5):
    model = build(config)
    tokens = random_tokens(config, batch, windows * config.window)
    with torch.no_grad():
        outs = list(run_windows(model, windows_of(tokens, config.window), model.initial_memory(batch)))
    return model, outs[-1].memory


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def equal(a: Memory, b: Memory):
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_shapes_follow_the_configuration_layer_by_layer():
    config = tiny_config(memory_size=(6, 2), compressed_size=(0, 5), compression_rate=(1, 4))
    _, memory = filled(config)
    assert [tuple(x.shape) for x in memory.recent] == [(2, 6, 8), (2, 2, 8)]
    assert [tuple(x.shape) for x in memory.compressed] == [(2, 0, 8), (2, 5, 8)]


@pytest.mark.parametrize("empty", ["zeros", "masked"])
def test_empty_memory_is_zeros_seen_or_not(empty):
    memory = build(tiny_config(empty_memory=empty)).initial_memory(2)
    for layer in memory.layers:
        assert not layer.recent.any()
        assert not layer.compressed.any()
        assert layer.valid().all() == (empty == "zeros")
        assert layer.valid().any() == (empty == "zeros")


def test_reset_empties_some_rows_and_leaves_the_others():
    for empty in ("zeros", "masked"):
        model, memory = filled(tiny_config(empty_memory=empty, compression="most_used"), batch=3)
        reset = memory.reset(torch.tensor([False, True, False]))
        others = torch.tensor([0, 2])
        assert equal(reset.select(others), memory.select(others))
        assert equal(reset.select(torch.tensor([1])), model.initial_memory(1))
        assert not equal(reset, memory)


def test_reset_keeps_types_forgets_what_is_not_finite_and_copies_nothing_first():
    """A copy, such as `masked_fill` begins with, is a node of its own in a CUDA graph."""
    _, memory = filled(tiny_config(compression="most_used"))
    memory = memory.map(lambda x: x.bfloat16() if x.ndim == 3 else x)
    memory.layers[0].recent[0] = torch.nan
    with Operators() as called:
        reset = memory.reset(torch.tensor([True, False]))
    assert reset.layers[0].recent.isfinite().all()
    assert [x.dtype for x in reset.state_dict().values()] == [x.dtype for x in memory.state_dict().values()]
    assert not [name for name in called.names if any(word in name for word in ("copy", "clone", "masked_fill"))]


@pytest.mark.parametrize("rows", [torch.tensor([1, 0, 0]), torch.tensor([True])])
def test_reset_wants_a_flag_for_every_row(rows):
    with pytest.raises(ValueError, match=r"expected a bool mask of shape \(3,\)"):
        build(tiny_config()).initial_memory(3).reset(rows)


def test_resizing_keeps_the_newest_and_adds_empty_slots_at_the_old_end():
    for empty in ("zeros", "masked"):
        _, memory = filled(tiny_config(empty_memory=empty, compression="most_used"))
        larger = memory.resize(memory_size=9, compressed_size=(4, 8))
        layer, old = larger.layers[1], memory.layers[1]
        assert layer.recent.shape[1] == layer.usage.shape[1] == 9
        assert layer.compressed.shape[1] == 8
        assert not layer.recent[:, :3].any()
        assert not layer.usage[:, :3].any()
        assert layer.recent_valid[:, :3].all() == (empty == "zeros")
        assert torch.equal(layer.recent[:, 3:], old.recent)
        assert equal(larger.resize(6, 3), memory)
        smaller = memory.resize(memory_size=2).layers[0]
        assert torch.equal(smaller.recent, memory.layers[0].recent[:, -2:])
        assert torch.equal(smaller.compressed, memory.layers[0].compressed)


def test_saved_and_restored(tmp_path):
    for compression in ("conv", "most_used"):
        _, memory = filled(tiny_config(compression=compression))
        memory.save(tmp_path / "memory.safetensors")
        assert equal(Memory.load(tmp_path / "memory.safetensors"), memory)


@pytest.mark.parametrize("sizes", [{}, {"memory_size": 2, "compressed_size": 1}])
def test_memory_carries_no_graph_and_no_extra_storage(sizes):
    config = tiny_config(**sizes)
    model = build(config).train()
    out = model(random_tokens(config, 2, 4), model.initial_memory(2))
    for name, tensor in out.memory.state_dict().items():
        assert not tensor.requires_grad, name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name


def test_a_start_hides_what_came_before_it():
    config = tiny_config(memory_size=6, empty_memory="zeros")
    layer = build(config).initial_memory(2).layers[0]
    starts = torch.tensor([[False, False, True, False], [False] * 4])
    segments = Segments.of(starts)
    assert segments.ids.tolist() == [[0, 0, 1, 1], [0] * 4]
    seen, window = after_attention(layer, segments, None), torch.ones(2, 4, 8)
    new = entering(seen, window, segments)
    memory, old = push_recent(seen, new), evict(seen, new)
    assert memory.recent_valid.tolist() == [[False] * 4 + [True] * 2, [True] * 6]
    assert memory.compressed_valid.tolist() == [[False] * 3, [True] * 3]
    assert old.valid.tolist() == [[False] * 4, [True] * 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 3}, r"memory of 2 layers: the model has 3"),
        ({"d_model": 16}, r"recent memory of layer 0 has 6 slots of width 8: the model expects 6 of width 16"),
        ({"memory_size": (6, 7)}, r"recent memory of layer 1 has 6 slots .* expects 7 .*memory\.resize"),
        ({"compressed_size": 4}, r"compressed memory of layer 0 has 3 slots .* expects 4"),
        ({"compression": "most_used"}, r"another compression than 'most_used'"),
    ],
)
def test_a_memory_of_another_model_is_refused(change, message):
    memory = build(tiny_config()).initial_memory(2)
    model = build(tiny_config(**change))
    with pytest.raises(ValueError, match=message):
        model(random_tokens(model.config, 2, 4), memory)
    with pytest.raises(ValueError, match=message):
        model.decoding_state(memory)


def test_a_memory_of_another_batch_or_device_is_refused():
    model = build(tiny_config())
    with pytest.raises(
        ValueError, match=r"memory of batch size 3: the input has 2; make it with initial_memory\(batch"
    ):
        model(random_tokens(model.config, 2, 4), model.initial_memory(3))
    with pytest.raises(ValueError, match="memory of batch size 1: the input has 2"):
        model(random_tokens(model.config, 2, 4), model.initial_memory(1))
    with pytest.raises(ValueError, match=r"memory on meta: the model is on cpu; move it with memory\.to\('cpu'\)"):
        model(random_tokens(model.config, 2, 4), model.initial_memory(2).to("meta"))
    with pytest.raises(ValueError, match=r"memory of type torch.float32: the model is of torch.float64; change it"):
        model(random_tokens(model.config, 2, 4), model.initial_memory(2).to(dtype=torch.float32))
    with pytest.raises(ValueError, match="batch_size=0: expected at least 1"):
        model.initial_memory(0)
    with pytest.raises(ValueError, match="another compression than 'conv'"):
        model(random_tokens(model.config, 2, 4), build(tiny_config(compression="most_used")).initial_memory(2))


def test_memory_keeps_its_type_under_autocast():
    trunk = CompressiveTransformer(tiny_config(memory_size=3, compressed_size=1))
    with torch.autocast("cpu", torch.bfloat16):
        memory = trunk(torch.randn(2, 4, 8, dtype=torch.bfloat16), trunk.initial_memory(2)).memory
    assert {x.dtype for x in (*memory.recent, *memory.compressed)} == {torch.float32}


@pytest.mark.parametrize("size", [(4,), -1, [3, -3]])
def test_impossible_sizes_are_refused(size):
    memory = build(tiny_config()).initial_memory(1)
    with pytest.raises(ValueError, match="expected a whole number of at least 0, or one for each of 2 layers"):
        memory.resize(memory_size=size)
    assert memory.resize([4, 5]).recent[1].shape[1] == 5


def test_a_masked_memory_stays_one():
    model = build(tiny_config(empty_memory="masked"))
    memory = model(random_tokens(model.config, 1, 4), model.initial_memory(1)).memory
    assert not memory.resize(9).layers[0].recent_valid[:, :3].any()
