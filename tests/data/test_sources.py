"""Sources of text: plain or compressed, in three splits, never extracted, checked by SHA-256."""

import dataclasses
import gzip
import hashlib
import zipfile
from itertools import accumulate

import pytest
from data_helpers import pack, sha
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive.data import sources
from compressive.data.corpus import SPLITS
from compressive.data.sources import PUBLISHED, open_source, read_blocks, read_enwik8, read_text, read_wikitext

EVEN = (0.5, 0.25, 0.25)


def read(text):
    return {split: b"".join(chunks) for split, chunks in text.splits().items()}


@pytest.fixture
def tiny(monkeypatch):
    """Replace the published corpora by ones of a hundred bytes."""
    content = bytes(range(100))
    pages = {split: f" \n = {split} = \n \n some words \n".encode() for split in SPLITS}
    small = {
        "enwik8": dataclasses.replace(PUBLISHED["enwik8"], contents={"enwik8": sha(content)}, cuts=(90, 95)),
        "wikitext2": dataclasses.replace(
            PUBLISHED["wikitext2"], contents={split: sha(pages[split]) for split in ("valid", "test")}
        ),
    }
    monkeypatch.setattr(sources, "PUBLISHED", PUBLISHED | small)
    return content, pages


@pytest.mark.parametrize("name", ["text.txt", "text", "text.zip", "text.gz", "text.xz", "TEXT.GZ"])
def test_every_packing_is_read_as_a_stream(tmp_path, name):
    data = b"line\r\n" * 1000
    if name == "TEXT.GZ":
        path = tmp_path / name
        path.write_bytes(gzip.compress(data))
    else:
        path = pack(tmp_path / name, "member", data)
    before = set(tmp_path.iterdir())
    ((inner, stream),) = ((inner, stream.read()) for inner, stream in open_source(path))
    assert stream == data == b"".join(read_blocks(path))
    assert inner == {"text.zip": "member", "TEXT.GZ": "TEXT"}.get(name, "text.txt" if name == "text.txt" else "text")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("ending", [".zip", ".gz", ".xz"])
@pytest.mark.parametrize("harm", ["cut short", "changed", "something else"])
def test_a_damaged_archive_is_named(tmp_path, ending, harm):
    data = hashlib.shake_256(b"noise").digest(5000)
    path = pack(tmp_path / f"text{ending}", "member", data)
    packed = bytearray(path.read_bytes())
    if harm == "changed":
        packed[2000] ^= 255
    path.write_bytes({"cut short": packed[:-2000], "changed": packed, "something else": b"plain words"}[harm])
    with pytest.raises(ValueError, match=rf"text\{ending} is damaged.* download it again"):
        list(read_blocks(path))


@pytest.mark.parametrize("name", ["../../evil", "a/../../evil.txt", "/evil.txt", "..\\evil.txt", "C:\\evil.txt"])
def test_an_archive_with_a_member_outside_its_folder_is_refused(tmp_path, name, tiny):
    content, pages = tiny
    path = tmp_path / "in" / "trap.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("enwik8", content)
        archive.writestr("story.txt", content)
        for split in SPLITS:
            archive.writestr(f"wiki.{split}.tokens", pages[split])
        archive.writestr(name, b"evil")
    for attempt in (
        lambda: list(open_source(path)),
        lambda: read_enwik8(path),
        lambda: read_wikitext("wikitext2", path),
        lambda: read_text([path], EVEN),
    ):
        with pytest.raises(ValueError, match="outside its folder"):
            attempt()
    assert {file.name for file in tmp_path.rglob("*")} == {"in", "trap.zip"}


@pytest.mark.parametrize("name", ["enwik8", "enwik8.zip", "enwik8.gz", "enwik8.xz"])
def test_enwik8_is_split_by_bytes_and_checked_by_its_content(tmp_path, tiny, name):
    content, _ = tiny
    path = pack(tmp_path / name, "folder/enwik8", content)
    text = read_enwik8(path)
    assert read(text) == {"train": content[:90], "valid": content[90:95], "test": content[95:]}
    assert read(text) == read(text)  # each pass starts anew
    assert text.sources == {name: sha(path.read_bytes())}
    for wrong in (content[:-1], content + b"!", content[::-1]):
        pack(path, "enwik8", wrong)
        with pytest.raises(ValueError, match=f"is not enwik8 as published: its {len(wrong)} bytes"):
            read(read_enwik8(path))


def test_a_missing_enwik8_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"enwik8\.xz does not exist: .*mattmahoney"):
        read_enwik8(tmp_path / "enwik8.xz")
    pack(tmp_path / "other.zip", "enwik9", b"x")
    with pytest.raises(FileNotFoundError, match="no member enwik8"):
        read_enwik8(tmp_path / "other.zip")


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zip"])
def test_wikitext_is_read_from_a_folder_or_its_archive(tmp_path, tiny, ending):
    _, pages = tiny
    if ending == ".zip":
        path = tmp_path / "wikitext-2-v1.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("wikitext-2/", b"")
            for split in SPLITS:
                archive.writestr(f"wikitext-2/wiki.{split}.tokens", pages[split])
    else:
        path = tmp_path
        for split in SPLITS:
            pack(tmp_path / f"wiki.{split}.tokens{ending}", "", pages[split])
    text = read_wikitext("wikitext2", path)
    assert read(text) == pages
    assert text.note == ""
    assert len(text.sources) == (1 if ending == ".zip" else 3)


def test_shuffled_articles_are_taken_last_and_noted(tmp_path, tiny):
    _, pages = tiny
    for split in ("valid", "test"):
        pack(tmp_path / f"wiki.{split}.tokens", "", pages[split])
    with pytest.raises(FileNotFoundError, match=r"no wiki\.train\.tokens.*wikitext\.smerity\.com"):
        read_wikitext("wikitext2", tmp_path)
    pack(tmp_path / "wiki.train.shuffled-articles.tokens.xz", "", b"other order\n")
    shuffled = read_wikitext("wikitext2", tmp_path)
    assert read(shuffled)["train"] == b"other order\n"
    assert "shuffled" in shuffled.note
    pack(tmp_path / "wiki.train.tokens.gz", "", pages["train"])
    assert read(read_wikitext("wikitext2", tmp_path)) == pages


def test_wikitext_with_another_test_split_is_refused(tmp_path, tiny):
    _, pages = tiny
    for split in SPLITS:
        pack(tmp_path / f"wiki.{split}.tokens", "", pages[split] + b"x" * (split == "test"))
    with pytest.raises(ValueError, match=r"wiki\.test\.tokens is not WikiText-2 as published"):
        read(read_wikitext("wikitext2", tmp_path))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_wikitext("wikitext2", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"expected a \.zip"):
        read_wikitext("wikitext2", tmp_path / "wiki.test.tokens")


@given(
    lines=st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), min_size=1, max_size=20),
    shares=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    block=st.integers(1, 20),
)
@settings(deadline=None)
def test_shares_are_cut_at_line_ends_and_lose_nothing(tmp_path_factory, lines, shares, block):
    path = tmp_path_factory.getbasetemp() / "shares.txt"
    whole = b"".join(line + b"\n" for line in lines)
    path.write_bytes(whole)
    split = tuple(share / sum(shares) for share in shares)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        parts = read(read_text([path], split))
    assert b"".join(parts[name] for name in SPLITS) == whole
    ends, at = list(accumulate(len(line) + 1 for line in lines)), 0
    for name, share in (("train", split[0]), ("valid", split[0] + split[1])):
        target = max(round(share * len(whole)), at + 1)
        expected = next((end for end in ends if end >= target), len(whole))
        assert at + len(parts[name]) == expected
        at = expected


def test_files_are_concatenated_in_order_with_line_ends_between(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "2.txt").write_bytes(b"two\n")
    (tmp_path / "b" / "1.txt").write_bytes(b"one")
    (tmp_path / "b" / "notes.md").write_bytes(b"not this")
    (tmp_path / "b" / "0.txt").write_bytes(b"")
    pack(tmp_path / "a.xz", "", b"zero")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        for name in ("z.txt", "a.txt", "image.png"):
            archive.writestr(name, name)
    text = read_text([tmp_path / "a.xz", tmp_path / "b", tmp_path / "c.zip"], EVEN)
    assert b"".join(read(text)[split] for split in SPLITS) == b"zero\none\ntwo\na.txt\nz.txt\n"
    assert list(text.sources) == ["a.xz", "b/0.txt", "b/1.txt", "b/deep/2.txt", "c.zip"]


def test_files_of_the_same_name_are_distinguished(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_bytes(folder.encode() * 10)
    text = read_text([tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt"], EVEN)
    assert list(text.sources.values()) == [sha(b"a" * 10), sha(b"b" * 10)]


def test_a_folder_with_splits_keeps_them(tmp_path):
    for split in (*SPLITS, "prompts"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "1.txt").write_bytes(split.encode())
    text = read_text([tmp_path], EVEN)
    assert read(text) == {split: split.encode() + b"\n" for split in SPLITS}
    assert list(text.sources) == ["train/1.txt", "valid/1.txt", "test/1.txt"]
    (tmp_path / "valid" / "1.txt").unlink()
    (tmp_path / "valid").rmdir()
    with pytest.raises(ValueError, match="train, test but no valid"):
        read_text([tmp_path], EVEN)


@pytest.mark.parametrize("split", [(0.9, 0.1, 0.0), (0.9, 0.1, 0.1), (1.2, -0.1, -0.1), (0.5, 0.5)])
def test_invalid_shares_are_refused(tmp_path, split):
    (tmp_path / "a.txt").write_bytes(b"a\n")
    with pytest.raises(ValueError, match="three shares"):
        read_text([tmp_path / "a.txt"], split)


def test_missing_texts_are_named(tmp_path):
    with pytest.raises(ValueError, match="no PATH"):
        read_text([], EVEN)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt does not exist"):
        read_text([tmp_path / "nowhere.txt"], EVEN)
    with pytest.raises(FileNotFoundError, match=r"has no \*\.txt"):
        read_text([tmp_path], EVEN)


def test_published_corpora_have_an_address_and_a_checksum():
    for corpus in PUBLISHED.values():
        assert corpus.url.endswith(".zip")
        for checksum in (corpus.sha256, *corpus.contents.values()):
            assert len(bytes.fromhex(checksum)) == 32
