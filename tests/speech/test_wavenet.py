"""WaveNet: receptive field, exact memory and decoding buffers, and equal size of the three models."""

import pytest
import torch
from speech_helpers import tiny_wavenet

from compressive.architectures import build_model
from compressive.config import ModelConfig, RunConfig, WaveNetConfig
from compressive.speech.wavenet import WaveNetMemory, WaveNetState


def build(config, seed=0):
    """Randomise every parameter, biases too."""
    torch.manual_seed(seed)
    model = build_model(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def samples(batch, time, seed=0):
    return torch.randint(256, (batch, time), generator=torch.Generator().manual_seed(seed))


def read_by(model, tokens, size, starts=None):
    memory, parts = model.initial_memory(len(tokens)), []
    for begin in range(0, tokens.shape[1], size):
        marks = None if starts is None else starts[:, begin : begin + size]
        out = model(tokens[:, begin : begin + size], memory, starts=marks)
        memory = out.memory
        parts.append(out.logits)
    return torch.cat(parts, dim=1), memory


@pytest.mark.parametrize(
    "config",
    [
        tiny_wavenet(),
        tiny_wavenet(kernel=2, n_layers=5),
        tiny_wavenet(n_layers=1, cycle=1, kernel=1),
        tiny_wavenet(n_layers=30, cycle=10),  # the paper's, but narrow: 6,139 samples
    ],
)
def test_the_receptive_field_is_counted_right(config):
    """The last output depends on exactly the samples of the receptive field."""
    field = config.receptive_field
    model = build(WaveNetConfig(**{**vars(config), "window": field + 20}))
    tokens = samples(1, field + 20)
    embedded = model.embedding(tokens).detach().requires_grad_()
    out = model.trunk(embedded, model.initial_memory(1))
    out.hidden[:, -1].sum().backward()
    seen = embedded.grad.abs().sum(dim=(0, 2)) > 0
    assert seen.nonzero().min().item() == tokens.shape[1] - field
    assert config.receptive_field == 1 + (config.kernel - 1) * sum(config.dilations)


def test_what_is_compiled_for_one_layer_serves_layers_of_other_dilations():
    """Parameters of the first, the middle and the last layer, which has no residual output."""
    torch._dynamo.reset()
    model, graphs = build(tiny_wavenet(n_layers=12, cycle=6, window=64)), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        expected, _ = read_by(model, samples(2, 128), 64)
        for layer in model.trunk.layers:
            layer.compile(fullgraph=True, backend=count)
        found, _ = read_by(model, samples(2, 128), 64)
    assert len(graphs) == 3
    torch.testing.assert_close(found, expected)


def test_the_paper_s_wavenet_sees_6139_samples_through_30_layers():
    config = RunConfig.from_preset("speech-wavenet").model
    assert isinstance(config, WaveNetConfig)
    assert config.n_layers == 30
    assert config.dilations == tuple(2**i for i in range(10)) * 3
    assert config.receptive_field == 6139


def test_windows_of_any_size_give_what_one_pass_gives():
    model, tokens = build(tiny_wavenet(window=120)), samples(2, 120)
    whole = model(tokens, model.initial_memory(2)).logits
    for size in (1, 7, 40):
        torch.testing.assert_close(read_by(model, tokens, size)[0], whole)


def test_cached_generation_gives_what_the_full_pass_gives():
    model, tokens = build(tiny_wavenet(window=120)), samples(3, 120)
    starts = torch.zeros(3, 120, dtype=torch.bool)
    starts[0, 30] = starts[1, [5, 6, 80]] = True
    whole = model(tokens, model.initial_memory(3), starts=starts).logits
    state, stepped = model.decoding_state(model.initial_memory(3)), []
    for t in range(120):
        logits, state = model.step(tokens[:, t], state, starts[:, t])
        stepped.append(logits)
    torch.testing.assert_close(torch.stack(stepped, dim=1), whole)


def test_cached_generation_goes_on_from_a_memory():
    model, tokens = build(tiny_wavenet(window=120)), samples(2, 100)
    whole = model(tokens, model.initial_memory(2)).logits
    _, memory = read_by(model, tokens[:, :61], 61)
    state = model.decoding_state(memory)
    for t in range(61, 100):
        logits, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits, whole[:, t])


def test_a_new_clip_sees_nothing_of_the_one_before():
    model, tokens = build(tiny_wavenet(window=120)), samples(1, 100)
    starts = torch.zeros(1, 100, dtype=torch.bool)
    starts[0, 40] = True
    for size in (100, 17):
        alone = model(tokens[:, 40:], model.initial_memory(1)).logits
        torch.testing.assert_close(read_by(model, tokens, size, starts)[0][:, 40:], alone)
        assert not torch.allclose(read_by(model, tokens, size)[0][:, 40:50], alone[:, :10])


def test_a_state_stays_good_after_a_step_and_can_be_forked_saved_and_joined(tmp_path):
    model, tokens = build(tiny_wavenet()), samples(2, 10)
    state = model.decoding_state(model.initial_memory(2))
    for t in range(9):
        before = state
        _, state = model.step(tokens[:, t], state)
    first, _ = model.step(tokens[:, 8], before)
    again, _ = model.step(tokens[:, 8], before)
    torch.testing.assert_close(first, again)
    state.save(tmp_path / "state")
    loaded = WaveNetState.load(tmp_path / "state")
    expected, _ = model.step(tokens[:, 9], state)
    torch.testing.assert_close(model.step(tokens[:, 9], loaded)[0], expected)
    fork = loaded.select(torch.tensor([1, 1]))
    torch.testing.assert_close(model.step(tokens[[1, 1], 9], fork)[0], expected[[1, 1]])
    late = model.decoding_state(model.initial_memory(1))  # at another position
    both = WaveNetState.join([loaded, late])
    torch.testing.assert_close(model.step(torch.cat([tokens[:, 9], tokens[:1, 0]]), both)[0][:2], expected)


def test_memory_carries_no_gradient_and_every_parameter_has_one():
    model, tokens = build(tiny_wavenet()), samples(2, 41)
    out = model(tokens[:, :-1], model.initial_memory(2), targets=tokens[:, 1:])
    assert isinstance(out.memory, WaveNetMemory)
    assert not any(x.requires_grad for x in out.memory.inputs)
    assert out.memory.age.tolist() == [40, 40]
    (out.nll.mean() + out.compression_loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.compressor_parameters() == []
    assert len(model.task_parameters()) == len(list(model.parameters()))


def test_what_does_not_fit_is_refused():
    model = build(tiny_wavenet())
    with pytest.raises(ValueError, match="expected \\(batch, 1 to window=40, residual=8\\)"):
        model(samples(1, 41), model.initial_memory(1))
    with pytest.raises(ValueError, match="memory of batch size 2: the input has 1"):
        model(samples(1, 4), model.initial_memory(2))
    with pytest.raises(ValueError, match="expected a bool mask"):
        model(samples(1, 4), model.initial_memory(1), starts=torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="residual=0"):
        tiny_wavenet(residual=0)
    with pytest.raises(ValueError, match="'speech-wavenet' is a wavenet"):
        ModelConfig.from_preset("speech-wavenet")


def test_a_mixture_of_logistics_fits_it_too():
    model = build(tiny_wavenet(vocab_size=65_536, head="logistics"))
    out = model(samples(1, 4), model.initial_memory(1))
    torch.testing.assert_close(out.logits.exp().sum(-1), torch.ones(1, 4, dtype=torch.float64))


@pytest.mark.parametrize("family", ["speech", "speech-small"])
def test_the_three_models_are_of_equal_size(family):
    sizes = {}
    for name in (family, f"{family}-txl", f"{family}-wavenet"):
        config = RunConfig.from_preset(name).model
        with torch.device("meta"):
            sizes[name] = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert max(sizes.values()) / min(sizes.values()) < 1.03, sizes
    if family == "speech":
        assert all(abs(size / 40e6 - 1) < 0.02 for size in sizes.values()), sizes


def test_the_paper_s_presets_read_as_much_for_an_update():
    read = set()
    for name in ("speech", "speech-txl", "speech-wavenet"):
        config = RunConfig.from_preset(name)
        read.add(config.model.window * config.train.batch * config.train.update_every)
    assert read == {32 * 3840}
    for name in ("speech", "speech-txl"):
        model = RunConfig.from_preset(name).model
        assert isinstance(model, ModelConfig)
        assert (model.n_layers, model.window, model.d_head) == (20, 768, 64)
        assert isinstance(model.memory_size, int)
        assert isinstance(model.compressed_size, int)
        assert model.memory_size + model.compressed_size == 1536
