"""Lists of books: the official one, the release's metadata.csv, and ones with named columns."""

import gzip
import lzma
from collections import Counter

import pytest
from helpers import ROOT

from compressive.data.pg19.catalogue import official, read_catalogue

SHARED = ROOT.parent / "shared" / "data" / "pg19"


def test_the_official_list_is_whole():
    books = official()
    assert len(books) == 28_752
    assert Counter(book.split for book in books.values()) == {"train": 28_602, "validation": 50, "test": 100}
    assert sum(book.bytes for book in books.values()) == 11_736_553_257
    assert all(
        book.year is not None and 1483 <= book.year <= 1918 and len(bytes.fromhex(book.sha256)) == 32
        for book in books.values()
    )
    assert all(book.id == book_id for book_id, book in books.items())
    assert (books[860].title, books[860].year, books[860].split) == ("Baby Mine by Margaret Mayo", 1910, "test")
    assert read_catalogue("official") is books


def test_the_release_s_list_takes_its_splits_from_the_official_one(tmp_path):
    lines = b'860,"Baby, Mine",1911,http://x/860\n555,Saki,1913,http://x/555\n10,Bible,1611,u\n999999,New,,u\n'
    for name, pack in (("m.csv", bytes), ("m.csv.gz", gzip.compress), ("m.csv.xz", lzma.compress)):
        (tmp_path / name).write_bytes(pack(lines))
        books = read_catalogue(str(tmp_path / name))
        assert {i: (book.title, book.year, book.split) for i, book in books.items()} == {
            860: ("Baby, Mine", 1911, "test"),
            555: ("Saki", 1913, "validation"),
            10: ("Bible", 1611, "train"),
            999999: ("New", None, "train"),
        }
        assert books[860].sha256 == official()[860].sha256
        assert books[999999].sha256 == ""


def test_a_list_with_named_columns_is_taken_as_it_is(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(
        "pg19_bytes,book_id,split,short_title,publication_date,pg19_sha256,url\n3,860,train,A,1900,ab,http://x\n",
        "utf-8",
    )
    (book,) = read_catalogue(str(path)).values()
    assert (book.id, book.title, book.year, book.split, book.bytes, book.sha256) == (860, "A", 1900, "train", 3, "ab")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"id,title\n", r"line 1: cannot read 'id,title'"),
        (b"1,One,1900,u\ntwo,Two,1900,u\n", r"line 2: cannot read 'two,Two"),
        (b"book_id,split\n1,train\n", "has no column short_title"),
        (
            b"split,book_id,short_title,publication_date,pg19_bytes,pg19_sha256\nvalid,1,A,1900,1,a\n",
            "no split 'valid'",
        ),
        (b"1,caf\xe9,1900,u\n", "is not UTF-8"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(tmp_path, content, message):
    path = tmp_path / "list.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_catalogue(str(path))


def test_a_missing_list_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv does not exist"):
        read_catalogue(str(tmp_path / "nowhere.csv"))


@pytest.mark.skipif(not SHARED.exists(), reason="the release's lists are not at hand")
def test_the_release_s_own_lists_agree_with_the_official_one():
    assert read_catalogue(str(SHARED / "pg19_splits.csv.xz")) == official()
    released = read_catalogue(str(SHARED / "metadata.csv.xz"))
    assert released == official()
