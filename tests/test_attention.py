"""Relative attention: the shift against its definition, both position schemes, visibility."""

import pytest
import torch
from helpers import build, random_tokens, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive.model.attention import relative_shift, sinusoids, visibility


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


@pytest.mark.parametrize("positions", ["shared", "separate"])
def test_compressed_slots_have_positions_of_their_own_only_when_asked(positions):
    model = build(tiny_config(compressed_positions=positions, compression="mean"))
    names = [name for name, _ in model.named_parameters() if "far_" in name]
    assert len(names) == (4 if positions == "separate" else 0)
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


def test_attention_dropout_acts_in_training_only():
    model = build(tiny_config(attention_dropout=0.5))
    tokens, memory = random_tokens(model.config, 2, 4), model.initial_memory(2)
    assert torch.equal(model(tokens, memory).logits, model(tokens, memory).logits)
    model.train()
    assert not torch.equal(model(tokens, memory).logits, model(tokens, memory).logits)
