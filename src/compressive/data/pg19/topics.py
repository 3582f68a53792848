"""Topics of the built books by latent Dirichlet allocation, as in the paper's supplementary table.

A book covers too many subjects for one document, so it is cut into documents of about a thousand words. Books are read
one at a time: first to choose the vocabulary, then to learn from mini-batches that mix documents of several books. A
small set of books is read several times, until there have been enough mini-batches.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from compressive.console import bytes_read
from compressive.data.pg19.stats import books

if TYPE_CHECKING:
    from rich.table import Table

Advance = Callable[[int], None]

WORD = re.compile(r"[^\W\d_]{3,}")  # does not match PG-19's placeholders for removed words, such as <DW52>
DOCUMENT = 1000
"""Words per document, approximately."""
VOCABULARY = 5000
"""Vocabulary size of the topics: the most frequent words that pass the next two limits."""
MIN_BOOKS = 0.15
"""Least share of the books that a word must occur in; rarer words are names or special terms."""
MAX_DOCUMENTS = 0.2
"""Largest share of the documents that a word may occur in; more common words belong to all topics."""
REPEATS = 4
"""Maximum count of a word per document, so that frequent character names do not dominate a topic."""
COUNTED = 3_000_000
"""Words counted while the vocabulary is chosen; beyond that, words of a single book are dropped."""
GROUP = 64
"""Books whose documents are shuffled together."""
BATCH = 256
"""Documents per mini-batch, approximately."""
BATCHES = 300
"""Minimum number of mini-batches."""
TOP = 15
"""Words shown per topic, as in the paper."""

OLD_FORMS = """
    canst couldst didst dost doth durst ere forth hadst hast hath hither mayst methinks nay oft shalt shouldst thee
    thence thine thither thou thy thyself till tis twas unto upon verily whence wherefore whither wilt wouldst yea
"""
CUT_SHORT = "ain aren couldn didn doesn don hadn hasn haven isn let shan shouldn wasn weren won wouldn"
OF_PRINTERS = "chapter ebook footnote gutenberg illustration page project vol volume"
OF_TALK = "asked cried esq replied said says miss mrs sir yes"
FORENAMES = """
    alfred alice anna anne arthur ben betty bill billy bob charles charlie david dick edward elizabeth ellen emma fanny
    francis frank fred george harry helen henry hugh jack james jane jim joe john joseph kate louis lucy margaret maria
    martha martin mary ned nelly nick oliver paul peter philip ralph richard robert sally sam sarah sidney sophia
    stephen susan thomas tom walter will william
"""
STOP_WORDS = " ".join([OLD_FORMS, CUT_SHORT, OF_PRINTERS, OF_TALK, FORENAMES]).split()
"""Stop words in addition to scikit-learn's."""


class TopicsError(RuntimeError):
    """Topics cannot be learnt."""


@dataclass(frozen=True)
class Topic:
    """A topic: a distribution over words."""

    label: str
    """Its first three words."""
    share: float
    """Share of the text that it accounts for."""
    words: list[str]
    """The most probable words, in decreasing order."""
    weights: list[float]
    """Their probabilities in this topic."""


@dataclass(frozen=True)
class Topics:
    """Topics of a split, largest share first, and what they were learnt from."""

    split: str
    seed: int
    books: int
    documents: int
    vocabulary: int
    passes: int
    topics: list[Topic]

    def tables(self, width: int) -> Iterator["Table"]:
        """Yield tables for a terminal of this width; topics are columns."""
        from rich.table import Table

        columns = max(1, (width - 1) // 16)
        for start in range(0, len(self.topics), columns):
            shown = self.topics[start : start + columns]
            table = Table(*(f"{i}: {topic.share:.1%}" for i, topic in enumerate(shown, start + 1)), min_width=16)
            for row in zip(*(topic.words for topic in shown), strict=True):
                table.add_row(*row)
            yield table

    def plot(self, to: Path | BinaryIO) -> None:
        """Plot the words of each topic as bars."""
        from compressive.plotting import COLOURS, figure, headline, save, tidy

        columns = min(5, len(self.topics))
        rows = math.ceil(len(self.topics) / columns)
        fig = figure(2.3 * columns, 2.5 * rows + 0.4)
        top = self.topics[0]
        claim = f"{len(self.topics)} topics of {self.books:,} books; the largest, {top.share:.1%} of the text: "
        detail = "In order of their share of the text. Bars: probability of a word in the topic."
        headline(fig, claim + ", ".join(top.words[:3]), detail)
        panels = fig.subplots(rows, columns, squeeze=False, sharex=True).flat
        for number, axes in enumerate(panels):
            if number >= len(self.topics):
                axes.remove()
                continue
            topic = self.topics[number]
            axes.barh(topic.words, topic.weights, color=COLOURS["recent"], height=0.7)
            axes.invert_yaxis()
            axes.xaxis.set_major_formatter(lambda weight, _: f"{weight:.2g}")
            axes.tick_params(axis="x", labelbottom=number + columns >= len(self.topics))
            tidy(axes, f"{number + 1}: {topic.share:.1%}", grid="x")
        save(fig, to)


def learn_topics(built: Path, split: str = "train", topics: int = 20, seed: int = 0) -> Topics:
    """Learn topics from the books of a split; the same seed gives the same topics.

    Raises ValueError for too few topics or books, TopicsError if scikit-learn is missing.
    """
    if topics < 2:
        raise ValueError(f"topics={topics}: expected at least 2")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: expected 0 to {2**32 - 1}")
    paths = books(built, split)
    if not paths:
        raise ValueError(f"{built / split} holds no books: choose another --split, or build it")
    allocation, stop_words = _scikit_learn()
    size = sum(path.stat().st_size for path in paths)
    with bytes_read("choosing words", size) as advance:
        words, documents = choose_words(paths, stop_words.union(STOP_WORDS), advance)
    if len(words) < TOP:
        raise ValueError(
            f"{built / split} has {len(words)} words that are neither too rare nor too common, expected {TOP} or more: "
            "build more books"
        )
    passes = math.ceil(BATCHES / max(1, documents // BATCH))
    model = allocation(topics, total_samples=documents, random_state=seed)
    with bytes_read(f"learning topics, pass 1 to {passes}", size * passes) as advance:
        for batch in batches(paths, words, passes, seed, advance):
            model.partial_fit(batch)
    weights = model.components_ / model.components_.sum()
    found = sorted((_topic(row, words) for row in weights), key=lambda topic: -topic.share)
    return Topics(split, seed, len(paths), documents, len(words), passes, found)


def choose_words(paths: Sequence[Path], without: Collection[str], advance: Advance) -> tuple[list[str], int]:
    """Return the vocabulary, most frequent word first, and the number of documents."""
    in_books: Counter[str] = Counter()
    in_documents: Counter[str] = Counter()
    documents = 0
    for path in paths:
        found: Counter[str] = Counter()
        for document in read_documents(path, advance):
            found.update(set(document))
            documents += 1
        in_documents.update(found)
        in_books.update(found.keys())
        if len(in_books) > COUNTED:
            for word in [word for word, count in in_books.items() if count == 1]:
                del in_books[word], in_documents[word]
    few, many = MIN_BOOKS * len(paths), MAX_DOCUMENTS * documents
    words = [word for word, count in in_books.items() if count >= few and in_documents[word] <= many]
    words = sorted(set(words).difference(without), key=lambda word: (-in_documents[word], word))
    return words[:VOCABULARY], documents


def batches(
    paths: Sequence[Path], words: Sequence[str], passes: int, seed: int, advance: Advance
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield mini-batches of word counts, (documents, words); every pass has another order."""
    index, random = {word: i for i, word in enumerate(words)}, np.random.default_rng(seed)
    for _ in range(passes):
        order = random.permutation(len(paths))
        for start in range(0, len(paths), GROUP):
            rows = [
                np.bincount([index[word] for word in document if word in index], minlength=len(words))
                .clip(max=REPEATS)
                .astype(np.uint8)
                for i in order[start : start + GROUP]
                for document in read_documents(paths[i], advance)
            ]
            random.shuffle(rows)
            yield from np.array_split(rows, max(1, round(len(rows) / BATCH)))


def read_documents(path: Path, advance: Advance) -> Iterator[list[str]]:
    """Yield the documents of a book, of about equal length, as lower-case words."""
    text = path.read_bytes()
    words = WORD.findall(text.decode("utf-8", "replace").lower())
    count = max(bool(words), round(len(words) / DOCUMENT))
    for i in range(count):
        yield words[i * len(words) // count : (i + 1) * len(words) // count]
    advance(len(text))


def _topic(weights: npt.NDArray[np.float64], words: Sequence[str]) -> Topic:
    """Build a topic from its row of weights (words,), as shares of all text."""
    share = float(weights.sum())
    best = np.argsort(-weights, kind="stable")[:TOP]
    top = [words[i] for i in best]
    return Topic(", ".join(top[:3]), share, top, [float(weights[i] / share) for i in best])


def _scikit_learn() -> tuple[Any, frozenset[str]]:
    """Return scikit-learn's LDA class and stop words; raise TopicsError if it is missing."""
    try:
        from sklearn.decomposition import LatentDirichletAllocation
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
    except ImportError as error:
        raise TopicsError(f"topics need scikit-learn: pip install 'compressive[topics]' ({error})") from None
    return LatentDirichletAllocation, ENGLISH_STOP_WORDS
