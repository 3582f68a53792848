"""Exports' tokenisers through AutoTokenizer: the tokens and texts of our own."""

import json

import pytest
import torch
from hf_helpers import quiet, write_tiny_release
from transformers import AutoTokenizer, pipeline

import compressive
from compressive.data.tokenizer import FILE, VOCABULARY, BPETokenizer, ByteTokenizer, WordTokenizer, load_tokenizer
from compressive.inference.text import encode_prompt

STORY = "Once upon a time — long ago —\n\nthere was an <unk> old  house;\t«Größe» 日本語 <pad> \r\nit had no end"
TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "bpe": BPETokenizer.train([STORY.encode() * 3], 300),
    "words": WordTokenizer.train([STORY.replace("long", "").encode(), b"\xff odd \\xff\n"]),
}


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases")
    return {kind: write_tiny_release(folder / kind, tokenizer) for kind, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    "text", [STORY, "the old house", "house\n", "\n", " a  b\n\n c", "é", "<pad>", "\u00a0x\u2028y"]
)
def test_tokens_and_texts_are_our_own(releases, kind, text):
    theirs, ours = AutoTokenizer.from_pretrained(releases[kind]), TOKENIZERS[kind]
    tokens = encode_prompt(ours, text.encode()).tolist()
    assert theirs(text)["input_ids"] == tokens
    assert theirs.decode(tokens) == ours.decode(tokens).decode()
    assert theirs.decode(tokens, skip_special_tokens=True) == ours.decode(tokens).decode()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_padding_is_the_token_after_the_last_and_on_the_left(releases, kind):
    tokenizer = AutoTokenizer.from_pretrained(releases[kind])
    assert tokenizer.pad_token_id == TOKENIZERS[kind].vocab_size
    batch = tokenizer(["the old house", "it"], padding=True, return_tensors="pt")
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert (batch["input_ids"] == tokenizer.pad_token_id).equal(batch["attention_mask"] == 0)
    assert batch["attention_mask"][1].tolist() == sorted(batch["attention_mask"][1].tolist())


def test_padding_is_none_of_the_words_and_unused_tokens_stay_unused(tmp_path):
    tokenizer = WordTokenizer.train([b"a <pad> b <<pad>>\n"])
    theirs = AutoTokenizer.from_pretrained(write_tiny_release(tmp_path / "words", tokenizer, vocab_size=9))
    assert (theirs.pad_token, theirs.pad_token_id, len(theirs)) == ("<<<pad>>>", 9, 10)
    assert theirs("a <pad> <unused 6>")["input_ids"] == [*tokenizer.encode(b"a <pad> y z")[:4]]
    assert theirs.decode([*tokenizer.encode(b"a b\n"), 7], skip_special_tokens=True) == "a b\n"


def test_our_own_vocabulary_is_beside_it(releases, tmp_path):
    for kind, tokenizer in TOKENIZERS.items():
        assert json.loads((releases[kind] / VOCABULARY).read_text())["kind"] == kind
        assert (
            load_tokenizer(releases[kind]).encode(STORY.encode()).tolist() == tokenizer.encode(STORY.encode()).tolist()
        )
    TOKENIZERS["bpe"].save(tmp_path)  # as in a release of version 0.1
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    assert load_tokenizer(tmp_path).kind == "bpe"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_pipeline_continues_text_as_our_own_generate(releases, kind):
    with quiet() as warnings:
        generator = pipeline("text-generation", model=str(releases[kind]))
        prompts = ["the old house", "it", "time —\n"]
        found = generator(prompts, max_new_tokens=20, do_sample=False, batch_size=3, return_full_text=False)
        empty = generator("", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    ours = compressive.load(releases[kind], device="cpu")
    for prompt, [one] in zip(prompts, found, strict=True):
        state = ours.read(prompt)
        tokens = torch.cat(list(ours.sample([state], 20, temperature=0))).tolist()
        assert one["generated_text"] == ours.tokenizer.decode(tokens).decode("utf-8", "replace")
    assert empty.endswith(ours.generate("", 20, temperature=0))
    assert warnings == []
