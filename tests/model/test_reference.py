"""The model against the plain-loop NumPy reference of Algorithms 1 and 2, sizes chosen by hypothesis."""

import warnings

import numpy as np
import pytest
import reference
import torch
from helpers import COMPRESSIONS, build, random_tokens, reference_config, reference_params, run_windows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressive import ModelConfig


@st.composite
def cases(draw, compression):
    """A configuration with sizes of every relation to each other, and some windows of text for it."""
    n_layers = draw(st.integers(1, 3))
    window = draw(st.integers(1, 7))
    compressed = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5]), min_size=n_layers, max_size=n_layers))
    recent = [draw(st.integers(1 if c else 0, 9)) for c in compressed]
    rate = draw(st.lists(st.integers(1, window), min_size=n_layers, max_size=n_layers))
    losses = ["attention", "none"] if compression == "most_used" else ["attention", "autoencoding", "none"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dropped remainders, which are meant here
        config = ModelConfig(
            vocab_size=7,
            n_layers=n_layers,
            d_model=8,
            n_heads=draw(st.sampled_from([1, 2, 4])),
            d_ff=6,
            window=window,
            memory_size=tuple(recent),
            compressed_size=tuple(compressed),
            compression_rate=tuple(rate),
            compression=compression,
            compression_loss=draw(st.sampled_from(losses)),
            compressed_positions=draw(st.sampled_from(["shared", "separate", "from_window"])),
            empty_memory=draw(st.sampled_from(["zeros", "masked"])),
            spanning_slots=draw(st.sampled_from(["hidden", "partial"])),
            norm=draw(st.sampled_from(["post", "post", "pre"])),
        )
    batch = draw(st.integers(1, 2))
    lengths = [window] * draw(st.integers(1, 4)) + [draw(st.integers(1, window))]
    windows = [random_tokens(config, batch, length, draw(st.integers(0, 99))) for length in lengths]
    starts = None
    if draw(st.booleans()):
        starts = [torch.tensor(draw(_flags(batch, length))) for length in lengths]
    return config, draw(st.integers(0, 9)), windows, starts


def _flags(batch, length):
    flag = st.sampled_from([False, False, False, True])
    return st.lists(st.lists(flag, min_size=length, max_size=length), min_size=batch, max_size=batch)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_model_agrees_with_the_reference(compression):
    @settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(cases(compression))
    def check(case):
        config, seed, windows, starts = case
        model = build(config, seed)
        expected = reference.run(
            reference_config(config),
            reference_params(model),
            [window.numpy() for window in windows],
            None if starts is None else [flags.numpy() for flags in starts],
        )
        with torch.no_grad():
            outputs = run_windows(model, windows, model.initial_memory(len(windows[0])), starts)
            for out, want in zip(outputs, expected, strict=True):
                compare(out, want, config)

    check()


def compare(out, want, config):
    close(out.logits, want.logits)
    close(out.compression_losses, want.losses)
    close(out.compression_loss, want.losses.sum())
    for i, layer in enumerate(out.memory.layers):
        np.testing.assert_array_equal(layer.recent_valid, want.recent_valid[i])
        np.testing.assert_array_equal(layer.compressed_valid, want.compressed_valid[i])
        close(layer.recent, want.recent[i])
        # What an invisible compressed slot holds is nobody's business.
        seen = want.compressed_valid[i]
        close(layer.compressed[torch.tensor(seen)], want.compressed[i][seen])
        if config.compression == "most_used":
            close(layer.usage, want.usage[i])


def close(got, want):
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-9)


def test_the_reference_notices_a_wrong_model(monkeypatch):
    """The comparison can fail: a model whose relative positions are off by one slot is caught."""
    config = ModelConfig(vocab_size=7, n_layers=1, d_model=8, n_heads=2, d_ff=6, window=3, memory_size=3,
                         compressed_size=2, compression_rate=3)  # fmt: skip
    model = build(config)
    original = model.trunk.position_code
    monkeypatch.setattr(model.trunk, "position_code", lambda distances, dtype: original(distances + 1, dtype))
    tokens = random_tokens(config, 1, 3)
    want = reference.run(reference_config(config), reference_params(model), [tokens.numpy()])[0]
    with torch.no_grad():
        out = model(tokens, model.initial_memory(1))
    with pytest.raises(AssertionError):
        close(out.logits, want.logits)
