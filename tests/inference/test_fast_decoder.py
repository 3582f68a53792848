"""Steps in place: the same as steps from state to state, in buffers that stay where they are."""

from typing import Any

import pytest
import torch
from helpers import build, random_tokens, tied_embedding, tiny_config

from compressive import CompressiveLM, DecodingState
from compressive.config import TrainConfig
from compressive.distributed import World
from compressive.inference import generate as generation
from compressive.inference.fast_decoder import FastDecoder, FastLayer, StepGraph


def first_layer(decoder):
    assert decoder.layers is not None
    assert isinstance(decoder.layers[0], FastLayer)
    return decoder.layers[0]


def as_captured(function):
    """What a captured function does, done again by calling it: everything about a graph but the graph."""
    return function


class Reader:
    """Tokens and starts in, logits out, each in a tensor that stays where it is."""

    def __init__(self, model, state, capture):
        rows = len(state.position)
        self.model = model
        self.tokens = torch.zeros(rows, dtype=torch.long)
        self.starts = torch.zeros(rows, dtype=torch.bool)
        self.logits = torch.zeros(rows, model.config.vocab_size, dtype=state.window.dtype)
        self.steps = StepGraph(self.step, state, capture)

    def step(self, state):
        logits, state = self.model.step(self.tokens, state, self.starts)
        self.logits.copy_(logits)
        return state

    def read(self, tokens, starts):
        self.tokens.copy_(tokens)
        self.starts.copy_(starts)
        self.steps()
        return self.logits.clone()


def rows_apart(model):
    """A state of three rows at different places in their windows."""
    states = []
    for length in (1, 4, 6):
        state = model.decoding_state(model.initial_memory(1))
        for token in random_tokens(model.config, 1, length, seed=length)[0]:
            _, state = model.step(token[None], state)
        states.append(state)
    return DecodingState.join(states)


@pytest.mark.parametrize("capture", [None, as_captured], ids=["called", "captured"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"compression": "most_used"},
        {"memory_size": (3, 5), "compressed_size": (2, 0), "compressed_positions": "from_window", "norm": "pre"},
        {"window": 1, "compression_rate": 1},
    ],
    ids=["plain", "most used", "uneven", "windows of one"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_steps_in_place_equal_steps_from_state_to_state(values, apart, capture):
    model = build(tiny_config(**values))
    state = rows_apart(model) if apart else model.decoding_state(model.initial_memory(3))
    assert state.together != apart or model.config.window == 1
    reader, text = Reader(model, state, capture), random_tokens(model.config, 3, 15, seed=9)
    for t in range(15):
        starts = torch.tensor([False, t == 5, t in (0, 9)])
        want, state = model.step(text[:, t], state, starts)
        assert torch.equal(reader.read(text[:, t], starts), want)
    held = reader.steps.state
    assert (held.remaining, held.together) == (state.remaining, state.together)
    for name, tensor in state.state_dict().items():
        assert torch.equal(held.state_dict()[name], tensor), name
    none = torch.zeros(3, dtype=torch.bool)
    reader.read(text[:, 0], none)  # and what was given away is left alone
    want, _ = model.step(text[:, 1], state)
    assert torch.equal(model.step(text[:, 1], held)[0], want)


def test_buffers_stay_where_they_are_and_steps_are_captured_once():
    model = build(tiny_config(compression="most_used"))
    captured, replayed = [], []

    def capture(function):
        captured.append(function)
        return lambda: replayed.append(function())

    before = model.decoding_state(model.initial_memory(2))
    kept = before.clone()
    reader = Reader(model, before, capture)

    def places():
        tensors = reader.steps._state.state_dict().items()
        return {name: tensor.data_ptr() for name, tensor in tensors if tensor.ndim}  # not numbers

    first, none = places(), torch.zeros(2, dtype=torch.bool)
    for t in range(13):
        reader.read(torch.tensor([t % 11, 3]), none)
        assert places() == first
    assert len(captured) == 2  # steps within a window, and steps that end one
    assert len(replayed) == 13 - 2  # all but the first of each kind
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, kept.state_dict()[name])  # the state it began from is still good


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_text_is_the_same_with_and_without_capture(length, monkeypatch):
    config = tiny_config()
    model, prompt = build(config), random_tokens(config, 1, 7)[0]
    want = list(generation.generate(model, prompt, length, samples=3))
    monkeypatch.setattr(FastDecoder, "capture", lambda self: as_captured)
    got = list(generation.generate(model, prompt, length, samples=3))
    assert len(got) == length
    assert torch.equal(torch.stack(got), torch.stack(want))  # every one a tensor of its own


def test_a_decoder_shares_the_weights_of_its_model():
    model = build(tiny_config(dropout=0.5), dtype=torch.float32).train()
    decoder = FastDecoder(model)
    steps = decoder.model
    assert model.training
    assert not any(module.training for module in steps.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for (name, ours), theirs in zip(model.named_parameters(), steps.parameters(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr(), name
    attention = model.trunk.layers[0].attention
    joined = first_layer(decoder).joined
    assert torch.equal(joined, torch.cat([attention.query.weight, attention.key_value.weight]))
    assert decoder.capture() is None  # on a CPU


def test_a_model_in_training_may_be_compiled_and_recompute():
    config = tiny_config()
    model, prompt = build(config, dtype=torch.float32), random_tokens(config, 1, 9)[0]
    want = torch.stack(list(generation.generate(model, prompt, 6)))
    World().wrap(model, TrainConfig(compile=True, recompute=True))
    got = torch.stack(list(generation.generate(model, prompt, 6)))
    assert torch.equal(got, want)


def test_under_autocast_matrices_are_turned_once():
    model = build(tiny_config(), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        decoder = FastDecoder(model)
        steps = decoder.model
        states = [m.decoding_state(m.initial_memory(2)) for m in (model, steps)]
        for t in range(9):
            tokens = torch.tensor([t, 10 - t])
            want, states[0] = model.step(tokens, states[0])
            got, states[1] = decoder.step(tokens, states[1])
            assert torch.equal(got, want)
    assert isinstance(steps, CompressiveLM)
    layer: Any = steps.trunk.layers[0]
    assert first_layer(decoder).joined.dtype == torch.bfloat16
    assert layer.attention.output.weight.dtype == layer.mlp[0].bias.dtype == torch.bfloat16
    assert layer.mlp_norm.weight.dtype == tied_embedding(steps).table.dtype == torch.float32
    assert layer.compression.kernel.weight.dtype == torch.bfloat16
    assert steps.initial_memory(1).recent[0].dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compression", ["conv", "most_used"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_graph_samples_what_its_steps_sample_one_by_one(compression, precision, monkeypatch):
    config = tiny_config(d_model=32, compression=compression)
    model = build(config, dtype=torch.float32).cuda()
    prompt = random_tokens(config, 1, 7)[0]
    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
        got = torch.stack(list(generation.generate(model, prompt, 30, samples=3)))
        monkeypatch.setattr(FastDecoder, "capture", lambda self: None)
        want = torch.stack(list(generation.generate(model, prompt, 30, samples=3)))
    assert torch.equal(got, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_steps_as_a_cpu_does():
    config = tiny_config(d_model=32)
    model, text = build(config, dtype=torch.float32), random_tokens(config, 1, 11)[0]
    for end in (3, 4, 7, 11):
        want, _ = generation.prime(model.cpu(), text[:end])
        got, _ = generation.prime(model.cuda(), text[:end])
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-3)
