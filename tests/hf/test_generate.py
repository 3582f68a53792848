"""`generate` of Hugging Face on our cache: the tokens of our own, padded or not, in one call or in several."""

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers import build, random_tokens, tiny_config
from hf_helpers import behind_hf, greedy, left_padded, tiny
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from compressive.inference.fast_decoder import FastDecoder

CONFIGS: list[dict[str, Any]] = [
    {},
    {"compression": "most_used"},
    {"norm": "pre", "compressed_positions": "from_window", "empty_memory": "masked"},
    {"memory_size": (6, 2), "compressed_size": (3, 0), "compression": "gru"},
    {"compressed_size": 0, "adaptive_cutoffs": (4, 7), "adaptive_factor": 2},
    {"window": 6, "memory_size": 4, "compression_rate": 3},
]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6], [7, 8, 9], [0, 1, 2, 3, 4, 5, 6, 7]]


def continued(model, inputs, length, **options):
    """New tokens only, as lists."""
    sequences = model.generate(**inputs, max_new_tokens=length, do_sample=False, **options)
    return sequences[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("values", CONFIGS, ids=str)
def test_greedy_is_our_own_also_in_padded_batches(values):
    model = tiny(**values)
    want = [greedy(model.lm, prompt, 11) for prompt in PROMPTS]
    assert continued(model, left_padded(model, PROMPTS), 11) == want
    assert continued(model, left_padded(model, PROMPTS[2:3]), 11) == want[2:3]


@pytest.mark.parametrize("options", [{"use_cache": False}, {"prefill_chunk_size": 3}], ids=str)
def test_other_ways_of_reading_give_the_same(options):
    model = tiny()
    inputs = left_padded(model, PROMPTS)
    assert continued(model, inputs, 9, **options) == continued(model, inputs, 9)


def test_bf16():
    lm = build(tiny_config(d_model=32), dtype=torch.bfloat16)
    model = behind_hf(lm)
    assert model.dtype == torch.bfloat16
    for prompt in PROMPTS:
        assert continued(model, left_padded(model, [prompt]), 9) == [greedy(lm, prompt, 9)]


@pytest.mark.parametrize("values", CONFIGS[:2], ids=str)
def test_two_calls_continue_as_one(values):
    model = tiny(**values)
    inputs = left_padded(model, PROMPTS)
    want = continued(model, inputs, 12)
    first = model.generate(**inputs, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(PROMPTS), 5, dtype=torch.long)], dim=1)
    second = model.generate(
        first.sequences, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=7, do_sample=False
    )
    assert second[:, inputs["input_ids"].shape[1] :].tolist() == want


def test_beams_find_the_most_likely_of_all_continuations():
    model = tiny(vocab_size=3, window=2)
    prompt = torch.tensor([[0, 1, 2, 0, 0], [3, 3, 3, 1, 2]])  # the second is padded
    found = model.generate(prompt, max_new_tokens=4, num_beams=27, do_sample=False)
    every = torch.tensor(list(itertools.product(range(3), repeat=4)))
    for row, length in enumerate((5, 2)):
        texts = torch.cat([prompt[row, -length:].expand(len(every), -1), every], dim=1)
        p = model(texts).logits[:, length - 1 : -1].log_softmax(dim=-1).gather(2, every[..., None]).sum(dim=(1, 2))
        assert found[row, 5:].tolist() == every[p.argmax()].tolist()


def test_sampling_is_repeatable_and_takes_several_sequences():
    model = tiny()
    inputs = left_padded(model, PROMPTS[:2])
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model.generate(**inputs, max_new_tokens=8, do_sample=True, top_k=5, num_return_sequences=3))
    assert found[0].shape == (6, 11)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert len({tuple(row) for row in found[0].tolist()}) > 2


class Collect(BaseStreamer):  # type: ignore[misc]
    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append(-1)


def test_a_streamer_gets_the_prompt_and_each_token():
    model, streamer = tiny(), Collect()
    model.generate(**left_padded(model, PROMPTS[:1]), max_new_tokens=6, do_sample=False, streamer=streamer)
    assert streamer.tokens == [*PROMPTS[0], *greedy(model.lm, PROMPTS[0], 6), -1]


def test_a_row_that_has_ended_waits_without_reading_padding():
    model = tiny(vocab_size=40)
    texts = [greedy(model.lm, prompt, 12) for prompt in PROMPTS[:2]]
    end = next(token for token in texts[0][:6] if token not in texts[1])
    length = texts[0].index(end) + 1
    out = model.generate(
        **left_padded(model, PROMPTS[:2]), max_new_tokens=12, do_sample=False, eos_token_id=end,
        return_dict_in_generate=True,
    )  # fmt: skip
    pad = model.config.pad_token_id
    assert out.sequences[:, 3:].tolist() == [texts[0][:length] + [pad] * (12 - length), texts[1]]
    more = torch.tensor([[1, 2], [3, 4]])  # the first row goes on as if the second had not gone on without it
    last = torch.tensor([[pad], [texts[1][-1]]])
    logits = model(torch.cat([last, more], dim=1), past_key_values=out.past_key_values).logits[:, -1]
    for row, text in enumerate([PROMPTS[0] + texts[0][:length] + [1, 2], PROMPTS[1] + texts[1] + [3, 4]]):
        torch.testing.assert_close(logits[row], model(torch.tensor([text])).logits[0, -1])


def nbytes(cache):
    return {name: (tensor.dtype, tensor.shape) for name, tensor in cache.state.state_dict().items()}


def test_a_cache_stays_as_large_as_it_was():
    model = tiny(window=64, vocab_size=5)
    cache = model(torch.tensor([[1], [2]]), use_cache=True).past_key_values
    first = nbytes(cache)
    model(random_tokens(model.config.model_config, 2, 10_000), past_key_values=cache, logits_to_keep=1)
    assert (cache.get_seq_length(), cache.batch_size) == (10_001, 2)
    assert nbytes(cache) == first
    for _ in range(130):
        model(torch.tensor([[1], [2]]), past_key_values=cache)
    assert nbytes(cache) == first


@pytest.mark.soak
def test_a_cache_stays_as_large_over_10_000_generated_tokens():
    model = tiny()
    out = model.generate(torch.tensor([[1]]), max_new_tokens=10_000, do_sample=True, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 10_001)
    assert nbytes(out.past_key_values) == nbytes(model(torch.tensor([[1]]), use_cache=True).past_key_values)


def test_captured_steps_give_the_same(monkeypatch):
    """What a GPU does, with a function that does again what was captured in place of a graph."""
    model = tiny()
    inputs = left_padded(model, PROMPTS)
    ways: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"eos_token_id": 4}]
    want = [continued(model, inputs, 15, **options) for options in ways]
    monkeypatch.setattr(FastDecoder, "capture", lambda self: lambda function: function)
    assert [continued(model, inputs, 15, **options) for options in ways] == want


def test_a_cache_can_be_forked_and_rows_chosen():
    model = tiny()
    cache = model(torch.tensor([PROMPTS[0], PROMPTS[3]]), use_cache=True).past_key_values
    fork = copy.deepcopy(cache)
    model(torch.tensor([[1, 2], [3, 4]]), past_key_values=cache)
    assert (fork.get_seq_length(), cache.get_seq_length()) == (3, 5)
    fork.batch_repeat_interleave(2)
    fork.batch_select_indices(torch.tensor([3, 0, 1]))
    logits = model(torch.tensor([[5], [6], [7]]), past_key_values=fork).logits[:, -1]
    for row, text in enumerate([[*PROMPTS[3], 5], [*PROMPTS[0], 6], [*PROMPTS[0], 7]]):
        torch.testing.assert_close(logits[row], model(torch.tensor([text])).logits[0, -1])
    assert str(fork) == "CompressiveCache(3 rows, 4 columns read)"
    fork.reset()
    assert (fork.get_seq_length(), fork.batch_size, fork.state) == (0, 0, None)


def test_what_cannot_work_says_so():
    model = tiny()
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"cache_implementation='static': expected none"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(TypeError, match="past_key_values of type DynamicCache: expected a CompressiveCache"):
        model.generate(ids, max_new_tokens=2, past_key_values=DynamicCache())
    with pytest.raises(TypeError, match="past_key_values of type DynamicCache: expected a CompressiveCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids, max_new_tokens=2, prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match=r"padding after a prompt: expected it before"):
        model.generate(torch.tensor([[1, 2], [1, 11]]), max_new_tokens=2)
    with pytest.raises(ValueError, match="nothing but padding"):
        model(torch.tensor([[11]]), use_cache=True)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="2 rows for a cache of 1: expected as many"):
        model(torch.tensor([[1], [2]]), past_key_values=cache)
    with pytest.raises(ValueError, match="labels with a cache"):
        model(ids, labels=ids, past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(-1)
    assert cache.get_max_length() == -1
