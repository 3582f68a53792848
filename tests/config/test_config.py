"""Configurations and presets: errors, warnings, and the paper's models."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from helpers import tiny_config

from compressive import CompressiveLM, ModelConfig
from compressive.architectures import build_model
from compressive.config import RunConfig, WaveNetConfig, load_preset, preset_names
from compressive.config.checks import warn_once


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_heads": 3}, r"n_heads=3: expected a divisor of d_model=8"),
        ({"d_model": 9, "n_heads": 3}, r"d_model=9: expected an even number"),
        ({"compression_rate": 0}, r"compression_rate=0: expected a whole number of at least 1"),
        ({"compression_rate": 5}, r"compression_rate=5: expected at most window=4 in layer 0.*lower it"),
        ({"compression_rate": (2, 5)}, r"compression_rate=5: expected at most window=4 in layer 1"),
        ({"memory_size": 0}, r"memory_size=0: expected at least 1 in layer 0, which has compressed_size=3"),
        ({"memory_size": -1}, r"memory_size=-1: expected a whole number of at least 0"),
        ({"memory_size": 2.5}, r"memory_size=2.5: expected a whole number"),
        ({"memory_size": (4, 4, 4)}, r"memory_size=\(4, 4, 4\): expected one value per layer, n_layers=2"),
        ({"compressed_size": (4, -4)}, r"compressed_size=\(4, -4\): expected whole numbers of at least 0"),
        ({"compression": "zip"}, r"compression='zip': expected one of max, mean, conv, dilated, most_used, gru, att"),
        ({"compression_loss": "bptt"}, r"compression_loss='bptt': expected one of attention, autoencoding, none"),
        (
            {"compression": "most_used", "compression_loss": "autoencoding"},
            r"compression_loss='autoencoding': expected attention or none with compression='most_used'.*change either",
        ),
        (
            {"compressed_positions": "both"},
            r"compressed_positions='both': expected one of shared, separate, from_window",
        ),
        ({"empty_memory": "ones"}, r"empty_memory='ones': expected one of zeros, masked"),
        ({"norm": "layer"}, r"norm='layer': expected one of post, pre"),
        ({"dropout": 1.0}, r"dropout=1.0: expected a number from 0 up to, but not including, 1"),
        ({"dropout": -0.1}, r"dropout=-0.1: expected a number"),
        ({"compression_rate": (0, 2)}, r"compression_rate=\(0, 2\): expected whole numbers of at least 1"),
        ({"adaptive_cutoffs": (2.5,)}, r"adaptive_cutoffs=\(2.5,\): expected increasing whole numbers"),
        ({"adaptive_cutoffs": 5}, r"adaptive_cutoffs=5: expected increasing whole numbers"),
        ({"adaptive_cutoffs": (0, 5), "adaptive_factor": 2}, r"adaptive_cutoffs=\(0, 5\)"),
        ({"dropout": "0.1"}, r"dropout='0.1': expected a number"),
        ({"vocab_size": 0}, r"vocab_size=0: expected a whole number of at least 1"),
        ({"n_layers": True}, r"n_layers=True: expected a whole number"),
        ({"adaptive_cutoffs": (4, 4)}, r"adaptive_cutoffs=\(4, 4\): expected increasing whole numbers"),
        ({"adaptive_cutoffs": (3, 5)}, r"adaptive_factor=4: .*each of 3 bands"),
    ],
)
def test_impossible_configurations_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**values)


def test_a_dropped_remainder_is_warned_of_once_and_by_name():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"window=4 .* 1 in layer 0 \(compression_rate=3\)") as caught:
        [tiny_config(compression_rate=(3, 2)) for _ in range(2)]
    assert len(caught) == 1


def test_no_warning_where_nothing_is_compressed(recwarn):
    tiny_config(compression_rate=3, compressed_size=0)
    assert not recwarn.list


def test_sizes_are_one_number_or_one_per_layer():
    assert hash(ModelConfig.from_preset("wikitext103")) == hash(ModelConfig.from_preset("wikitext103"))
    assert ModelConfig.from_preset("enwik8", n_layers=3).n_layers == 3
    config = tiny_config(memory_size=[4, 8], compressed_size=2, compression_rate=(1, 2))
    assert config.memory_sizes == (4, 8)
    assert config.compressed_sizes == (2, 2)
    assert config.temporal_range == 4 + 1 * 2 + 8 + 2 * 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 3  # type: ignore[misc]


def test_importing_the_package_does_not_import_torch():
    code = "import compressive.config, sys; compressive.config.load_preset('enwik8'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_refused():
    import compressive

    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = compressive.Nonsense
    with pytest.raises(ValueError, match=r"preset='enwik9' does not exist; choose one of books-small, enwik8, "):
        load_preset("enwik9")
    with pytest.raises(TypeError, match="n_layer"):
        ModelConfig.from_preset("enwik8", n_layer=3)


@pytest.mark.parametrize("name", preset_names("data"))
def test_every_preset_is_a_model(name):
    config = RunConfig.from_preset(name).model
    with torch.device("meta"):
        model = build_model(config)
        tokens = torch.zeros(2, config.window, dtype=torch.long)
        out = model(tokens, model.initial_memory(2))
    assert out.logits.shape == (2, config.window, config.vocab_size)
    assert isinstance(config, WaveNetConfig) or config.d_head in (64, 128)


@pytest.mark.parametrize("name", ["enwik8", "wikitext103", "pg19", "speech", "rooms"])
def test_a_twin_is_a_transformer_xl_that_attends_to_as_many_slots(name):
    model, twin = ModelConfig.from_preset(name), ModelConfig.from_preset(f"{name}-txl")
    assert set(twin.compressed_sizes) == {0}
    assert isinstance(model.memory_size, int)
    assert isinstance(model.compressed_size, int)
    slots = model.memory_size + model.compressed_size
    # The paper's Enwik8 TransformerXL has 2304 memories in training; the equal-cost one is a preset of its own.
    if name == "enwik8":
        assert twin.memory_size == 2304
        twin = ModelConfig.from_preset("enwik8-txl-equal-cost")
    assert twin.memory_size == slots
    assert "extends" not in load_preset(f"{name}-txl")


def count_parameters(name, build):
    with torch.device("meta"):
        return sum(p.numel() for p in build(ModelConfig.from_preset(name)).parameters())


def test_the_enwik8_transformer_xl_has_the_published_277_million_parameters():
    assert round(count_parameters("enwik8-txl", CompressiveLM) / 1e6) == 277


def test_preset_files_hold_known_fields_only():
    for name in preset_names("data"):
        known = {field.name for field in dataclasses.fields(RunConfig.from_preset(name).model)}
        assert set(load_preset(name)["model"]) <= known
