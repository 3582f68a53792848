"""Generation: the windowed pass again, one token at a time, many samples from one reading, flat for ever."""

import statistics
import time
from typing import Any

import pytest
import torch
from helpers import build, live_bytes, only_new_objects, random_tokens, run_windows, tiny_config, windows_of

from compressive.inference.generate import generate, prime
from compressive.inference.sampling import sample


def windowed_logits(model, tokens):
    """Logits after the last of tokens (B, n), everything read again from the beginning."""
    windows = windows_of(tokens, model.config.window)
    with torch.no_grad():
        return list(run_windows(model, windows, model.initial_memory(len(tokens))))[-1].logits[:, -1]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 19, 40])
@pytest.mark.parametrize("values", [{}, {"compression": "most_used"}, {"adaptive_cutoffs": (4, 7)}])
def test_a_prompt_of_any_length_is_read_as_the_windowed_pass_reads_it(length, values):
    config = tiny_config(**values | {"adaptive_factor": 2})
    model, tokens = build(config), random_tokens(config, 1, length + 6)
    logits, state = prime(model, tokens[0, :length])
    torch.testing.assert_close(logits, windowed_logits(model, tokens[:, :length]), rtol=0, atol=1e-10)
    for end in range(length + 1, length + 7):
        logits, state = model.step(tokens[:, end - 1], state)
        torch.testing.assert_close(logits, windowed_logits(model, tokens[:, :end]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("prompt_length", [1, 7, 12])
def test_tokens_are_those_that_reading_everything_again_would_sample(prompt_length):
    config = tiny_config()
    model, prompt = build(config), random_tokens(config, 1, prompt_length)[0]
    settings: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "top_k": 8}
    got = torch.stack(list(generate(model, prompt, 15, samples=3, seed=4, **settings)), dim=1)

    generator, text = torch.Generator().manual_seed(4), prompt.expand(3, -1)
    for _ in range(15):
        token = sample(windowed_logits(model, text), generator=generator, **settings)
        text = torch.cat([text, token[:, None]], dim=1)
    assert torch.equal(got, text[:, prompt_length:])


def test_samples_differ_and_a_seed_repeats_them():
    config = tiny_config()
    model, prompt = build(config), random_tokens(config, 1, 9)[0]
    first, again, other = (torch.stack(list(generate(model, prompt, 20, samples=4, seed=s))) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(sample.tolist()) for sample in first.T}) == 4


def test_greedy_text_is_the_same_in_every_sample():
    config = tiny_config()
    tokens = torch.stack(list(generate(build(config), torch.tensor([3]), 20, samples=2, temperature=0)))
    assert torch.equal(tokens[:, 0], tokens[:, 1])


def test_a_trainer_may_sample_between_two_steps():
    config = tiny_config(dropout=0.5, attention_dropout=0.5)
    model, prompt = build(config), random_tokens(config, 1, 9)[0]
    want = torch.stack(list(generate(model, prompt, 12)))
    model.train()
    torch.manual_seed(7)
    state, got = torch.get_rng_state(), []
    for tokens in generate(model, prompt, 12):
        assert all(module.training for module in model.modules())  # while the caller holds control
        assert torch.is_grad_enabled()
        got.append(tokens)
    assert torch.equal(torch.stack(got), want)  # without dropout
    assert torch.equal(torch.get_rng_state(), state)
    next(generate(model, prompt, 12))  # and dropped halfway
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (torch.tensor([], dtype=torch.long), {}, "prompt of shape"),
        (torch.zeros(1, 3, dtype=torch.long), {}, "prompt of shape"),
        (torch.tensor([0, 11]), {}, "from 0 to 11: expected whole numbers from 0 to 10"),
        (torch.tensor([0.0]), {}, "prompt of torch.float32"),
        (torch.tensor([0]), {"length": 0}, "length=0"),
        (torch.tensor([0]), {"samples": 0}, "samples=0"),
        (torch.tensor([0]), {"top_p": 2.0}, "top_p=2.0"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_read(prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(build(tiny_config()), prompt, **{"length": 5} | settings)


@only_new_objects()
def watch(length, every):
    """Draw so many tokens; return live bytes and the seconds each token took, stretch by stretch."""
    config = tiny_config(window=8, memory_size=8, compressed_size=8, d_model=16)
    sizes: list[int] = []
    seconds: list[list[float]] = [[]]
    tokens = generate(build(config, dtype=torch.float32), torch.tensor([1]), length, samples=2)
    before = time.perf_counter()
    for count, _ in enumerate(tokens, start=1):
        seconds[-1].append(time.perf_counter() - before)
        if count % every == 0:
            sizes.append(live_bytes())
            seconds.append([])
        before = time.perf_counter()
    return sizes, seconds[:-1]


@pytest.mark.slow
def test_memory_per_token_stays_flat():
    sizes, _ = watch(length=3000, every=500)
    assert len(set(sizes[1:])) == 1


@pytest.mark.soak
def test_time_and_memory_per_token_stay_flat_for_100_000_tokens():
    sizes, seconds = watch(length=100_000, every=10_000)
    assert len(set(sizes[1:])) == 1
    medians = [statistics.median(part) for part in seconds]
    assert max(medians[1:]) < 1.5 * min(medians)
