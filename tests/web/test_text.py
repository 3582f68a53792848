"""A text that is rewound, forked, edited, resized: what follows is exactly what would have followed anyway."""

import pytest
import torch
from training_helpers import text as sentences
from web_helpers import finish, same_state, tiny_model, tiny_text

from compressive.data.tokenizer import BPETokenizer, WordTokenizer
from compressive.model.compression import COMPRESSORS
from compressive.web import text as module
from compressive.web.engine import Engines, Sizes
from compressive.web.places import EMPTY
from compressive.web.text import SamplingOptions, Text

PROMPT = "It was the best of times, it was the worst of times"
OPTIONS = SamplingOptions(temperature=1.2, top_p=0.95, seed=7)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40, 51, 60, 88, 104, 105, 108, 111])
def test_a_rewound_text_goes_on_as_if_it_had_never_gone_further(length):
    straight, back = tiny_text(PROMPT), tiny_text(PROMPT)
    finish(straight.write(60, OPTIONS))
    finish(back.write(60, OPTIONS))
    back.rewind(length)
    assert len(back) == length
    finish(back.write(len(straight) - length, OPTIONS))
    if length >= len(PROMPT):  # before, the prompt itself was not sampled
        assert back.tokens == straight.tokens
    never = tiny_text(PROMPT[:length])
    finish(never.read(straight.tokens[len(PROMPT) : length]))
    finish(never.write(len(straight) - length, OPTIONS))
    assert same_state(back, never)
    assert back.bits[1:] == pytest.approx(never.bits[1:], abs=1e-3)


def test_a_fork_goes_on_by_itself():
    text = tiny_text(PROMPT)
    finish(text.write(20, OPTIONS))
    fork, tokens, logits = text.fork(60), list(text.tokens), text._logits
    finish(fork.write(30, SamplingOptions(seed=1)))
    assert text.tokens == tokens
    assert text._logits is logits
    again = text.fork(60)
    finish(again.write(11, OPTIONS))
    assert again.tokens == text.tokens
    assert fork.tokens[:60] == tokens[:60]
    assert fork.tokens[60:71] != tokens[60:]


def test_one_text_is_what_it_is_however_it_came_about():
    """Whole windows at once, token by token, in two parts, or with points that were dropped and read again."""
    whole = tiny_text(PROMPT)
    single = Text(whole.engines)
    for token in PROMPT.encode():
        finish(single.read([token]))
    parts = tiny_text(PROMPT[:21])
    finish(parts.read(list(PROMPT[21:].encode())))
    assert same_state(whole, single)
    assert same_state(whole, parts)
    assert single.bits[1:] == pytest.approx(whole.bits[1:], abs=1e-3)
    model = whole.engines.text_model
    assert whole.bits[1:] == pytest.approx((model.score(PROMPT).nats / 0.6931471805599453)[1:], abs=1e-3)


def test_points_that_were_dropped_are_read_again(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 0)
    long = PROMPT * 5
    text = tiny_text(long)
    assert len(text._points) <= 8
    gone = max(set(range(1, 31)) - set(text._points))
    text.rewind(gone * 8 + 5)
    monkeypatch.undo()
    assert same_state(text, tiny_text(long[: gone * 8 + 5]))


def test_an_edit_replaces_the_end():
    text = tiny_text(PROMPT)
    finish(text.write(30, OPTIONS))
    text.rewind(20)
    finish(text.read(list(b"something else")))
    assert "".join(text.pieces) == PROMPT[:20] + "something else"
    assert same_state(text, tiny_text(PROMPT[:20] + "something else"))
    text.rewind(0)
    finish(text.read(list(b"new")))
    assert same_state(text, tiny_text("new"))


def test_sizes_change_from_the_current_window_on():
    text = tiny_text(PROMPT)
    before = text.memory()
    sizes = Sizes((30, 30), (2, 2))
    text.resize(sizes)
    (place,) = text.memory()["places"]
    assert text.sizes == sizes
    assert place["recent"] == [-1] * 18 + before["places"][0]["recent"]
    assert place["firsts"] == before["places"][0]["firsts"][-2:]
    text.resize(Sizes((4, 4), (0, 0)))  # tried on the way; leaves no trace
    text.resize(sizes)
    other = tiny_text(PROMPT)
    other.resize(sizes)
    finish(text.write(30, OPTIONS))
    finish(other.write(30, OPTIONS))
    assert same_state(text, other)
    text.rewind(40)  # before the change
    assert text.sizes == text.engines.default.sizes
    assert same_state(text, tiny_text(PROMPT[:40]))


def test_a_text_read_again_is_that_of_a_model_loaded_with_these_sizes():
    text = tiny_text(PROMPT)
    finish(text.read_again(Sizes((6, 6), (3, 3))))
    assert same_state(text, tiny_text(PROMPT, memory_size=6, compressed_size=3))
    stopped = tiny_text(PROMPT)
    next(stopped.read_again(Sizes((6, 6), (3, 3))))
    assert same_state(stopped, tiny_text(PROMPT))


def test_sizes_that_the_weights_do_not_allow_are_refused():
    text = tiny_text(PROMPT, compressed_size=0)
    with pytest.raises(ValueError, match="expected 0 in layers 0, 1"):
        text.resize(Sizes((8, 8), (4, 4)))
    assert text.sizes.compressed == (0, 0)


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("token", [1, 8, 9, 50])
def test_a_look_is_attention_over_slots_that_have_a_place(compression, token):
    text = tiny_text(PROMPT, compression=compression, empty_memory="masked")
    seen = text.look(token)
    assert (seen["piece"], seen["bits"]) == (PROMPT[token], text.bits[token])
    start = (token - 1) // 8 * 8
    assert seen["memory"]["window"] == {"size": 8, "start": start, "filled": token - start}
    context = seen["context"]
    assert "".join(context["pieces"]) == PROMPT[context["start"] : token]
    for heads, number in zip(seen["layers"], seen["memory"]["layers"], strict=True):
        place = seen["memory"]["places"][number]
        for weights in heads:
            assert len(weights) == 5 + 12 + token - start
            assert sum(weights) == pytest.approx(1, abs=1e-3)
            for weight, first in zip(weights, place["firsts"] + place["recent"], strict=False):
                assert first != -1 or weight == 0  # masked
    likely = {entry["piece"]: entry["probability"] for entry in seen["likely"]}
    if PROMPT[token] in likely and text.bits[token] is not None:
        assert likely[PROMPT[token]] == pytest.approx(2 ** -text.bits[token], abs=1e-4)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"compressed_size": 0}, {"memory_size": (12, 4), "compressed_size": (0, 5)}, {"memory_size": (3, 20)}],
)
@pytest.mark.parametrize("token", [8, 9, 17, 24, 50])
def test_a_look_has_the_text_of_every_slot(sizes, token):
    seen = tiny_text(PROMPT, **sizes).look(token)
    start, pieces = seen["context"]["start"], seen["context"]["pieces"]
    assert 0 <= start < token
    for place in seen["memory"]["places"]:
        spans = [*zip(place["firsts"], place["lasts"], strict=True), *((at, at) for at in place["recent"])]
        filled = [span for span in spans if span != (EMPTY, EMPTY)]
        assert bool(filled) == (token > 8)
        for first, last in filled:
            assert start <= first <= last
            assert "".join(pieces[first - start : last + 1 - start]) == PROMPT[first : last + 1]


def test_a_look_is_what_the_model_attends_to():
    """Against the reference form of a whole window's attention: hide nothing, and compare with a step's weights."""
    text = tiny_text(PROMPT)
    engine = text.engines.default
    state = engine.begin(text._point(6))
    for token in text.tokens[48:50]:
        _, state = engine.step(token, state)
    seen: list[torch.Tensor] = []
    import compressive.model.decoding as decoding

    original = decoding.relative_attention_step

    def noted(*arguments):
        attended, weights = original(*arguments)
        seen.append(weights)
        return attended, weights

    decoding.relative_attention_step = noted
    try:
        engine.model.step(torch.tensor([text.tokens[50]]), state)
    finally:
        decoding.relative_attention_step = original
    looked = tiny_text(PROMPT + "?").look(51)["layers"]
    for weights, heads in zip(seen, looked, strict=True):
        assert torch.allclose(weights[0, :, : 5 + 12 + 3], torch.tensor(heads), atol=1e-4)


def test_parts_of_characters_wait_for_the_last_part():
    text = tiny_text("naïve café")
    assert "".join(text.pieces) == "naïve café"
    assert text.pieces[2:4] == ["", "ï"]
    text.rewind(3)  # within a character
    finish(text.read(list("ïve".encode()[1:])))
    assert "".join(text.pieces) == "naïve"


def test_text_can_follow_whole_characters_only():
    text = tiny_text("a€é")
    assert [text.whole(at) for at in range(7)] == [(0, ""), (1, ""), (1, ""), (1, ""), (4, ""), (4, ""), (6, "")]
    merged = BPETokenizer.train(["aé\naè\naê\naë\n".encode() * 9], 257)
    text = Text(Engines(tiny_model(merged, vocab_size=merged.vocab_size)))
    finish(text.read(text.encode("xaéy")))
    assert text.pieces == ["x", "a", "é", "y"]  # the second token also has the first byte of é
    assert [text.whole(at) for at in range(5)] == [(0, ""), (1, ""), (1, "a"), (3, ""), (4, "")]


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_other_tokenisers_have_pieces_too(kind):
    corpus = sentences(400, 0)
    tokenizer = WordTokenizer.train([corpus]) if kind == "words" else BPETokenizer.train([corpus], 280)
    text = Text(Engines(tiny_model(tokenizer, vocab_size=tokenizer.vocab_size)))
    finish(text.read(text.encode("the cat sat on a mat")))
    assert "".join(text.pieces) == "the cat sat on a mat"
    finish(text.write(10, OPTIONS))
    assert len(text.look(len(text) - 1)["likely"]) == 8


def test_what_was_given_is_told_from_what_was_sampled():
    text = tiny_text(PROMPT)
    finish(text.write(20, OPTIONS))
    assert (text.given, text.fork(60).given, text.fork(20).given) == (51, 51, 20)
    finish(text.read_again(Sizes((6, 6), (3, 3))))
    assert text.given == 51
    finish(text.read([65]))
    assert text.given == len(text) == 72


def test_the_empty_prompt_begins_after_a_newline():
    assert tiny_text("").pieces == ["\n"]
