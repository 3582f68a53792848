"""Metrics from the nats of every token: bits per character, perplexity, word-level perplexity."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from compressive.data.pg19.catalogue import official as pg19_books
from compressive.data.pg19.words import OFFICIAL
from compressive.data.sources import PG19_FOLDERS
from compressive.evaluation.score import Nats, Tokens

if TYPE_CHECKING:
    from compressive.data.corpus import Corpus

Split = Literal["train", "valid", "test"]

BUCKETS = ((">10K", 10_001), ("1K-10K", 1_000), ("100-1K", 100), ("<100", 0))
"""Table 7's frequency buckets: name, and the least number of occurrences in training.

Ranges: more than 10,000; 1,000 to 10,000, both included; 100 to 999; fewer than 100.
"""


@dataclass(frozen=True)
class Bucket:
    """The words of one frequency range."""

    name: str
    tokens: int
    perplexity: float | None  # None where there are no such tokens


@dataclass(frozen=True)
class Metrics:
    """Metrics of a scored text."""

    tokens: int
    whole_split: bool
    nats: float  # L, summed over all tokens
    nats_per_token: float
    bits_per_token: float
    perplexity: float  # e^(nats per token)
    bits_per_character: float | None  # where tokens are bytes
    bits_per_byte: float | None  # of the text, where tokens are not bytes; whole splits without <unk> only
    bits_per_sample: float | None  # where tokens are audio samples; comparable at equal bit depth, rate and gain only
    nats_per_sample: float | None
    counted_words: int | None  # whole splits only, as counted when the corpus was prepared
    words: int | None  # `counted_words`, or PG-19's official number if the split is complete
    words_are: Literal["official", "counted"] | None
    word_perplexity: float | None  # e^(L / words), section 4.2; whole splits without <unk> only
    unknown_tokens: int  # <unk>, which hides text: L is then of less than the text, and not to be divided by its size
    comparable: bool | None  # with published PG-19 results; None for other corpora
    not_comparable: str | None  # why not
    buckets: tuple[Bucket, ...]  # by frequency in training, where tokens are words

    @property
    def headline(self) -> str:
        """Name of the main metric: the one that the paper reports for this corpus and kind of token."""
        if self.comparable is not None and self.word_perplexity is not None:
            return "word_perplexity"
        if self.bits_per_sample is not None:
            return "bits_per_sample"
        if self.bits_per_character is not None:
            return "bits_per_character"
        return "perplexity" if self.buckets or self.word_perplexity is None else "word_perplexity"


def summarise(nll: Nats, corpus: "Corpus", split: Split) -> Metrics:
    """Return the metrics of the nats (n,) of a split, or of its first n tokens."""
    kind, text, audio = corpus.tokenizer.kind, corpus.split(split), corpus.tokenizer.is_audio
    counts = getattr(corpus.tokenizer, "counts", None) if kind == "words" else None
    whole = len(nll) == len(text)
    counted, size = (corpus.words(split), corpus.bytes(split)) if whole else (0, 0)
    unknown = corpus.tokenizer.count_unknown(text[: len(nll)])
    pg19 = corpus.manifest.settings.get("corpus") == "pg19"
    lacks = _lacks(corpus, split, whole) if pg19 else None
    official = pg19 and lacks is None
    words = OFFICIAL[PG19_FOLDERS[split]].words if official else counted
    nats = float(nll.sum())
    mean = nats / len(nll)
    bits = mean / math.log(2)
    return Metrics(
        tokens=len(nll),
        whole_split=whole,
        nats=nats,
        nats_per_token=mean,
        bits_per_token=bits,
        perplexity=_exp(mean),
        bits_per_character=bits if kind == "bytes" else None,
        bits_per_byte=nats / math.log(2) / size if kind != "bytes" and size and not audio and not unknown else None,
        bits_per_sample=bits if audio else None,
        nats_per_sample=mean if audio else None,
        counted_words=counted or None,
        words=words or None,
        words_are=None if not words else "official" if official else "counted",
        word_perplexity=_exp(nats / words) if words and not unknown else None,
        unknown_tokens=unknown,
        comparable=official if pg19 else None,
        not_comparable=lacks,
        buckets=() if counts is None else by_frequency(nll, text[: len(nll)], counts),
    )


def _lacks(corpus: "Corpus", split: Split, whole: bool) -> str | None:
    """Return why a PG-19 score is not comparable; None if all official books of the split were scored."""
    if not whole:
        return "the beginning of the split only"
    folder = PG19_FOLDERS[split]
    expected = {f"{folder}/{book.id}.txt" for book in pg19_books().values() if book.split == folder}
    found = {name for name in corpus.manifest.sources if name.startswith(f"{folder}/")}
    if found == expected:
        return None
    besides = f", {len(found - expected):,} besides" if found - expected else ""
    return f"{len(found & expected):,} of {len(expected):,} books{besides}, counted words"


def by_frequency(nll: Nats, tokens: Tokens, counts: Tokens) -> tuple[Bucket, ...]:
    """Return perplexity by training frequency of the token (Table 7); `counts` (vocab_size,) are those frequencies."""
    groups = [(name, nll[inside]) for name, inside in frequency_groups(tokens, counts)]
    return tuple(Bucket(name, len(part), _exp(float(part.mean())) if len(part) else None) for name, part in groups)


def frequency_groups(tokens: Tokens, counts: Tokens) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.bool_]]]]:
    """Yield the name of each of `BUCKETS` and which of the tokens (n,) are in it, bool (n,)."""
    seen, below = counts[np.asarray(tokens)], np.inf
    for name, least in BUCKETS:
        yield name, (seen >= least) & (seen < below)
        below = least


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):  # overflow gives an infinite perplexity
        return float(np.exp(value))
