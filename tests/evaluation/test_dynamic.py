"""Dynamic evaluation: each window is scored before a copy of the model trains on it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import build, tiny_config
from recorded_graph import recorded

from compressive.evaluation import dynamic
from compressive.evaluation.dynamic import dynamic_score
from compressive.evaluation.score import score


def text_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(11, size=n).astype(np.uint8)


def by_hand(model, tokens, learning_rate, clip):
    """The same in a plain loop, with one stream and without padding."""
    model = copy.deepcopy(model)
    groups = [
        [p for name, p in model.named_parameters() if ("compress" in name) is compresses]
        for compresses in (False, True)
    ]
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
    memory, scores = model.initial_memory(1), [np.log(11)]
    for start in range(0, len(tokens) - 1, 4):
        window = torch.tensor(tokens[start : start + 5].astype(int))[None]
        out = model(window[:, :-1], memory, targets=window[:, 1:])
        memory = out.memory.detach()
        scores += out.nll[0].tolist()
        optimiser.zero_grad()
        (out.nll.mean() + out.compression_loss).backward()
        for group in filter(None, groups):
            norm = torch.stack([p.grad.norm() for p in group if p.grad is not None] or [torch.zeros(())]).norm()
            for p in group:
                if p.grad is not None:
                    p.grad *= min(1.0, clip / (norm.item() + 1e-6))
        optimiser.step()
    return np.array(scores)


@pytest.mark.parametrize("loss", ["attention", "autoencoding", "none"])
def test_matches_a_plain_loop(loss):
    model, tokens = build(tiny_config(compression_loss=loss)), text_of(41)
    found = dynamic_score(model, tokens, learning_rate=0.01, clip=0.1)
    np.testing.assert_allclose(found, by_hand(model, tokens, 0.01, 0.1), atol=1e-9)


def test_a_short_tail():
    model, tokens = build(tiny_config()), text_of(44, seed=1)
    np.testing.assert_allclose(dynamic_score(model, tokens, learning_rate=0.01), by_hand(model, tokens, 0.01, 0.1))


def test_a_window_is_scored_before_training_on_it():
    model, tokens = build(tiny_config()), text_of(30)
    static, dynamic = score(model, tokens), dynamic_score(model, tokens, learning_rate=0.05)
    np.testing.assert_allclose(dynamic[:5], static[:5], atol=1e-12)
    assert (np.abs(dynamic[5:] - static[5:]) > 1e-6).all()


def test_later_samples_do_not_change_earlier_outputs():
    model, tokens = build(tiny_config()), text_of(30)
    other = np.concatenate([tokens[:17], (tokens[17:] + 1) % 11])
    scores = [dynamic_score(model, text, learning_rate=0.05) for text in (tokens, other)]
    np.testing.assert_allclose(scores[0][:17], scores[1][:17], atol=1e-12)


def test_it_helps_on_a_text_that_repeats_itself():
    model, tokens = build(tiny_config(), dtype=torch.float32), np.tile(text_of(7), 40)
    static, dynamic = score(model, tokens), dynamic_score(model, tokens, learning_rate=0.01)
    assert dynamic.mean() < 0.7 * static.mean()


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_not_changed(training):
    model = build(tiny_config(dropout=0.5)).train(training).requires_grad_(False)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    with torch.no_grad():
        first, again = (dynamic_score(model, text_of(30), learning_rate=0.05) for _ in range(2))
    assert (first == again).all()
    assert (first != score(model, text_of(30))).any()
    assert model.training is training
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def test_streams_limit_and_precision_are_those_of_plain_scoring():
    model = build(tiny_config(), dtype=torch.float32)
    options: dict[str, Any] = {"streams": 3, "limit": 40, "precision": "bf16"}
    static = score(model, text_of(50), **options)
    dynamic = dynamic_score(model, text_of(50), learning_rate=1e-9, **options)
    np.testing.assert_allclose(dynamic, static, atol=0.05)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_an_invalid_learning_rate_is_refused(rate):
    with pytest.raises(ValueError, match=f"learning_rate={rate}: expected a number above 0"):
        dynamic_score(build(tiny_config()), text_of(9), learning_rate=rate)


def test_windows_read_as_a_graph_give_the_same(monkeypatch):
    """What is replayed updates the weights that the next replay reads."""
    model, tokens = build(tiny_config()), text_of(101)
    want = dynamic_score(model, tokens, learning_rate=0.01, streams=2)
    captured = []

    def capture(function):
        captured.append(function)
        return recorded(function)

    monkeypatch.setattr(dynamic, "capture_for", lambda model: capture)
    adam = torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda *args, fused, capturable, **more: adam(*args, fused=fused, **more))
    np.testing.assert_allclose(dynamic_score(model, tokens, learning_rate=0.01, streams=2), want, atol=1e-9)
    assert len(captured) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same():
    model, tokens = build(tiny_config()), text_of(301)
    want = dynamic_score(model, tokens, learning_rate=0.01, streams=2)
    np.testing.assert_allclose(dynamic_score(model.cuda(), tokens, learning_rate=0.01, streams=2), want, atol=1e-7)
