"""Provenance of slots, against a simulation in plain lists and against what compression really depends on."""

import itertools

import pytest
import torch
from helpers import COMPRESSIONS
from web_helpers import tiny_text

from compressive.model.memory import Evicted
from compressive.web.places import EMPTY, Places

PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom."


def simulate(tokens: int, window: int, recent: int, compressed: int, rate: int) -> tuple[list, list]:
    """Algorithm 1 on lists of token numbers: a recent slot is one number, a compressed one the set it was made of."""
    memory: list = [None] * recent
    squeezed: list = [set()] * compressed
    for start in range(0, tokens - window + 1, window):
        both = memory + list(range(start, start + window))
        old, memory = both[:window], both[window:]
        groups = [set(old[i * rate : (i + 1) * rate]) - {None} for i in range(window // rate)]
        squeezed = (squeezed + groups)[len(groups) :]
    return memory, squeezed


@pytest.mark.parametrize(
    ("window", "recent", "compressed", "rate"),
    [*itertools.product([8], [0, 5, 8, 12], [0, 3, 9], [2, 3]), (6, 4, 7, 8), (5, 20, 4, 1)],
)
def test_places_are_those_of_a_simulation(window, recent, compressed, rate):
    places = Places.empty(recent, compressed)
    for count in range(12):
        found = simulate(count * window, window, recent, compressed, rate)
        assert places.recent.tolist() == [EMPTY if token is None else token for token in found[0]]
        assert places.compressed.tolist() == [[min(x), max(x)] if x else [EMPTY, EMPTY] for x in found[1]]
        assert all(x == set(range(min(x), max(x) + 1)) for x in found[1] if x)  # so first and last say it all
        places = places.push(count * window, window, rate, "mean")


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("memory", [1, 12])
def test_places_are_what_compressed_slots_depend_on(compression, memory):
    """Change one evicted slot: exactly the compressed slots change that were made of its token."""
    text = tiny_text(PROMPT[:32], compression=compression, memory_size=memory, compressed_size=16, window=16)
    engine = text.engines.default
    given: list[Evicted] = []
    compressor = engine.model.trunk.layers[1].compression
    assert compressor is not None
    compressor.register_forward_hook(lambda _, old, __: given.append(old[0]))
    point, _ = engine.read_window(list(PROMPT[32:48].encode()), 32, text._point(2))
    (old,) = given
    slots, _ = compressor(old)
    new = slots.shape[1]
    evicted = (text._point(2).places[1].recent.tolist() + list(range(32, 48)))[:16]
    spans = point.places[1].compressed[-new:].tolist()
    for number, token in enumerate(evicted):
        changed = old.slots.clone()
        changed[:, number] += 3.0
        again, _ = compressor(old._replace(slots=changed))
        depends = (again != slots).any(dim=2)[0].tolist()
        expected = [token != EMPTY and first <= token <= last for first, last in spans]
        if token != EMPTY:
            assert depends == expected, (number, token, spans)


def test_places_follow_a_change_of_sizes():
    text = tiny_text(PROMPT[:40])
    before = text._point(5).places[0]
    larger = before.resize(14, 7)
    assert larger.recent.tolist() == [EMPTY] * 2 + before.recent.tolist()
    assert larger.compressed.tolist() == [[EMPTY] * 2] * 2 + before.compressed.tolist()
    assert larger.resize(3, 0).recent.tolist() == before.recent[-3:].tolist()
    assert larger.resize(3, 0).compressed.shape == (0, 2)


@pytest.mark.parametrize("empty", ["zeros", "masked"])
def test_what_is_drawn_is_what_may_be_seen(empty):
    """A group of empty slots and tokens is a slot where empty ones are zeros, and hidden where they are masked."""
    text = tiny_text(PROMPT[:16], memory_size=13, empty_memory=empty)
    (place,) = text.memory()["places"]
    memory, places = text._point(2).memory.layers[0], text._point(2).places[0]
    assert place["recent"] == list(range(3, 16))
    expected = [
        first if visible else EMPTY
        for first, visible in zip(places.compressed[:, 0].tolist(), memory.compressed_valid[0].tolist(), strict=True)
    ]
    assert place["firsts"] == expected
    assert (0 in place["firsts"]) == (empty == "zeros")
    assert torch.equal(places.recent, torch.arange(3, 16))
