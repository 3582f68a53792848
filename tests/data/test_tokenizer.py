"""Tokenisers: round trips, independent of how the text is cut into chunks."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive.data import tokenizer as module
from compressive.data.tokenizer import BPETokenizer, ByteTokenizer, WordTokenizer, load_tokenizer

STORY = b"""It was the best of times, it was the worst of times,
it was the age of wisdom...\tit's the age of foolishness!

   Indented, \xc3\xa9pochs \xe2\x80\x94 of \xf0\x9f\x98\x80 belief;\r\nit was 1859.
"""
GAPS = b" \n\n\n  \r\n\r\n\t\t x\n\n\xe3\x80\x80\xc2\xa0 y" * 9  # so that BPE merges white space too
BPE = BPETokenizer.train([STORY, GAPS], 320)


def _gpt2_engine():
    """Return an engine of older corpora, whose pattern splits line ends."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator([STORY.decode(), GAPS.decode()], trainer)
    return engine


SPACES = " \t\n\r\v\f\x1c\x1f\x85\xa0\u2003\u2028\u3000"
texts = st.one_of(
    st.text(max_size=60),
    st.text(alphabet=SPACES + "ab'!é世😀1\x00\x7f", max_size=40),
).map(lambda text: text.encode("utf-8", "ignore"))


def cut_up(text, cuts):
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def joined(tokenizer, chunks):
    return [int(i) for part in tokenizer.encode_chunks(chunks) for i in part]


@given(text=st.binary(max_size=60), cuts=st.lists(st.integers(0, 100), max_size=4))
@settings(deadline=None)
def test_bytes_round_trip(text, cuts):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text) == joined(tokenizer, cut_up(text, cuts))
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text


@given(text=texts, cuts=st.lists(st.integers(0, 100), max_size=4))
@settings(deadline=None, max_examples=300)
def test_bpe_round_trips_any_utf8_and_ignores_where_it_is_cut(text, cuts):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert joined(BPE, cut_up(text, cuts)) == ids.tolist()
    assert ids.tolist() == BPE._engine.encode(text.decode()).ids  # cutting into pieces does not change tokens


@given(ids=st.lists(st.integers(0, 319), max_size=30))
@settings(deadline=None)
def test_bpe_decodes_any_tokens_to_the_bytes_of_each(ids):
    assert BPE.decode(ids) == b"".join(BPE.decode([i]) for i in ids)


def test_bpe_has_the_size_asked_for_and_every_byte():
    assert BPE.vocab_size == 320
    assert BPE.encode(STORY).dtype == np.uint16
    assert {BPE.decode([i]) for i in range(320)} >= {bytes([byte]) for byte in range(256)}
    assert len(BPE.encode(STORY)) < len(STORY) / 1.5
    assert BPE.encode(b" x\n\n\n\n").tolist() != BPE.encode(b" x\n\n\n").tolist() + BPE.encode(b"\n").tolist()
    assert BPETokenizer.train([b""], 300).vocab_size == 256  # no merges without text
    with pytest.raises(ValueError, match=r"vocab_size=255.*256"):
        BPETokenizer.train([STORY], 255)


def test_bpe_learns_the_same_wherever_the_text_is_cut():
    assert BPETokenizer.train(cut_up(STORY + GAPS, range(0, 600, 7)), 320)._bytes == BPE._bytes


def test_bpe_may_learn_from_a_part(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 100)
    chunks = [b"x " * 5, b"abcd " * 20, b"efgh " * 20, b"ijkl " * 20, b"mnop " * 20]
    learnt = [BPETokenizer.train(chunks, 300, every)._bytes for every in (1, 2, 4)]
    words = [b" abcd", b" efgh", b" ijkl", b" mnop"]
    assert [[word in tokens for word in words] for tokens in learnt] == [
        [True, True, True, True],
        [True, False, True, False],
        [True, False, False, False],
    ]


GPT2 = BPETokenizer(_gpt2_engine())


@given(text=texts, cuts=st.lists(st.integers(0, 100), max_size=4))
@settings(deadline=None, max_examples=200)
def test_vocabularies_with_gpt2s_pattern_still_work(text, cuts):
    ids = GPT2.encode(text)
    assert GPT2.decode(ids) == text
    assert joined(GPT2, cut_up(text, cuts)) == ids.tolist() == GPT2._engine.encode(text.decode()).ids


def test_bpe_refuses_what_is_not_utf8_and_says_where():
    wrong = b"fine words " * 10 + b"caf\xe9 "
    with pytest.raises(ValueError, match=r"0xe9 at offset 113 .*--tokenizer bytes"):
        BPE.encode(wrong)
    with pytest.raises(ValueError, match="offset 113"):
        joined(BPE, [wrong[:50], wrong[50:]])
    with pytest.raises(ValueError, match="offset 113"):
        BPETokenizer.train([wrong[:50], wrong[50:]], 300)


@pytest.mark.parametrize("limit", ["CHUNK", "CACHED"])
def test_long_texts_are_processed_in_parts_with_the_same_result(monkeypatch, limit):
    words = WordTokenizer.train([STORY])
    before = [BPE.encode(STORY).tolist(), words.encode(STORY).tolist()]
    monkeypatch.setattr(module, limit, 5)
    assert [BPE.encode(STORY).tolist(), words.encode(STORY).tolist()] == before
    assert WordTokenizer.train([STORY]).words == words.words


def test_words_come_by_falling_frequency_then_first_appearance():
    tokenizer = WordTokenizer.train([b" c b a \n\n b ", b"d\n c b \n"])
    assert tokenizer.words == [b"<eos>", b"b", b"c", b"a", b"d", b"<unk>"]
    assert tokenizer.counts.tolist() == [4, 3, 2, 1, 1, 0]
    assert len(tokenizer.counts) == tokenizer.vocab_size == 6


def test_rare_words_become_unknown_and_are_counted_as_such():
    tokenizer = WordTokenizer.train([b"c b a b d c b <unk>\n"], least=2)
    assert tokenizer.words == [b"b", b"<unk>", b"c", b"<eos>"]
    assert tokenizer.counts.tolist() == [3, 3, 2, 1]  # <eos> stays, however rare


def test_each_line_ends_in_eos_empty_and_unfinished_ones_too():
    tokenizer = WordTokenizer.train([b"a b\n"])
    named = [tokenizer.words[i] for i in tokenizer.encode(b" \n a zzz b \n\nb")]
    assert named == [b"<eos>", b"a", b"<unk>", b"b", b"<eos>", b"<eos>", b"b", b"<eos>"]
    assert tokenizer.encode(b"").tolist() == []
    assert tokenizer.decode(tokenizer.encode(b" \n a zzz b \n\nb")) == b"\na <unk> b\n\nb\n"


def test_unk_in_the_training_text_is_the_unknown_word():
    tokenizer = WordTokenizer.train([b"<unk> <unk> a\n"])
    assert tokenizer.words == [b"<unk>", b"a", b"<eos>"]


words = st.lists(st.lists(st.sampled_from(["the", "cat", "sat", "—", "on", "été"]), max_size=5), max_size=6)


@given(lines=words, cuts=st.lists(st.integers(0, 200), max_size=4))
@settings(deadline=None)
def test_words_round_trip_and_ignore_where_the_text_is_cut(lines, cuts):
    text = "".join(" ".join(line) + "\n" for line in lines).encode()
    tokenizer = WordTokenizer.train(cut_up(text, cuts))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert joined(tokenizer, cut_up(text, cuts)) == ids.tolist()
    counts = Counter(ids.tolist())
    assert [counts[i] for i in range(tokenizer.vocab_size)] == tokenizer.counts.tolist()
    assert sorted(tokenizer.counts, reverse=True) == tokenizer.counts.tolist()


@pytest.mark.parametrize(("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_tokens_take_the_smallest_type_that_holds_the_vocabulary(size, dtype):
    vocabulary = [b"<eos>", b"<unk>", *(b"%d" % i for i in range(size - 2))]
    tokenizer = WordTokenizer(vocabulary, [1] * size)
    ids = tokenizer.encode(vocabulary[-1])
    assert ids.dtype == dtype
    assert ids.tolist() == [size - 1, 0]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WordTokenizer.train([STORY, b"not\xff utf8"]), BPE])
def test_a_saved_tokenizer_is_the_same_again(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(STORY).tolist() == again.encode(STORY).tolist()
    assert type(again) is type(tokenizer)
    assert again.kind == tokenizer.kind == json.loads((tmp_path / "tokenizer.json").read_text())["kind"]
    assert again.vocab_size == tokenizer.vocab_size
    assert again.encode(STORY).tolist() == tokenizer.encode(STORY).tolist()
    everything = range(tokenizer.vocab_size)
    assert again.decode(everything) == tokenizer.decode(everything)
    if isinstance(tokenizer, WordTokenizer):
        assert isinstance(again, WordTokenizer)
        assert again.counts.tolist() == tokenizer.counts.tolist()


@pytest.mark.parametrize("ids", [[256], [-1], [0, 3000], [[1, 2]], [0.5]])
def test_tokens_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="expected"):
        ByteTokenizer().decode(ids)


def test_a_missing_or_foreign_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"kind": "runes"}')
    with pytest.raises(ValueError, match="bytes, words, bpe"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="<unk>"):
        WordTokenizer([b"<eos>"], [1])
    with pytest.raises(ValueError, match="2 counts"):
        WordTokenizer([b"<eos>"], [1, 2])
