"""Tokenisers: bytes, a closed vocabulary of words, or byte-level BPE.

Text is `bytes`, so no encoding is assumed that a tokeniser does not need. Text may come in chunks that end anywhere:
each tokeniser knows where text can be cut without changing its tokens, and buffers the rest.
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from compressive.data.workers import in_order

if TYPE_CHECKING:
    import tokenizers

Kind = Literal["bytes", "words", "bpe", "mulaw", "pcm16"]
Tokens = npt.NDArray[np.unsignedinteger[Any]]
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]

FILE = "tokenizer.json"
"""The tokeniser of a corpus or a run."""
VOCABULARY = "vocabulary.json"
"""The same in a release, where tokenizer.json has Hugging Face's form; releases of version 0.1 have only the other."""
CHUNK = 1 << 20  # bytes tokenised at a time, to bound memory
LARGEST = 10**7  # tokens of a BPE vocabulary; its trainer allocates memory for all of them
CACHED = 1 << 19  # pieces of text, about a word each, whose tokens BPE caches


class Tokenizer(ABC):
    """Base class of tokenisers; `kind` identifies the class in files."""

    kind: ClassVar[Kind]
    is_audio: ClassVar[bool] = False
    """Whether its input is audio: bytes of 16-bit little-endian samples."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Vocabulary size."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The smallest unsigned type that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens (n,) of a whole text."""
        return np.concatenate([np.empty(0, self.dtype), *self.encode_chunks([text])])

    def encode_chunks(self, chunks: Iterable[bytes], workers: int = 1) -> Iterator[Tokens]:
        """Yield the tokens of a text given in chunks; they depend on neither the chunk borders nor `workers`."""
        parts = uncut(chunks, self.last_cut)
        if workers > 1:
            return in_order(_work, parts, workers, partial(_begin_work, type(self), self._state()))
        return (self._encode(text, offset) for offset, text in parts)

    @abstractmethod
    def decode(self, ids: Ids) -> bytes:
        """Return the text of tokens (n,); raise ValueError if a token is outside the vocabulary."""

    def count_unknown(self, ids: Ids) -> int:
        """Return how many of the tokens (n,) stand for text that they do not determine; 0 without an unknown token."""
        return 0

    def same_as(self, other: "Tokenizer") -> bool:
        """Return whether both give every text the same tokens: they are of one kind and vocabulary."""
        return self.kind == other.kind and self._state() == other._state()

    def save(self, folder: Path, name: str = FILE) -> None:
        """Write tokenizer.json, or the file of this name."""
        state = {"kind": self.kind} | self._state()
        (folder / name).write_text(json.dumps(state) + "\n", "utf-8")

    def huggingface(self) -> "tokenizers.Tokenizer | None":
        """Return the tokeniser as Hugging Face's libraries run it, without special tokens; None for audio.

        A text is encoded as one that goes on: words get no `<eos>` after a last line without a line feed.
        """
        return None

    @staticmethod
    @abstractmethod
    def last_cut(text: bytes) -> int:
        """Return the last position where the text can be cut whatever follows; 0 if there is none."""

    @abstractmethod
    def _encode(self, text: bytes, offset: int) -> Tokens:
        """Return the tokens of a text between two cuts, which starts `offset` bytes into the whole text."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the state to save, as JSON values."""

    @classmethod
    @abstractmethod
    def _restore(cls, state: dict[str, Any]) -> Self:
        """Build the tokeniser from what `_state` returned."""

    def _checked(self, ids: Ids) -> npt.NDArray[np.integer[Any]]:
        array = np.asarray(ids)
        if array.size == 0:
            return np.empty(0, self.dtype)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"ids of shape {array.shape} and type {array.dtype}: expected one row of integers")
        if array.min() < 0 or array.max() >= self.vocab_size:
            wrong = array[(array < 0) | (array >= self.vocab_size)][0]
            raise ValueError(f"token {wrong}: expected 0 to {self.vocab_size - 1}; tokens of another tokeniser?")
        return array


class ByteTokenizer(Tokenizer):
    """Each byte is a token."""

    kind = "bytes"

    @property
    def vocab_size(self) -> int:
        """256, one per byte."""
        return 256

    def decode(self, ids: Ids) -> bytes:
        """Return the tokens as bytes."""
        return self._checked(ids).astype(np.uint8).tobytes()

    @staticmethod
    def last_cut(text: bytes) -> int:
        """Return the end: text can be cut anywhere."""
        return len(text)

    def huggingface(self) -> "tokenizers.Tokenizer":
        """Return BPE without merges."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        engine = Tokenizer(models.BPE(vocab=_BYTES, merges=[]))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return _with_byte_decoder(engine)

    def _encode(self, text: bytes, offset: int) -> Tokens:
        return np.frombuffer(text, np.uint8)

    def _state(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _restore(cls, state: dict[str, Any]) -> Self:
        return cls()


class WordTokenizer(Tokenizer):
    """The words of the training text, most frequent first, as adaptive softmax needs; others become `<unk>`.

    Words are separated by white space. Each line ends in `<eos>`, empty lines too, as in TransformerXL. Runs of spaces
    are lost: a decoded line has one space between words.
    """

    kind = "words"
    unknown = b"<unk>"
    end = b"<eos>"

    def __init__(self, words: Sequence[bytes], counts: Sequence[int]) -> None:
        if len(words) != len(counts):
            raise ValueError(f"{len(counts)} counts: expected one for each of {len(words)} words")
        self.words = list(words)
        self.counts = np.array(counts, np.int64)  # occurrences of each word in training
        self._index = {word: index for index, word in enumerate(self.words)}
        for special in (self.unknown, self.end):
            if special not in self._index:
                raise ValueError(f"the vocabulary has no {special.decode()}: train it again")

    @classmethod
    def train(cls, chunks: Iterable[bytes], least: int = 1) -> Self:
        """Return a tokeniser with all words of a text; equally frequent words are in order of appearance.

        Words that occur fewer than `least` times become `<unk>`, which is then seen in training; WikiText has 3.
        """
        counter: Counter[bytes] = Counter()
        for _, text in uncut(chunks, cls.last_cut):
            counter.update(cls._split(text))
        rare = [word for word, count in counter.items() if count < least and word not in (cls.end, cls.unknown)]
        counter.update({cls.end: 0, cls.unknown: sum(counter.pop(word) for word in rare)})
        ranked = counter.most_common()  # stable: equal counts stay in order of appearance
        return cls([word for word, _ in ranked], [count for _, count in ranked])

    @property
    def vocab_size(self) -> int:
        """Number of words, `<unk>` and `<eos>` included."""
        return len(self.words)

    def decode(self, ids: Ids) -> bytes:
        """Return the words with one space between, `<eos>` as a line feed."""
        end = self._index[self.end]
        text = b" ".join(b"\n" if index == end else self.words[index] for index in self._checked(ids).tolist())
        return text.replace(b" \n", b"\n").replace(b"\n ", b"\n")

    def count_unknown(self, ids: Ids) -> int:
        """Return how many of the tokens (n,) are `<unk>`."""
        return int((np.asarray(ids) == self._index[self.unknown]).sum())

    @staticmethod
    def last_cut(text: bytes) -> int:
        """Return the position after the last line feed."""
        return text.rfind(b"\n") + 1

    def huggingface(self) -> "tokenizers.Tokenizer":
        """Return a table of words between ASCII white space; words that are not UTF-8 are there with escapes."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        ids: dict[str, int] = {}
        for index, word in enumerate(self.words):
            text = word.decode("utf-8", "backslashreplace")
            while text in ids:
                text += "\\"
            ids[text] = index
        end, unknown = self.end.decode(), self.unknown.decode()
        engine = Tokenizer(models.WordLevel(ids, unk_token=unknown))
        engine.normalizer = normalizers.Replace("\n", f" {end} ")
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[ \t\n\r\x0b\x0c]+"), "removed")
        engine.decoder = decoders.Sequence(
            [
                decoders.WordPiece(
                    prefix="\n", cleanup=False
                ),  # a space before each but the first; none has this prefix
                decoders.Replace(Regex(f"^ ?{end}$"), "\n"),
                decoders.Fuse(),
                decoders.Replace("\n ", "\n"),
            ]
        )
        return engine

    @classmethod
    def _split(cls, text: bytes) -> list[bytes]:
        words = text.replace(b"\n", b" " + cls.end + b" ").split()
        if text and not text.endswith(b"\n"):
            words.append(cls.end)
        return words

    def _encode(self, text: bytes, offset: int) -> Tokens:
        words = self._split(text)
        ids = map(self._index.get, words, repeat(self._index[self.unknown]))
        return np.fromiter(ids, self.dtype, count=len(words))

    def _state(self) -> dict[str, Any]:
        # Words may not be UTF-8; invalid bytes become lone surrogates, which JSON escapes preserve.
        words = [word.decode("utf-8", "surrogateescape") for word in self.words]
        return {"words": words, "counts": self.counts.tolist()}

    @classmethod
    def _restore(cls, state: dict[str, Any]) -> Self:
        return cls([word.encode("utf-8", "surrogateescape") for word in state["words"]], state["counts"])


class BPETokenizer(Tokenizer):
    """Byte-level BPE trained on a text; lossless on any UTF-8 text, without an unknown token."""

    kind = "bpe"

    # Pre-tokenisation as in GPT-2, except that line ends stay together. GPT-2 splits the last character off a run of
    # white space, so "\r\n" would always be two tokens, and PG-19, which has such line ends, 5 % longer.
    _PATTERN = (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"  # words, numbers, signs, with an optional space
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # white space
    )
    # The pattern never joins a visible character with following white space. Only ASCII is matched, so that no
    # multi-byte character is cut and no Unicode white space counts as visible.
    _CUT = re.compile(rb"(?<=[!-~])(?=[\t-\r ])")
    _LAST_CUT = re.compile(rb".*[!-~](?=[\t-\r ])", re.DOTALL)

    def __init__(self, engine: "tokenizers.Tokenizer") -> None:
        self._engine = engine
        self._cache: dict[bytes, list[int]] = {}  # cache from piece to tokens, as most pieces repeat
        tokens = sorted(engine.get_vocab().items(), key=lambda item: item[1])
        self._bytes = [bytes(_BYTES[character] for character in token) for token, _ in tokens]

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int, every: int = 1) -> Self:
        """Learn merges from a text, up to `vocab_size` tokens, from one megabyte in `every`.

        Raises ValueError for a vocab_size that `check_size` refuses.
        """
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

        cls.check_size(vocab_size)
        engine = Tokenizer(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(cls._PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[],
            show_progress=False,
        )
        parts = uncut(chunks, cls.last_cut)
        texts = (_utf8(text, offset) for offset, text in parts if offset // CHUNK % every == 0)
        engine.train_from_iterator(texts, trainer)
        return cls(engine)

    @staticmethod
    def check_size(vocab_size: int) -> None:
        """Raise ValueError unless a vocabulary of this size can be learnt."""
        if not 256 <= vocab_size <= LARGEST:
            raise ValueError(
                f"vocab_size={vocab_size}: expected at least 256, one token for each byte, and at most {LARGEST:,}"
            )

    @property
    def vocab_size(self) -> int:
        """256 bytes plus the number of merges."""
        return len(self._bytes)

    def decode(self, ids: Ids) -> bytes:
        """Return the bytes of the tokens, which may end within a character."""
        return b"".join([self._bytes[index] for index in self._checked(ids).tolist()])

    @staticmethod
    def last_cut(text: bytes) -> int:
        """Return the position before the last white space that follows a visible character."""
        cut = BPETokenizer._LAST_CUT.match(text)
        return cut.end() if cut else 0

    def huggingface(self) -> "tokenizers.Tokenizer":
        """Return a copy of the engine that also decodes."""
        from tokenizers import Tokenizer

        return _with_byte_decoder(Tokenizer.from_str(self._engine.to_str()))

    def _encode(self, text: bytes, offset: int) -> Tokens:
        _utf8(text, offset)  # checked here, where the offset for the error message is known
        pieces = self._CUT.split(text)
        if len(self._cache) > CACHED:
            self._cache.clear()
        new = [piece for piece in set(pieces) if piece not in self._cache]
        found = self._engine.encode_batch_fast([piece.decode("utf-8") for piece in new])
        self._cache.update(zip(new, (encoding.ids for encoding in found), strict=True))
        ids = chain.from_iterable(map(self._cache.__getitem__, pieces))
        return np.fromiter(ids, self.dtype)

    def _state(self) -> dict[str, Any]:
        return {"bpe": json.loads(self._engine.to_str())}

    @classmethod
    def _restore(cls, state: dict[str, Any]) -> Self:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(json.dumps(state["bpe"])))


_worker_tokenizer: Tokenizer  # set in worker processes


def _begin_work(kind: type[Tokenizer], state: dict[str, Any]) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core already
    _worker_tokenizer = kind._restore(state)


def _work(part: tuple[int, bytes]) -> Tokens:
    offset, text = part
    return _worker_tokenizer._encode(text, offset)


def tokenizer_file(folder: Path) -> Path:
    """Return where a corpus, a run or a release keeps its tokeniser: a release has it beside Hugging Face's."""
    return folder / (VOCABULARY if (folder / VOCABULARY).is_file() else FILE)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokeniser from a folder, which may be a release, or from its tokenizer.json.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or its kind is unknown.
    """
    if path.is_dir():
        path = tokenizer_file(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: expected the tokeniser of a prepared corpus; prepare it again with --force"
        )
    from compressive.data.speech.codes import MuLawTokenizer, PCMTokenizer  # circular: it imports this module

    every = (ByteTokenizer, WordTokenizer, BPETokenizer, MuLawTokenizer, PCMTokenizer)
    kinds: dict[str, type[Tokenizer]] = {cls.kind: cls for cls in every}
    try:
        state = json.loads(path.read_bytes())
        if not isinstance(state, dict) or state.get("kind") not in kinds:
            raise ValueError(f"expected a tokeniser, one of {', '.join(kinds)}")
        return kinds[state["kind"]]._restore(state)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ValueError(f"{path} cannot be used ({error}): prepare its corpus again with --force") from error


def uncut(chunks: Iterable[bytes], last_cut: Callable[[bytes], int]) -> Iterator[tuple[int, bytes]]:
    """Re-cut a text where `last_cut` allows; yield the offset of each part in the whole text, and the part."""
    offset, rest = 0, b""
    for chunk in chunks:
        for start in range(0, len(chunk), CHUNK):
            text = rest + chunk[start : start + CHUNK]
            cut = last_cut(text)
            if cut:
                yield offset, text[:cut]
            offset, rest = offset + cut, text[cut:]
    if rest:
        yield offset, rest


def _utf8(text: bytes, offset: int) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte 0x{text[error.start]:02x} at offset {offset + error.start:,} is not UTF-8, which BPE expects: "
            "re-encode the text as UTF-8; only models of bytes (data prepare --tokenizer bytes) read anything"
        ) from error


def _with_byte_decoder(engine: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    """The engine, whose tokens are in byte-level BPE's alphabet, with a decoder to text."""
    from tokenizers import decoders

    engine.decoder = decoders.ByteLevel()
    return engine


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's alphabet: printable bytes as themselves, the others as characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
