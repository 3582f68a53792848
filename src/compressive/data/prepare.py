"""Prepare a corpus: find or download its text, tokenise it, write it."""

import re
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from compressive.console import bytes_read
from compressive.data.corpus import SPLITS, Corpus, refuse_foreign, write_corpus
from compressive.data.download import download, sha256_of
from compressive.data.sources import PUBLISHED, Text, read_enwik8, read_pg19, read_text, read_wikitext
from compressive.data.speech import prepare as speech
from compressive.data.speech.codes import RATE
from compressive.data.tokenizer import FILE, BPETokenizer, ByteTokenizer, Tokenizer, WordTokenizer, load_tokenizer
from compressive.data.workers import cores

DOWNLOADS = "downloads"
CORPORA = (*PUBLISHED, "pg19", "text", *speech.SPEECH)
TOKENIZERS = ("auto", "bytes", "words", "bpe", *speech.TOKENIZERS)
LEARNT = 10**9  # bytes of text that a BPE vocabulary is learnt from; memory grows with it
SHARED = 3 * 10**7  # bytes of text from which several processes pay off


def prepare(
    corpus: str,
    paths: Sequence[Path],
    source: Path | None,
    data_dir: Path,
    tokenizer: str,
    vocab_size: int,
    name: str | None,
    split: tuple[float, float, float],
    vocabulary: Path | None = None,
    workers: int = 0,
) -> Corpus:
    """Read a corpus, tokenise it, write it to `data_dir / name` and open it; an up-to-date one is left unchanged.

    A published corpus is read from `source`, or downloaded; "text" is read from `paths`. The vocabulary is learnt from
    the train split, unless `vocabulary` names a tokenizer.json or the folder of a corpus. Raises ValueError for
    options that do not fit the corpus.
    """
    if corpus not in CORPORA:
        raise ValueError(f"corpus={corpus!r}: expected one of {', '.join(CORPORA)}")
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer={tokenizer!r}: expected one of {', '.join(TOKENIZERS)}")
    if corpus == "text" and source is not None:
        raise ValueError(f"source={source}: text takes its files as positional arguments; leave out --source")
    if corpus != "text" and paths:
        raise ValueError(f"PATH {paths[0]}: {corpus} takes one file or folder; give it as --source {paths[0]}")
    if workers < 0:
        raise ValueError(f"workers={workers}: expected at least 1, or 0 for one per core")
    given = None if vocabulary is None else load_tokenizer(vocabulary)
    kind = _kind(corpus, tokenizer, given)
    name = _name(corpus, paths) if name is None else name
    if not re.fullmatch(r"\w[\w.-]*", name) or name == DOWNLOADS:
        raise ValueError(f"name={name!r}: expected letters, digits, -, _ and ., and not {DOWNLOADS!r}")
    folder = data_dir / name
    refuse_foreign(folder)

    settings = {"corpus": corpus, "tokenizer": kind}
    if corpus in speech.SPEECH:
        return _prepare_speech(folder, name, source, split, settings)
    if vocabulary is not None:
        settings["vocabulary"] = sha256_of(vocabulary / FILE if vocabulary.is_dir() else vocabulary)
    elif kind == "bpe":
        settings["vocab_size"] = str(vocab_size)
    if corpus == "text":
        settings["split"] = " ".join(map(str, split))
    elif source is None:
        if (existing := _same(folder, settings, None)) is not None:
            return existing
        if corpus == "pg19":
            raise ValueError(
                "no --source: PG-19 is not downloaded but built from Project Gutenberg's texts; run: compressive data "
                "pg19 build --source TEXTS --out BUILT --metadata official, and then this with --source BUILT"
            )
        published = PUBLISHED[corpus]
        archive = data_dir / DOWNLOADS / published.url.rsplit("/", 1)[-1]
        source = download(published.url, archive, published.sha256)

    text = _read(corpus, paths, source, split)
    if (existing := _same(folder, settings, text.sources)) is not None:
        return existing
    made_by = given or _tokenizer(kind, text, vocab_size)
    workers = workers or (1 if kind == "bytes" or sum(text.sizes.values()) < SHARED else cores())
    with _watched(text, "writing") as splits:
        made = write_corpus(folder, name, made_by, splits, text.sources, text.note, settings, workers)
    print(f"{folder}: prepared, {_summary(made)}")
    if (warning := _difference(corpus, made.words("train"))) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    return made


def _prepare_speech(
    folder: Path, name: str, source: Path | None, split: tuple[float, float, float], settings: dict[str, str]
) -> Corpus:
    """Prepare a corpus of audio clips."""
    if settings["corpus"] == "speech":
        settings |= {"split": " ".join(map(str, split))}
    if source is None and (existing := _same(folder, settings, None)) is not None:
        return existing
    found = speech.find(settings["corpus"], source, folder.parent / DOWNLOADS, split)
    if (existing := _same(folder, settings, found.sums)) is not None:
        return existing
    made = speech.write(folder, name, found, speech.TOKENIZERS[settings["tokenizer"]](), settings)
    print(f"{folder}: prepared, {_summary(made)}")
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


def _name(corpus: str, paths: Sequence[Path]) -> str:
    if corpus != "text":
        return corpus
    if len(paths) > 1:
        raise ValueError(f"no name for {len(paths)} paths: give the corpus one with --name")
    return paths[0].resolve().name.split(".")[0] if paths else "text"


def _read(corpus: str, paths: Sequence[Path], source: Path | None, split: tuple[float, float, float]) -> Text:
    if source is None:
        return read_text(paths, split)
    if corpus == "pg19":
        return read_pg19(source)
    return read_enwik8(source) if corpus == "enwik8" else read_wikitext(corpus, source)


def _same(folder: Path, settings: Mapping[str, str], sources: Mapping[str, str] | None) -> Corpus | None:
    """Return the corpus in the folder if it has these settings and, unless None, these sources; else None."""
    try:
        existing = Corpus.open(folder)
    except (FileNotFoundError, ValueError):  # missing or damaged: prepare it again
        return None
    if existing.manifest.settings != settings:
        return None
    if sources is not None and list(existing.manifest.sources.items()) != list(sources.items()):
        return None
    print(f"{folder}: already prepared, {_summary(existing)}")
    return existing


def _difference(corpus: str, words: int) -> str | None:
    """Return a warning if the train split's word count is not the published one, else None."""
    expected = PUBLISHED[corpus].train_words if corpus in PUBLISHED else 0
    if words == expected or not expected:
        return None
    title = PUBLISHED[corpus].title
    return f"train has {words:,} words, {title} as published {expected:,}: not comparable with published results"


def _tokenizer(kind: str, text: Text, vocab_size: int) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    with _watched(text, "learning the vocabulary of") as splits:
        train = splits["train"]
        if kind == "words":
            return WordTokenizer.train(train)
        return BPETokenizer.train(train, vocab_size, every=1 + text.sizes.get("train", 0) // LEARNT)


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
