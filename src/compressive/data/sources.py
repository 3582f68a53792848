"""Sources of text: published corpora, and the user's own files, plain or compressed.

Archives are read as streams and never extracted to disk, so no member can be written outside its folder.
"""

import codecs
import gzip
import hashlib
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, cast

from compressive.console import bytes_read
from compressive.data.corpus import SPLITS
from compressive.data.download import sha256_of

BLOCK = 1 << 20


@dataclass(frozen=True)
class Published:
    """A published corpus: its address and checksums."""

    title: str
    """Its usual name."""
    url: str
    """Address of the archive."""
    sha256: str
    """SHA-256 of the archive."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of members, checked for any packaging."""
    cuts: tuple[int, int] = (0, 0)
    """Byte offsets of valid and test, for a corpus in one file."""
    train_words: int = 0
    """Published word count of the train split, if its SHA-256 is not known."""


PUBLISHED = {
    "enwik8": Published(
        title="enwik8",
        url="http://mattmahoney.net/dc/enwik8.zip",
        sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        contents={"enwik8": "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
        cuts=(90_000_000, 95_000_000),
    ),
    # WikiText's original S3 bucket is gone. Its author's mirror has the same archives: the SHA-256 is the one that
    # Hugging Face's datasets recorded for the bucket.
    "wikitext103": Published(
        title="WikiText-103",
        url="https://wikitext.smerity.com/wikitext-103-v1.zip",
        sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        contents={
            "valid": "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
            "test": "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
        },
        train_words=101_425_671,
    ),
    "wikitext2": Published(
        title="WikiText-2",
        url="https://wikitext.smerity.com/wikitext-2-v1.zip",
        sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        contents={
            "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
        train_words=2_051_910,
    ),
}


@dataclass(frozen=True)
class Text:
    """A text in three splits, read lazily."""

    sources: Mapping[str, str]
    """Source files in order, with the SHA-256 of each."""
    splits: Callable[[], Mapping[str, Iterator[bytes]]]
    """Returns a new pass over all splits, to be read in the order train, valid, test; the last may be left out."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each split, where known in advance."""
    note: str = ""
    """What to know before comparing results on it."""


def read_enwik8(path: Path) -> Text:
    """Return enwik8 split into 90, 5 and 5 MB; its SHA-256 is checked for any packaging.

    Raises FileNotFoundError if it is missing; reading raises ValueError if the checksum differs.
    """
    corpus = PUBLISHED["enwik8"]
    (member,) = corpus.contents
    valid, test = corpus.cuts
    _require_file(path, f"enwik8, plain, .zip, .gz or .xz, from {corpus.url}")
    inside = None
    if path.suffix.lower() == ".zip":
        inside = next((name for name in members(path) if PurePosixPath(name).name == member), None)
        if inside is None:
            raise FileNotFoundError(f"{path} has no member {member}: expected the archive at {corpus.url}")

    def splits() -> Mapping[str, Iterator[bytes]]:
        content = _Cutter(_checked(read_blocks(path, inside), corpus.contents[member], path, corpus))
        return {"train": content.until(valid), "valid": content.until(test), "test": content.until(None)}

    return Text({path.name: sha256_of(path)}, splits, {"train": valid, "valid": test - valid})


def read_wikitext(name: str, path: Path) -> Text:
    """Return WikiText with its official splits, from its archive or a folder with its files, plain, .gz or .xz.

    Raises FileNotFoundError if a split is missing; reading raises ValueError if a checksum differs.
    """
    corpus = PUBLISHED[name]
    present: dict[str, tuple[Path, str | None]]  # file name -> file on disk and member of an archive
    if path.is_dir():
        present = {file.name: (file, None) for file in sorted(path.iterdir()) if file.is_file()}
    else:
        _require_file(path, f"{corpus.title}'s archive from {corpus.url}, or a folder with its files")
        if path.suffix.lower() != ".zip":
            raise ValueError(
                f"{path}: expected a .zip, or a folder with wiki.train.tokens, wiki.valid.tokens and so on"
            )
        present = {PurePosixPath(member).name: (path, member) for member in members(path)}

    files: dict[str, tuple[Path, str | None]] = {}
    note = ""
    for split in SPLITS:
        official, shuffled = f"wiki.{split}.tokens", f"wiki.{split}.shuffled-articles.tokens"
        found = [stem + end for stem in (official, shuffled) for end in ("", ".xz", ".gz") if stem + end in present]
        if not found:
            raise FileNotFoundError(
                f"{path} has no {official}, plain, .gz or .xz: expected {corpus.title}'s {split} split there; "
                f"the archive at {corpus.url} has it"
            )
        files[split] = present[found[0]]
        if not found[0].startswith(official):
            note = f"The articles of the {split} split are in a shuffled, not the official, order."

    def splits() -> Mapping[str, Iterator[bytes]]:
        return {
            split: _checked(read_blocks(file, member), corpus.contents.get(split), file, corpus)
            for split, (file, member) in files.items()
        }

    return Text({file.name: sha256_of(file) for file, _ in files.values()}, splits, note=note)


PG19_FOLDERS = {"train": "train", "valid": "validation", "test": "test"}
"""What PG-19 calls its splits."""


def read_pg19(folder: Path) -> Text:
    """Return PG-19 as written by `compressive data pg19 build`: ID.txt in train/, validation/ and test/.

    Books are in order of their ids. A line feed is appended to a book without a final one, as most are. Other line
    feeds nearly always follow a carriage return, so a model can learn where a book ends. Raises FileNotFoundError if
    a split has no books.
    """
    from compressive.data.pg19.catalogue import official, require_built  # circular: it imports this module

    require_built(folder)
    books: dict[str, list[_TextFile]] = {}
    for split, name in PG19_FOLDERS.items():
        paths = (path for path in (folder / name).glob("*.txt") if path.stem.isdecimal())
        found = sorted(paths, key=lambda path: int(path.stem))
        if not found:
            raise FileNotFoundError(
                f"{folder / name} has no books: expected files ID.txt; build them with: compressive data pg19 "
                f"build --source TEXTS --out {folder} --metadata official"
            )
        books[split] = [_TextFile(f"{name}/{path.name}", path) for path in found]

    sizes = {split: sum(book.path.stat().st_size for book in books[split]) for split in SPLITS}
    sums: dict[str, str] = {}
    with bytes_read("hashing the books", sum(sizes.values())) as advance:
        for book in chain(*books.values()):
            sums[book.name] = sha256_of(book.path)
            advance(book.path.stat().st_size)

    published = {f"{book.split}/{book.id}.txt": book.sha256 for book in official().values()}
    notes = []
    for split, name in PG19_FOLDERS.items():
        whole = sum(book.startswith(f"{name}/") for book in published)
        same = sum(sums[book.name] == published.get(book.name) for book in books[split])
        if (len(books[split]), same) != (whole, whole):
            notes.append(f"{len(books[split]):,} of {whole:,} {name} books, {same:,} of them as published")
    return Text(sums, lambda: {split: _lines(books[split]) for split in SPLITS}, sizes, "; ".join(notes))


def check_shares(split: Sequence[float]) -> None:
    """Raise ValueError unless these are shares of train, valid and test."""
    if len(split) != 3 or not all(share > 0 for share in split) or abs(sum(split) - 1) > 1e-6:
        raise ValueError(f"split={tuple(split)}: expected three shares above 0 that sum to 1, as 0.9 0.05 0.05")


def read_text(paths: Sequence[Path], split: tuple[float, float, float], tokenizer: str = "bytes") -> Text:
    """Return the user's files, and all *.txt in folders, concatenated and split at line ends by shares of bytes.

    A single folder with subfolders train, valid and test keeps these splits. Raises ValueError for invalid shares,
    missing subfolders, and files that are not text where `tokenizer` is words or bpe, FileNotFoundError for missing
    files.
    """
    if not paths:
        raise ValueError("no PATH: expected text files, or folders with *.txt files, or one with train/, valid/, test/")
    check_shares(split)
    folders = [name for name in SPLITS if (paths[0] / name).is_dir()] if len(paths) == 1 else []
    if folders and len(folders) < len(SPLITS):
        missing = ", ".join(name for name in SPLITS if name not in folders)
        raise ValueError(f"{paths[0]} has {', '.join(folders)} but no {missing}: expected all three; or give files")
    if folders:
        files = {name: _text_files([paths[0] / name]) for name in SPLITS}
        sizes = {name: _size(files[name], tokenizer) for name in SPLITS}
        return Text(_sums(chain(*files.values())), lambda: {name: _lines(files[name]) for name in SPLITS}, sizes)

    every = _text_files(paths)
    total = _size(every, tokenizer)
    valid, test = round(total * split[0]), round(total * (split[0] + split[1]))

    def splits() -> Mapping[str, Iterator[bytes]]:
        content = _Cutter(_lines(every))
        return {
            "train": content.until(valid, at_line_end=True),
            "valid": content.until(test, at_line_end=True),
            "test": content.until(None),
        }

    return Text(_sums(every), splits, {"train": valid, "valid": test - valid, "test": total - test})


def open_source(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield names and decompressed streams: the members of a .zip, or the content of a .gz, .xz or plain file."""
    kind = path.suffix.lower()
    if kind == ".zip":
        names = members(path)
        with zipfile.ZipFile(path) as archive:
            for name in names:
                with archive.open(name) as stream:
                    yield name, stream
        return
    with gzip.open(path) if kind == ".gz" else lzma.open(path) if kind == ".xz" else path.open("rb") as plain:
        yield path.stem if kind in (".gz", ".xz") else path.name, cast(IO[bytes], plain)


def members(path: Path) -> list[str]:
    """Return the names of the files in a .zip; raise ValueError if it is damaged or a name leaves its folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [member.filename for member in archive.infolist() if not member.is_dir()]
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged or not an archive ({error}): download it again") from error
    for name in names:
        if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or re.match(r"[A-Za-z]:", name):
            raise ValueError(f"{path} has a member {name!r} outside its folder: refused; get the archive elsewhere")
    return names


def read_blocks(path: Path, member: str | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file; for a .zip, of one member or of all in order.

    Raises ValueError if the file is damaged.
    """
    try:
        for name, stream in open_source(path):
            if member in (None, name):
                while block := stream.read(BLOCK):
                    yield block
    except (zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError, RuntimeError) as error:
        # zipfile raises RuntimeError for encrypted members and unknown compression methods.
        raise ValueError(f"{path} is damaged or in an unsupported format ({error}): download it again") from error


class _Cutter:
    """Splits one text into consecutive parts."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._rest = b""
        self._at = 0

    def until(self, end: int | None, at_line_end: bool = False) -> Iterator[bytes]:
        """Yield blocks up to byte `end`, or up to the first line end from there on; with None, up to the end."""
        while block := self._rest or next(self._blocks, b""):
            cut: int | None = None
            if end is not None and self._at + len(block) >= end:
                cut = max(end - self._at, 0)
                if at_line_end:
                    line_end = block.find(b"\n", max(cut - 1, 0))
                    cut = None if line_end < 0 else line_end + 1
            self._rest = b"" if cut is None else block[cut:]
            block = block[:cut]
            self._at += len(block)
            if block:
                yield block
            if cut is not None:
                return


def _checked(blocks: Iterable[bytes], sha256: str | None, path: Path, corpus: Published) -> Iterator[bytes]:
    """Yield the blocks; after the last one, raise ValueError if the SHA-256 is not the published one."""
    found, size = hashlib.sha256(), 0
    for block in blocks:
        found.update(block)
        size += len(block)
        yield block
    if sha256 is not None and found.hexdigest() != sha256:
        raise ValueError(
            f"{path} is not {corpus.title} as published: its {size:,} bytes have SHA-256 {found.hexdigest()}, expected "
            f"{sha256}; download it from {corpus.url}, or prepare it as: compressive data prepare text"
        )


@dataclass(frozen=True)
class _TextFile:
    """A text file, or a member of an archive."""

    name: str
    path: Path
    member: str | None = None


def _text_files(paths: Iterable[Path]) -> list[_TextFile]:
    """Return the given files, and all *.txt in given folders and archives, sorted by name."""
    files: list[_TextFile] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*.txt") if file.is_file())
            found = [_TextFile(f"{path.name}/{file.relative_to(path).as_posix()}", file) for file in inside]
        else:
            _require_file(path, "a text file, plain, .zip, .gz or .xz, or a folder with *.txt")
            packed = path.suffix.lower() == ".zip"
            names = sorted(name for name in members(path) if name.endswith(".txt")) if packed else [None]
            found = [_TextFile(path.name, path, name) for name in names]
        if not found:
            raise FileNotFoundError(f"{path} has no *.txt files: expected at least one")
        files += found
    return files


def _lines(files: Iterable[_TextFile]) -> Iterator[bytes]:
    """Yield the files in order, each with a final line feed, so that no word spans two files."""
    for file in files:
        last = b"\n"
        for block in read_blocks(file.path, file.member):
            yield block
            last = block
        if not last.endswith(b"\n"):
            yield b"\n"


def _size(files: Iterable[_TextFile], tokenizer: str) -> int:
    """Return the bytes that `_lines` yields; raise ValueError for a file that is not text if the tokenizer needs text.

    Both words and bpe need UTF-8. Words need text without NUL bytes too, as a closed vocabulary of binary data is
    useless. Lines may be of any length, so a file is decoded block by block.
    """
    size = 0
    for file in files:
        decoder = codecs.getincrementaldecoder("utf-8")()
        begin = size
        for block in _lines([file]):
            if tokenizer != "bytes":
                at = size - begin - len(decoder.getstate()[0])  # a character that the block before has cut comes first
                try:
                    text = decoder.decode(block)
                except UnicodeDecodeError as error:
                    wrong = f"byte 0x{error.object[error.start]:02x} at offset {at + error.start:,} is not UTF-8"
                    raise _not_text(file, wrong, tokenizer, "re-encode the file, or use --tokenizer bytes") from None
                if tokenizer == "words" and "\0" in text:
                    wrong = f"NUL byte at offset {size - begin + block.index(0):,}, so it is no text"
                    raise _not_text(file, wrong, tokenizer, "use --tokenizer bytes or bpe")
            size += len(block)
    return size


def _not_text(file: _TextFile, wrong: str, tokenizer: str, remedy: str) -> ValueError:
    path = file.path if file.member is None else file.path / file.member
    return ValueError(f"{path}: {wrong}, which --tokenizer {tokenizer} needs: {remedy}")


def _sums(files: Iterable[_TextFile]) -> dict[str, str]:
    """Return the SHA-256 of each file by name, or by full path if two files share a name."""
    homes: dict[str, Path] = {}
    for file in files:
        name = file.name if homes.get(file.name, file.path) == file.path else file.path.as_posix()
        homes[name] = file.path
    return {name: sha256_of(path) for name, path in homes.items()}


def _require_file(path: Path, expected: str) -> None:
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {found}: expected {expected}")
