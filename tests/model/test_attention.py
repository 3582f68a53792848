"""Relative attention: the shift against its definition, both position schemes, visibility."""

import dataclasses

import pytest
import torch
from helpers import build, random_tokens, tiny_config, windows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive import Memory
from compressive.model.attention import (
    relative_attention,
    relative_shift,
    sinusoids,
    visibility,
)


@given(T=st.integers(1, 6), n_slots=st.integers(0, 9))
@settings(deadline=None)
def test_the_shift_puts_every_score_at_its_slot(T, n_slots):
    columns = torch.arange(n_slots + T).expand(2, T, -1)
    shifted = relative_shift(columns, n_slots)
    assert shifted.shape == (2, T, n_slots)
    for t in range(T):
        assert shifted[0, t].tolist() == [j + T - 1 - t for j in range(n_slots)]


def test_sinusoids_are_those_of_the_transformer():
    code = sinusoids(torch.tensor([0, 1, 5000]), 6, torch.float64)
    assert torch.equal(code[0], torch.tensor([0, 0, 0, 1, 1, 1.0], dtype=torch.float64))
    for m in range(3):
        angle = torch.tensor(5000 / 10000 ** (2 * m / 6), dtype=torch.float64)
        torch.testing.assert_close(code[2, [m, m + 3]], torch.stack([angle.sin(), angle.cos()]))
    half = sinusoids(torch.tensor([5000]), 6, torch.bfloat16)
    torch.testing.assert_close(half[0].double(), code[2], atol=1e-2, rtol=0)


def test_visibility_is_causal_and_within_a_document():
    valid = torch.tensor([[True, False], [True, True]])
    seen = visibility(valid, None, 2)
    assert seen[0].long().tolist() == [[1, 0, 1, 0], [1, 0, 1, 1]]
    seen = visibility(valid, torch.tensor([[0, 1], [0, 0]]), 2)
    assert seen[0].long().tolist() == [[1, 0, 1, 0], [0, 0, 0, 1]]
    assert seen[1].long().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("positions", ["shared", "separate", "from_window"])
def test_compressed_slots_have_positions_of_their_own_only_when_asked(positions):
    model = build(tiny_config(compressed_positions=positions, compression="mean"))
    names = [name for name, _ in model.named_parameters() if "far_" in name]
    assert len(names) == (0 if positions == "shared" else 4)
    assert not model.compressor_parameters()
    if positions == "separate":  # with equal weights both schemes are one
        shared = build(tiny_config(compression="mean"))
        weights = shared.state_dict()
        for layer in range(2):
            prefix = f"trunk.layers.{layer}.attention."
            weights[f"{prefix}far_relative.weight"] = weights[f"{prefix}relative.weight"]
            weights[f"{prefix}far_position_bias"] = weights[f"{prefix}position_bias"]
        model.load_state_dict(weights)
        tokens, memory = random_tokens(model.config, 2, 4), model.initial_memory(2)
        torch.testing.assert_close(model(tokens, memory).logits, shared(tokens, memory).logits)


@pytest.mark.parametrize("positions", ["separate", "from_window"])
def test_only_distances_from_the_window_do_not_depend_on_the_size_of_recent_memory(positions):
    config = tiny_config(compressed_positions=positions, memory_size=4)
    model, larger = build(config), build(dataclasses.replace(config, memory_size=9))
    tokens = random_tokens(config, 2, 4 * 4)
    memory = model.initial_memory(2)
    for window in windows_of(tokens, 4):
        memory = model(window, memory).memory
    hidden = Memory(
        tuple(dataclasses.replace(layer, recent_valid=layer.recent_valid & False) for layer in memory.layers), False
    )
    got = larger(window, hidden.resize(memory_size=9)).logits
    assert torch.allclose(got, model(window, hidden).logits) == (positions == "from_window")


def test_attention_dropout_acts_in_training_only():
    model = build(tiny_config(attention_dropout=0.5))
    tokens, memory = random_tokens(model.config, 2, 4), model.initial_memory(2)
    assert torch.equal(model(tokens, memory).logits, model(tokens, memory).logits)
    model.train()
    assert not torch.equal(model(tokens, memory).logits, model(tokens, memory).logits)


def test_attention_dropout_is_on_the_weights_and_usage_is_measured_before_it():
    torch.manual_seed(0)
    query, key, r = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 7, 4), torch.randn(2, 10, 4)
    bias, valid = torch.zeros(2, 4), torch.ones(1, 4, dtype=torch.bool)
    slots = torch.stack([key, torch.ones_like(key)]).permute(1, 3, 0, 2, 4)
    arguments = (query, slots, r, bias, bias, valid)
    want, usage = relative_attention(*arguments, n_compressed=2, with_usage=True)
    got, dropped_usage = relative_attention(*arguments, n_compressed=2, dropout=0.5, with_usage=True)
    torch.testing.assert_close(want, torch.ones_like(want))
    assert ((got > 0.01) & (got < 1.99)).any()
    torch.testing.assert_close(usage, dropped_usage)


def test_large_scores_survive_half_precision():
    """Scores of some hundreds: rounded to bf16 before the softmax they would be off by whole units."""
    torch.manual_seed(0)
    N, K = 64, 64
    query, key = 30 * torch.randn(1, 1, 1, K), torch.randn(1, 1, N, K)
    r, bias, valid = torch.randn(1, N + 1, K), torch.zeros(1, K), torch.ones(1, N - 1, dtype=torch.bool)
    halves = [x.bfloat16() for x in (query, key, torch.randn(1, 1, N, K))]

    def attend(dtype):
        query, *slots = (x.to(dtype) for x in halves)
        kv = torch.stack(slots).permute(1, 3, 0, 2, 4)
        u = v = bias.to(dtype)
        return relative_attention(query, kv, r.bfloat16().to(dtype), u, v, valid, with_usage=True)

    exact = attend(torch.float64)[1]
    content, position = halves[0] @ halves[1].mT, halves[0] @ r.bfloat16()[:, :N].mT
    once = ((content.float() + position.float()) / K**0.5).softmax(-1).mean((1, 2)).double()
    twice = ((content + position) / K**0.5).softmax(-1, dtype=torch.float32).mean((1, 2)).double()
    got = attend(torch.bfloat16)[1].double()
    torch.testing.assert_close(got, once, rtol=0, atol=1e-6)
    assert (got - exact).abs().max() < (twice - exact).abs().max()
