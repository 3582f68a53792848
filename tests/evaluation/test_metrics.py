"""Metrics from nats: bits per character, perplexities and frequency buckets."""

import math
from typing import Any

import numpy as np
import pytest

from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import ByteTokenizer, WordTokenizer
from compressive.evaluation.metrics import by_frequency, summarise


def corpus_of(folder, tokenizer, test=b"to be or not to be\n"):
    return write_corpus(folder, "toy", tokenizer, {"train": [b"be\n"], "valid": [b"be\n"], "test": [test]}, {})


def test_bytes(tmp_path):
    corpus = corpus_of(tmp_path / "toy", ByteTokenizer())
    metrics = summarise(np.full(19, math.log(4)), corpus, "test")
    assert metrics.tokens == 19
    assert metrics.whole_split
    assert metrics.nats == pytest.approx(19 * math.log(4))
    assert metrics.bits_per_token == metrics.bits_per_character == pytest.approx(2)
    assert metrics.perplexity == pytest.approx(4)
    assert metrics.counted_words == 6
    assert (metrics.words, metrics.words_are) == (6, "counted")
    assert (metrics.comparable, metrics.not_comparable) == (None, None)  # defined for PG-19 only
    assert metrics.word_perplexity == pytest.approx(4 ** (19 / 6))
    assert metrics.bits_per_byte is None  # same as bits per character
    assert metrics.buckets == ()
    assert metrics.headline == "bits_per_character"


def test_words(tmp_path):
    tokenizer = WordTokenizer([b"<eos>", b"be", b"to", b"or", b"not", b"<unk>"], [20_000, 10_001, 10_000, 999, 99, 0])
    corpus = corpus_of(tmp_path / "toy", tokenizer)
    nll = np.log([2.0, 3, 5, 7, 8, 12, 27])  # to be or not to be <eos>
    metrics = summarise(nll, corpus, "test")
    assert metrics.headline == "perplexity"
    assert metrics.bits_per_character is None
    assert metrics.bits_per_byte == pytest.approx(nll.sum() / math.log(2) / 19)
    assert metrics.word_perplexity == pytest.approx(math.exp(nll.sum() / 6))
    assert metrics.unknown_tokens == 0
    found: dict[str, Any] = {bucket.name: (bucket.tokens, bucket.perplexity) for bucket in metrics.buckets}
    assert found == {
        ">10K": (3, pytest.approx((3 * 12 * 27) ** (1 / 3))),
        "1K-10K": (2, pytest.approx(4)),
        "100-1K": (1, pytest.approx(5)),
        "<100": (1, pytest.approx(7)),
    }


def test_unknown_words_leave_no_bits_per_byte(tmp_path):
    """Four words that `<unk>` hides cost little, and their bytes would still be counted."""
    tokenizer = WordTokenizer.train([b"to be or not to be\n"], least=2)
    metrics = summarise(np.ones(8), corpus_of(tmp_path / "toy", tokenizer, b"to be, as it were, to be\n"), "test")
    assert (metrics.whole_split, metrics.unknown_tokens, metrics.counted_words) == (True, 4, 7)
    assert metrics.bits_per_byte is metrics.word_perplexity is None
    assert metrics.headline == "perplexity"


def test_the_beginning_of_a_split_has_no_word_perplexity(tmp_path):
    metrics = summarise(np.ones(18), corpus_of(tmp_path / "toy", ByteTokenizer()), "test")
    assert not metrics.whole_split
    assert metrics.counted_words is None
    assert metrics.word_perplexity is None
    assert metrics.bits_per_character == pytest.approx(1 / math.log(2))


def test_edges_of_the_buckets():
    counts = np.array([10_001, 10_000, 1_000, 999, 100, 99, 0])
    buckets = by_frequency(np.ones(7), np.arange(7, dtype=np.uint8), counts)
    assert [(bucket.name, bucket.tokens) for bucket in buckets] == [
        (">10K", 1), ("1K-10K", 2), ("100-1K", 2), ("<100", 2),
    ]  # fmt: skip


def test_an_empty_bucket_has_no_perplexity():
    assert by_frequency(np.ones(2), np.array([0, 0]), np.array([5]))[0].perplexity is None


def test_the_buckets_hold_every_token_once():
    generator = np.random.default_rng(0)
    counts, tokens = generator.integers(20_000, size=50), generator.integers(50, size=500)
    nll = generator.random(500)
    buckets = by_frequency(nll, tokens, counts)
    assert sum(bucket.tokens for bucket in buckets) == 500
    assert sum(b.tokens * math.log(b.perplexity) for b in buckets if b.perplexity) == pytest.approx(nll.sum())


def test_a_diverged_model_has_an_infinite_perplexity(tmp_path):
    corpus = corpus_of(tmp_path / "toy", ByteTokenizer())
    assert summarise(np.full(19, 1000.0), corpus, "test").perplexity == math.inf
    assert math.isnan(summarise(np.full(19, math.nan), corpus, "test").perplexity)
