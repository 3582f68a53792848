"""Tokens to text as they come, for every kind of token."""

import numpy as np
import pytest

from compressive.data.tokenizer import BPETokenizer, ByteTokenizer, WordTokenizer
from compressive.inference.text import TextStream, encode_prompt

TEXT = "Ein Mädchen liest — 本を.\nThe cat sat.\n\nThe end\n"


def tokenizer_of(kind):
    chunks = [TEXT.encode() * 3]
    if kind == "bytes":
        return ByteTokenizer()
    return WordTokenizer.train(chunks) if kind == "words" else BPETokenizer.train(chunks, 280)


@pytest.mark.parametrize("kind", ["bytes", "words", "bpe"])
def test_a_text_comes_out_in_pieces_as_it_does_whole(kind):
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(TEXT.encode()).tolist()
    stream = TextStream(tokenizer, tokens[0])
    pieces = [stream.push(token) for token in tokens[1:]]
    first = tokenizer.decode(tokens[:1]).decode()
    assert first + "".join(pieces) + stream.finish() == TEXT
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_are_no_text_become_replacement_characters():
    stream = TextStream(ByteTokenizer(), 10)
    assert [stream.push(byte) for byte in (0x41, 0xFF, 0xC3, 0x42, 0xE6)] == ["A", "\ufffd", "", "\ufffdB", ""]
    assert stream.finish() == "\ufffd"


def test_a_token_beyond_the_vocabulary_is_shown_as_unknown():
    stream = TextStream(ByteTokenizer(), 65)
    assert stream.push(256) + stream.push(66) == "\ufffdB"


@pytest.mark.parametrize("kind", ["bytes", "words", "bpe"])
def test_a_prompt_is_left_open_to_be_continued(kind):
    tokenizer = tokenizer_of(kind)
    assert tokenizer.decode(encode_prompt(tokenizer, b"The cat")) == b"The cat"
    assert tokenizer.decode(encode_prompt(tokenizer, b"The cat\n")) == b"The cat\n"
    assert tokenizer.decode(encode_prompt(tokenizer, b"")) == b"\n"
    assert encode_prompt(tokenizer, b"The cat").dtype.kind == "u"
    assert isinstance(encode_prompt(tokenizer, b""), np.ndarray)
