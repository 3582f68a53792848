"""Prepare a corpus: find or download its text, tokenise it, write it."""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from compressive.console import bytes_read, warn
from compressive.data.corpus import MANIFEST, SPLITS, Corpus, refuse_foreign, write_corpus
from compressive.data.download import download, sha256_of
from compressive.data.sources import (
    PUBLISHED,
    Text,
    check_shares,
    read_enwik8,
    read_pg19,
    read_text,
    read_wikitext,
)
from compressive.data.speech import prepare as speech
from compressive.data.speech.codes import RATE
from compressive.data.tokenizer import FILE, BPETokenizer, ByteTokenizer, Tokenizer, WordTokenizer, load_tokenizer
from compressive.data.workers import check_workers, cores

DOWNLOADS = "downloads"
CORPORA = (*PUBLISHED, "pg19", "text", *speech.SPEECH)
TOKENIZERS = ("auto", "bytes", "words", "bpe", *speech.TOKENIZERS)
VOCAB_SIZE = 32_000
"""Vocabulary size of BPE unless another is asked for, as in the paper."""
LEARNT = 10**9  # bytes of text that a BPE vocabulary is learnt from; memory grows with it
SHARED = 3 * 10**7  # bytes of text from which several processes pay off


def prepare(
    corpus: str,
    paths: Sequence[Path],
    source: Path | None,
    data_dir: Path,
    tokenizer: str,
    vocab_size: int | None,
    name: str | None,
    split: tuple[float, float, float],
    vocabulary: Path | None = None,
    workers: int = 0,
    force: bool = False,
    min_count: int | None = None,
) -> Corpus:
    """Read a corpus, tokenise it, write it to `data_dir / name` and open it.

    It is read from `paths` or, which is the same for a single path, from `source`; a published corpus is downloaded
    without either. The vocabulary is learnt from the train split, unless `vocabulary` names a tokenizer.json or the
    folder of a corpus; words that occur there fewer than `min_count` times become `<unk>`. A corpus in
    `data_dir / name` that has the same settings and sources is left unchanged; another or a damaged one is replaced
    only with `force`. Raises ValueError for options that do not fit the corpus, and for a corpus that would be
    replaced, before any long work where that can be known.
    """
    if corpus not in CORPORA:
        raise ValueError(f"corpus={corpus!r}: expected one of {', '.join(CORPORA)}")
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer={tokenizer!r}: expected one of {', '.join(TOKENIZERS)}")
    check_shares(split)
    check_workers(workers)
    if paths and source is not None:
        raise ValueError(f"{paths[0]} and --source {source}: expected one of the two")
    inputs = tuple(paths) if source is None else (source,)
    if corpus != "text" and len(inputs) > 1:
        raise ValueError(f"{len(inputs)} paths: {corpus} is read from one file or folder")
    given = None if vocabulary is None else load_tokenizer(vocabulary)
    kind = _kind(corpus, tokenizer, given)
    vocab_size = _vocab_size(kind, vocab_size, vocabulary)
    min_count = _min_count(kind, min_count, vocabulary)
    name = _name(corpus, inputs) if name is None else name
    if not re.fullmatch(r"\w[\w.-]*", name) or name == DOWNLOADS:
        raise ValueError(f"name={name!r}: expected letters, digits, -, _ and ., and not {DOWNLOADS!r}; give a --name")
    if data_dir.exists() and not data_dir.is_dir():
        raise ValueError(f"data_dir={data_dir}: is a file, expected a folder for corpora")
    folder = data_dir / name
    settings = {"corpus": corpus, "tokenizer": kind}
    if vocabulary is not None and corpus not in speech.SPEECH:
        settings["vocabulary"] = sha256_of(vocabulary / FILE if vocabulary.is_dir() else vocabulary)
    elif kind == "bpe":
        settings["vocab_size"] = str(vocab_size)
    elif min_count > 1:
        settings["min_count"] = str(min_count)
    if corpus in ("text", "speech"):
        settings["split"] = " ".join(map(str, split))
    existing = None if force else _existing(folder, settings)
    if existing is None:
        refuse_foreign(folder)
    if existing is not None and not inputs and corpus != "text":
        return _kept(existing)

    if corpus in speech.SPEECH:
        clips = speech.find(corpus, inputs[0] if inputs else None, data_dir / DOWNLOADS, split)
        if existing is not None:
            return _kept(existing, clips.sums)
        made = speech.write(folder, name, clips, speech.TOKENIZERS[kind](), settings)
        print(f"{folder}: prepared, {_summary(made)}")
        return made

    text = _read(corpus, inputs, data_dir / DOWNLOADS, kind, split)
    if existing is not None:
        return _kept(existing, text.sources)
    made_by = given or _tokenizer(kind, text, vocab_size, min_count)
    rare = f"words that occur fewer than {min_count} times in train are <unk>" if min_count > 1 else ""
    note = "; ".join(filter(None, (text.note, rare)))
    workers = workers or (1 if kind == "bytes" or sum(text.sizes.values()) < SHARED else cores())
    with _watched(text, "writing") as splits:
        made = write_corpus(folder, name, made_by, splits, text.sources, note, settings, workers)
    print(f"{folder}: prepared, {_summary(made)}")
    if (warning := _difference(corpus, made.words("train"))) is not None:
        warn(warning)
    return made


def _kind(corpus: str, tokenizer: str, given: Tokenizer | None) -> str:
    """Return the kind of tokeniser: that of `given`, the requested one, or the corpus's default for auto."""
    if given is not None and tokenizer not in ("auto", given.kind):
        raise ValueError(f"tokenizer={tokenizer!r}: --vocabulary is one of {given.kind}; leave out one of the two")
    fits = "words" if corpus.startswith("wikitext") else "bpe" if corpus == "pg19" else "bytes"
    fits = "mulaw" if corpus in speech.SPEECH else fits
    kind = given.kind if given is not None else fits if tokenizer == "auto" else tokenizer
    if (kind in speech.TOKENIZERS) != (corpus in speech.SPEECH):
        raise ValueError(
            f"tokenizer={kind!r}: {', '.join(speech.TOKENIZERS)} are for audio, the others for text; {corpus} is "
            f"{'audio' if corpus in speech.SPEECH else 'text'}: leave out --tokenizer"
        )
    if corpus == "pg19" and kind == "words":
        raise ValueError("tokenizer='words': PG-19 has an open vocabulary, which words cannot cover; use bpe or bytes")
    return kind


def _vocab_size(kind: str, asked: int | None, vocabulary: Path | None) -> int:
    """Return the size of the vocabulary to learn; raise ValueError if one is asked for that is not learnt."""
    if vocabulary is not None and asked is not None:
        raise ValueError(f"vocab_size={asked}: --vocabulary has its own size; leave out one of the two")
    if kind != "bpe" and asked is not None:
        raise ValueError(
            f"vocab_size={asked}: only bpe learns a vocabulary of a given size, and the tokenizer is {kind}: leave out "
            "--vocab-size, or use bpe for text"
        )
    size = VOCAB_SIZE if asked is None else asked
    BPETokenizer.check_size(size)
    return size


def _min_count(kind: str, asked: int | None, vocabulary: Path | None) -> int:
    """Return how often a word must occur to be learnt; raise ValueError if none are learnt, or for less than 1."""
    if vocabulary is not None and asked is not None:
        raise ValueError(f"min_count={asked}: --vocabulary has its own words; leave out one of the two")
    if kind != "words" and asked is not None:
        raise ValueError(
            f"min_count={asked}: only words are counted, and the tokenizer is {kind}: leave out --min-count, or use "
            "words for text"
        )
    if asked is not None and asked < 1:
        raise ValueError(f"min_count={asked}: expected at least 1")
    return asked or 1


def _name(corpus: str, paths: Sequence[Path]) -> str:
    if corpus != "text":
        return corpus
    if len(paths) > 1:
        raise ValueError(f"no name for {len(paths)} paths: give the corpus one with --name")
    return paths[0].resolve().name.split(".")[0] if paths else "text"


def _read(corpus: str, inputs: Sequence[Path], downloads: Path, kind: str, split: tuple[float, float, float]) -> Text:
    """Return the text of a corpus, downloaded if it is published and there is nothing to read it from."""
    if corpus == "text":
        return read_text(inputs, split, kind)
    if corpus == "pg19":
        if not inputs:
            raise ValueError(
                "no --source: PG-19 is not downloaded but built from Project Gutenberg's texts; run: compressive data "
                "pg19 build --source TEXTS --out BUILT --metadata official, and then this with --source BUILT"
            )
        return read_pg19(inputs[0])
    url, sha256 = PUBLISHED[corpus].url, PUBLISHED[corpus].sha256
    source = inputs[0] if inputs else download(url, downloads / url.rsplit("/", 1)[-1], sha256)
    return read_enwik8(source) if corpus == "enwik8" else read_wikitext(corpus, source)


def _existing(folder: Path, settings: Mapping[str, str]) -> Corpus | None:
    """Return the corpus in the folder, None without one; raise ValueError if it is damaged or has other settings."""
    if not (folder / MANIFEST).is_file():
        return None
    existing = Corpus.open(folder)
    _ = existing.tokenizer  # raises if it is missing or damaged
    has = existing.manifest.settings
    if has != settings:
        old = ", ".join(f"{key} {value}" for key, value in has.items() if settings.get(key) != value)
        new = ", ".join(f"{key} {value}" for key, value in settings.items() if has.get(key) != value)
        raise _would_replace(existing, f"prepared with {old or 'no settings'}, not {new or 'these'}")
    return existing


def _kept(existing: Corpus, sources: Mapping[str, str] | None = None) -> Corpus:
    """Return an existing corpus; raise ValueError if it was made from other sources than these, unless None."""
    before = existing.manifest.sources
    if sources is not None and list(before.items()) != list(sources.items()):
        names = [name for name in {**before, **sources} if before.get(name) != sources.get(name)]
        changed = f"{names[0]} is not the same" if names else "in another order"
        raise _would_replace(existing, f"prepared from other files, {changed}")
    print(f"{existing.folder}: already prepared, {_summary(existing)}")
    return existing


def _would_replace(existing: Corpus, difference: str) -> ValueError:
    """Return the error for a corpus that would be replaced: what it holds, how it differs, and what to do."""
    manifest = existing.manifest
    tokens = sum(split.tokens for split in manifest.splits.values())
    first, *others = manifest.sources or ["an unknown source"]
    source = f"{first} and {len(others):,} more" if others else first
    held = f"{manifest.tokenizer}, vocabulary {manifest.vocab_size:,}, {tokens:,} tokens of {source}"
    return ValueError(
        f"{existing.folder} holds another corpus ({held}), {difference}: choose another --name, or replace it with "
        "--force"
    )


def _difference(corpus: str, words: int) -> str | None:
    """Return a warning if the train split's word count is not the published one, else None."""
    expected = PUBLISHED[corpus].train_words if corpus in PUBLISHED else 0
    if words == expected or not expected:
        return None
    title = PUBLISHED[corpus].title
    return f"train has {words:,} words, {title} as published {expected:,}: not comparable with published results"


def _tokenizer(kind: str, text: Text, vocab_size: int, min_count: int) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    with _watched(text, "learning the vocabulary of") as splits:
        if kind == "words":
            return WordTokenizer.train(splits["train"], min_count)
        learnt = BPETokenizer.train(splits["train"], vocab_size, every=1 + text.sizes.get("train", 0) // LEARNT)
    if learnt.vocab_size < vocab_size:  # pairs are merged even if they occur once, so this is the only reason
        warn(
            f"vocabulary of {learnt.vocab_size:,}, {vocab_size:,} asked for: no pairs are left to merge, every word of "
            "the train split is one token"
        )
    return learnt


@contextmanager
def _watched(text: Text, doing: str) -> Iterator[Mapping[str, Iterator[bytes]]]:
    """Yield a pass over the splits that shows progress; on exit its files and progress bars are closed."""

    def watch(split: str, chunks: Iterator[bytes]) -> Generator[bytes, None, None]:
        with bytes_read(f"{doing} {split}", text.sizes.get(split)) as advance:
            for chunk in chunks:
                advance(len(chunk))
                yield chunk

    splits = {split: watch(split, chunks) for split, chunks in text.splits().items()}
    try:
        yield splits
    finally:
        for generator in splits.values():
            generator.close()


def _summary(corpus: Corpus) -> str:
    manifest = corpus.manifest
    lines = [f"{manifest.tokenizer}, vocabulary {manifest.vocab_size:,}"]
    for split in SPLITS:
        info = manifest.splits[split]
        if corpus.tokenizer.is_audio:
            clips, minutes = sum(clip.split == split for clip in corpus.clips), info.tokens / RATE / 60
            lines.append(f"  {split:<5} {info.tokens:>13,} samples {minutes:>10,.2f} minutes {clips:>10,} clips")
            continue
        lines.append(f"  {split:<5} {info.tokens:>13,} tokens {info.bytes:>13,} bytes {info.words:>12,} words")
    return "\n".join(lines + [f"  note: {manifest.note}"] * bool(manifest.note))
