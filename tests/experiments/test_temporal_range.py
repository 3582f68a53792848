"""How far back a token reaches, where the answer is known; and that what is compared has equal cost or range."""

import pytest
from helpers import build, random_tokens, tiny_config

from compressive.config.model import transformer
from compressive.experiments import load
from compressive.experiments.experiment import SCALES, cost
from compressive.experiments.temporal_range import influence, reach


@pytest.mark.parametrize("compression", ["conv", "dilated", "max", "gru", "attention"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"n_layers": 1, "memory_size": 8, "compressed_size": 0},
        {"n_layers": 3, "memory_size": 8, "compressed_size": 0},
        {"n_layers": 1, "memory_size": 4, "compressed_size": 6, "compression_rate": 4},
        {"n_layers": 2, "memory_size": (4, 8), "compressed_size": (2, 4), "compression_rate": (4, 2)},
    ],
    ids=["TransformerXL", "TransformerXL, 3 layers", "compressed", "other sizes in each layer"],
)
def test_reach_is_the_formula_s_where_windows_and_memories_are_aligned(sizes, compression):
    model = build(tiny_config(compression=compression, **sizes))
    text = random_tokens(model.config, 1, 4 * 20 + 1)
    assert reach(model, text[0]) == model.config.temporal_range
    # At the end of a window, the window adds the rest of itself.
    assert reach(model, text[0, : 4 * 20]) == model.config.temporal_range + 3


def test_a_token_has_influence_within_reach_and_none_beyond():
    model = build(tiny_config(memory_size=4, compressed_size=2))
    formula = model.config.temporal_range
    assert formula == 2 * (4 + 2 * 2)
    changes = influence(model, random_tokens(model.config, 3, 4 * 10 + 1), [0, 1, formula, formula + 1])
    assert min(changes[:3]) > 0
    assert changes[0] > changes[2]
    assert changes[3] == 0


@pytest.mark.parametrize("scale", SCALES)
def test_the_paper_s_example_has_equal_cost_or_equal_range(scale):
    models = [transformer(row.config.model) for row in load("temporal-range").rows(scale)]
    txl, rate3, rate7, twice, four_times = models
    assert {model.memory_sizes[0] + model.compressed_sizes[0] for model in (txl, rate3, rate7)} == {2 * txl.window}
    assert rate3.temporal_range == twice.temporal_range == 2 * txl.temporal_range
    assert rate7.temporal_range == four_times.temporal_range == 4 * txl.temporal_range
    assert not any(size % model.window for model in models for size in model.memory_sizes)
    assert not any(model.window % rate for model in models for rate in model.compression_rates)


@pytest.mark.parametrize("scale", SCALES)
def test_memory_by_layer_has_equal_slots_range_and_parameters(scale):
    configs = [row.config for row in load("rates").rows(scale)]
    models = [transformer(config.model) for config in configs]
    assert len(set(models)) == 5
    assert len({sum(model.compressed_sizes) for model in models}) == 1
    assert len({model.temporal_range for model in models}) == 1
    assert len({cost(config, scale).parameters for config in configs}) == 1
    assert models[1].compression_rates == models[2].compression_rates[::-1]
    assert models[3].compressed_sizes == models[4].compressed_sizes[::-1]
    assert models[1].compression_rates[0] > models[1].compression_rates[-1]
    assert models[3].compressed_sizes[0] > models[3].compressed_sizes[-1]


def test_the_first_rows_share_the_runs_of_enwik8():
    for scale in SCALES:
        positions, rates = (load(name).rows(scale)[0] for name in ("positions", "rates"))
        assert (positions.name, positions.config) == (rates.name, rates.config)
        assert (positions.name == "compressive") == (positions.config == load("enwik8").rows(scale)[0].config)
