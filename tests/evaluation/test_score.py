"""Scoring: every token exactly once, with memory carried, for any lengths."""

import math

import numpy as np
import pytest
import torch
from helpers import build, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from speech_helpers import tiny_wavenet

from compressive import runtime
from compressive.architectures import build_model
from compressive.evaluation import score as module
from compressive.evaluation.score import (
    LONG,
    STREAMS,
    EvalStreams,
    memory_bytes,
    require_memory,
    score,
    streams_for,
)


def text_of(n: int, vocab_size: int = 11, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab_size, size=n).astype(np.uint16)


def straightforward(model, tokens, streams):
    """A plain loop over streams and windows, without padding."""
    V, window = model.config.vocab_size, model.config.window
    scores, predicted = [math.log(V)], len(tokens) - 1
    streams = max(1, min(streams, predicted))
    for stream in range(streams):
        first, last = (edge * predicted // streams for edge in (stream, stream + 1))
        memory = model.initial_memory(1)
        for start in range(first, last, window):
            stop = min(start + window, last)
            x, y = (torch.tensor(tokens[a:b].astype(int))[None] for a, b in ((start, stop), (start + 1, stop + 1)))
            with torch.no_grad():
                out = model(x, memory)
            memory = out.memory
            logp = out.logits.log_softmax(dim=-1).gather(-1, y[..., None])
            scores += (-logp[0, :, 0]).tolist()
    return np.array(scores)


MODELS = {
    window: build(tiny_config(window=window, compression=compression))
    for window, compression in ((2, "conv"), (4, "most_used"), (6, "mean"))
}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from(sorted(MODELS)), st.sampled_from([1, 2, 32]))
def test_every_token_once_as_in_a_straightforward_loop(n, streams, window, block):
    model, tokens = MODELS[window], text_of(n, seed=n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        found = score(model, tokens, streams=streams)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, straightforward(model, tokens, streams), rtol=0, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9))
def test_every_token_but_the_first_is_predicted_in_one_place_from_the_one_before_it(n, streams, window):
    text = EvalStreams(np.arange(n), streams, vocab_size=n)
    windows = [one for block in text.blocks(window, torch.device("cpu")) for one in block]
    assert all(x.shape == y.shape == (text.streams, window) and starts is None for x, y, starts in windows)
    targets = []
    for stream, length in enumerate(text.lengths):
        rows = [(x[stream], y[stream]) for x, y, _ in windows]
        x, y = (torch.cat([row[i] for row in rows] or [torch.empty(0)])[:length] for i in (0, 1))
        assert torch.equal(x + 1, y)
        targets += y.tolist()
    assert targets == list(range(1, n))
    assert len(windows) == -(-max(text.lengths) // window)
    assert np.ptp(text.lengths) <= 1  # so only the last window is padded


def test_one_stream_carries_memory_through_the_whole_text():
    model, tokens = MODELS[4], text_of(61)
    changed = tokens.copy()
    changed[0] = (changed[0] + 1) % 11
    reach = model.config.temporal_range
    assert 20 < reach < 60
    difference = np.abs(score(model, tokens) - score(model, changed))
    assert (difference[1:20] > 0).all()  # far beyond the first window
    assert difference[40:].any() == (reach >= 40)
    split = np.abs(score(model, tokens, streams=4) - score(model, changed, streams=4))
    assert split[1:16].all()
    assert not split[16:].any()  # the other streams do not see the change


def test_a_limit_scores_the_beginning():
    model, tokens = MODELS[4], text_of(50)
    np.testing.assert_allclose(score(model, tokens, limit=23), score(model, tokens)[:23], atol=1e-12)
    assert len(score(model, tokens, limit=1000)) == 50


def test_the_first_token_costs_the_log_of_the_vocabulary_size():
    assert score(MODELS[4], text_of(1)).tolist() == [math.log(11)]


def test_progress_ends_with_all_tokens(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 2)
    heard = []
    score(MODELS[4], text_of(50), streams=3, progress=lambda done, total: heard.append((done, total)))
    assert [done for done, total in heard] == [13, 25, 37, 49, 50]  # after each window on a CPU, where one is slow
    assert {total for _, total in heard} == {50}


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_not_changed(training):
    model = build(tiny_config(dropout=0.5)).train(training)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    first, again = (score(model, text_of(30)) for _ in range(2))
    assert (first == again).all()  # no dropout
    assert model.training is training
    assert model.trunk.layers[0].mlp.training is training
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_mode_is_restored_when_something_fails(monkeypatch):
    model = build(tiny_config()).train()
    monkeypatch.setattr(model.trunk, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(model, text_of(30))
    assert model.training


def test_bf16_is_close():
    model, tokens = build(tiny_config(), dtype=torch.float32), text_of(60)
    exact, rough = (score(model, tokens, streams=2, precision=precision) for precision in ("fp32", "bf16"))
    assert 0 < np.abs(exact - rough).max() < 0.3


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64])
def test_any_integer_type_is_accepted(dtype, tmp_path):
    tokens = text_of(30).astype(dtype)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype, mode="r")
    assert (score(MODELS[4], mapped) == score(MODELS[4], text_of(30))).all()


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (text_of(9), {"streams": 0}, "streams=0: expected at least 1"),
        (text_of(9), {"limit": 0}, "limit=0: expected at least 1"),
        (text_of(0), {}, "tokens=0: expected at least 1"),
        (text_of(9) + 11, {}, r"tokens from 11 to \d+: expected 0 to 10, the model's vocab_size"),
        (text_of(9).astype(float), {}, "tokens of type float64"),
        (text_of(8).reshape(2, 4), {}, r"shape \(2, 4\): expected a row of integers"),
    ],
)
def test_invalid_tokens_and_options_are_refused(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        score(MODELS[4], tokens, **options)


def test_long_texts_are_read_in_streams():
    assert streams_for(LONG - 1) == 1
    assert streams_for(LONG) == STREAMS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same():
    model, tokens = build(tiny_config()), text_of(3000)
    expected = score(model, tokens, streams=3)
    np.testing.assert_allclose(score(model.cuda(), tokens, streams=3), expected, atol=1e-9)


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("config", [tiny_config(memory_size=(6, 9), compressed_size=(0, 3)), tiny_wavenet()])
def test_estimated_memory_is_what_a_model_holds_twice(config, decoding):
    model = build_model(config)
    memory = model.initial_memory(5)
    held = (model.decoding_state(memory) if decoding else memory).state_dict()
    slots = [x for name, x in held.items() if x.is_floating_point() and not name.endswith((".near", ".far"))]
    assert memory_bytes(config, 5, decoding) == 2 * sum(x.numel() * x.element_size() for x in slots)


def test_memories_larger_than_the_machine_are_refused(monkeypatch):
    config, cpu = tiny_config(memory_size=2**20, compressed_size=0), torch.device("cpu")
    monkeypatch.setattr(module, "memory_gib", lambda device: 1.0)
    require_memory(config, 8, cpu)  # 8 rows of 2 layers of 2**20 slots of 8 values of 4 bytes, twice: 1 GiB
    message = (
        "memory_size=1048576, compressed_size=0, streams=9: memories of 2 GiB or more, and this machine has 1.0 GiB"
    )
    with pytest.raises(ValueError, match=message):
        require_memory(config, 9, cpu)
    with pytest.raises(ValueError, match="samples=8: memories of 4 GiB or more"):
        require_memory(config, 8, cpu, decoding=True)
    with pytest.raises(ValueError, match=r"^streams=1000000000: memories of .* and cuda:1 has 1.0 GiB"):
        require_memory(tiny_wavenet(), 10**9, torch.device("cuda:1"))
    monkeypatch.setattr(module, "memory_gib", lambda device: None)
    require_memory(config, 10**30, cpu)  # nothing is known about the machine


def test_the_memory_of_a_machine_is_that_of_its_container(monkeypatch, tmp_path):
    limit, cpu = tmp_path / "memory.max", torch.device("cpu")
    monkeypatch.setattr(runtime, "CGROUP_LIMITS", (limit,))
    whole = runtime.memory_gib(cpu)
    assert whole is not None
    limit.write_text("max\n")
    assert runtime.memory_gib(cpu) == whole > 0.5
    limit.write_text(f"{2**28}\n")
    assert runtime.memory_gib(cpu) == 0.25
    assert runtime.memory_gib(torch.device("meta")) is None


@pytest.mark.parametrize("clips", [None, np.array([0, 9, 30])], ids=["text", "clips"])
@pytest.mark.parametrize("n", [9, 61])
def test_windows_read_in_place_give_the_same(n, clips, monkeypatch):
    """Shorter than the windows that are called, and longer."""
    model, tokens = MODELS[4], text_of(n)
    want = score(model, tokens, streams=2, clips=clips)
    captured = []

    def capture(function):
        captured.append(function)
        return function

    monkeypatch.setattr(module, "capture_for", lambda model: capture)
    assert np.array_equal(score(model, tokens, streams=2, clips=clips), want)
    assert len(captured) == (n > 2 * 4 * 2)  # once, however many windows follow


def test_what_asks_the_host_is_not_captured():
    assert module.capture_for(MODELS[4]) is None  # on a CPU


def test_memory_of_a_reading_in_bf16_is_in_bf16():
    memory = build(tiny_config(compression="most_used")).float().initial_memory(2, "bf16")
    types = {name.split(".")[-1]: x.dtype for name, x in memory.state_dict().items()}
    assert (types["recent"], types["compressed"], types["usage"]) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert types["recent_valid"] == torch.bool
