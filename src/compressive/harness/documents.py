"""The documents of our tasks, read from local files or a prepared corpus: nothing is downloaded.

lm_eval calls these functions with all of --model_args and --metadata: --metadata enwik8=PATH says where enwik8 is.
"""

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset

from compressive.data.corpus import MANIFEST, Corpus
from compressive.data.pg19.catalogue import official
from compressive.data.pg19.words import OFFICIAL, count_words
from compressive.data.sources import read_enwik8

Split = dict[str, Dataset]
"""The test split alone: its documents have `name`, `text`, `bytes` and `words`."""


def enwik8(enwik8: str = "data/enwik8", **others: object) -> Split:
    """Return the last 5 MB of enwik8 as one document, from enwik8 (plain, .zip, .gz, .xz) or its prepared corpus.

    Raises FileNotFoundError if neither is there, ValueError if it is something else.
    """
    path = Path(enwik8)
    if _is_corpus(path):
        return _split([_of_corpus(path, "enwik8")])
    if not path.is_file():
        raise FileNotFoundError(_nowhere(path, "enwik8", "the file enwik8.zip"))
    splits = read_enwik8(path).splits()
    for before in ("train", "valid"):  # to be read in order, as they are parts of one stream
        deque(splits[before], maxlen=0)
    return _split([("enwik8", b"".join(splits["test"]))])


def pg19(pg19: str = "data/pg19", **others: object) -> Split:
    """Return the test books of PG-19, one document each, from the folder that `compressive data pg19 build` wrote.

    From a prepared corpus, which does not keep where books begin, all of them are one document. If all books are
    there, their words sum up to the official number. Raises FileNotFoundError if neither is there.
    """
    path = Path(pg19)
    if _is_corpus(path):
        name, text = _of_corpus(path, "pg19")
        books = {source for source in Corpus.open(path).manifest.sources if source.startswith("test/")}
        return _split([(name, text)], _official_words(books))
    if not (path / "test").is_dir():
        raise FileNotFoundError(_nowhere(path, "pg19", "the folder that compressive data pg19 build writes"))
    files = sorted((path / "test").glob("*.txt"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise FileNotFoundError(f"{path / 'test'} has no books: expected files ID.txt")
    return _split(
        [(file.stem, file.read_bytes()) for file in files], _official_words({f"test/{f.name}" for f in files})
    )


def bits(doc: dict[str, Any], results: tuple[float]) -> dict[str, tuple[float, float]]:
    """Return what lm_eval sums up over documents: log p, and the number of bytes that it is of."""
    return {"bits_per_byte": (results[0], doc["bytes"])}


def bits_and_words(doc: dict[str, Any], results: tuple[float]) -> dict[str, tuple[float, float]]:
    """Return the same, and log p with the number of words."""
    return bits(doc, results) | {"word_perplexity": (results[0], doc["words"])}


def _split(documents: Iterable[tuple[str, bytes]], words: int | None = None) -> Split:
    """Documents of names and texts; `words` is what their words are to sum up to, if not to what is counted."""
    texts = list(documents)
    counts = [count_words(text) for _, text in texts]
    scale = 1.0 if words is None else words / sum(counts)
    rows = [
        {"name": name, "text": _decode(name, text), "bytes": len(text), "words": count * scale}
        for (name, text), count in zip(texts, counts, strict=True)
    ]
    return {"test": Dataset.from_list(rows)}


def _is_corpus(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _of_corpus(path: Path, name: str) -> tuple[str, bytes]:
    corpus = Corpus.open(path)
    if (held := corpus.manifest.settings.get("corpus")) != name:
        raise ValueError(f"{name}={path}: expected {name}, but this corpus was prepared from {held or 'other text'}")
    return name, corpus.tokenizer.decode(corpus.split("test"))


def _official_words(books: set[str]) -> int | None:
    expected = {f"test/{book.id}.txt" for book in official().values() if book.split == "test"}
    return OFFICIAL["test"].words if books == expected else None


def _decode(name: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 at byte {error.start:,}, and lm_eval takes text as characters: score it with "
            "compressive evaluate"
        ) from error


def _nowhere(path: Path, name: str, what: str) -> str:
    return (
        f"{path} does not exist: say where {name} is with --metadata {name}=PATH, which is {what}, or the corpus "
        f"that compressive data prepare {name} writes"
    )
