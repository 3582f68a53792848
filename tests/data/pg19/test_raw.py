"""Raw texts in folders, mirrors and archives; the order of preference among several texts of a book."""

import io
import os
import tarfile
import zipfile

import pytest

from compressive.data.pg19.raw import DAMAGED, find_books, read, stream


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_zip(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def put_tar(path, members):
    with tarfile.open(path, "w:" + path.suffix.removeprefix(".").replace("tar", "")) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def taken(found):
    """Return the text chosen for each id; the last one that `stream` yields wins."""
    books = {raw.id: (raw, content) for raw, content in stream(found, lambda size: None)}
    result = {}
    for book_id in found.books:
        best = found.ranked(book_id)[0]
        if book_id in books and books[book_id][0] is best:
            result[book_id] = books[book_id][1]
        else:
            result[book_id] = read(best)
    return result


def test_flat_folders_mirrors_and_zips_are_read(tmp_path):
    put(tmp_path / "10.txt", b"ten")
    put(tmp_path / "1/2/3/1234/1234.txt", b"mirror")
    put(tmp_path / "0/5/5-0.txt", b"five")
    put(tmp_path / "cache/epub/77/pg77.txt", b"cache")
    put(tmp_path / "78.txt.utf-8", b"download")
    put(tmp_path / "79.TXT", b"shouted")
    put_zip(tmp_path / "2/0/20/20-8.zip", {"20-8.txt": b"twenty"})
    put_zip(tmp_path / "11.zip", {"alice30.txt": b"alice", "picture.png": b"no"})
    put_zip(tmp_path / "many.zip", {"train/300.txt": b"300", "test/301.txt": b"301", "notes.txt": b"none"})
    put(tmp_path / "readme.txt", b"none")
    put(tmp_path / "1/2/3/1234/1234-h/1234-h.htm", b"html")
    put(tmp_path / "1/2/3/1234/1234-h.zip", b"not looked into")
    found = find_books([tmp_path])
    assert taken(found) == {
        10: b"ten", 1234: b"mirror", 5: b"five", 77: b"cache", 78: b"download", 79: b"shouted", 20: b"twenty",
        11: b"alice", 300: b"300", 301: b"301",
    }  # fmt: skip
    root = tmp_path.name
    assert found.books[1234][0].name == f"{root}/1/2/3/1234/1234.txt"
    assert found.books[300][0].name == f"{root}/many.zip/train/300.txt"
    assert sorted(found.unnamed) == [f"{root}/many.zip/notes.txt", f"{root}/readme.txt"]
    assert not found.damaged


@pytest.mark.parametrize("ending", ["tar", "tar.xz", "tar.gz", "tar.bz2"])
def test_tars_are_streamed(tmp_path, ending):
    path = put_tar(tmp_path / f"books.{ending}", [("train/1.txt", b"one" * 1000), ("2-0.txt", b"two"), ("a.md", b"")])
    found = find_books([path])
    assert found.books == {}
    seen: list[int] = []
    streamed = {raw.name: content for raw, content in stream(found, seen.append)}
    assert streamed == {f"books.{ending}/train/1.txt": b"one" * 1000, f"books.{ending}/2-0.txt": b"two"}
    assert 0 < sum(seen) <= path.stat().st_size


def test_the_order_among_several_texts_of_a_book(tmp_path):
    """Remove the preferred text again and again; the next one is chosen each time."""
    first, second = tmp_path / "first", tmp_path / "second"
    order = [
        put(first / "z/9.txt", b"1"),
        put_zip(first / "9.zip", {"9.txt": b"2"}),
        put_tar(first / "a.tar", [("9.txt", b"3")]),
        put(first / "9-8.txt", b"4"),
        put(first / "9-0.txt", b"5"),
        put(first / "pg9.txt", b"6"),
        put(first / "old/9.txt", b"7"),
        put(second / "9.txt", b"8"),
        put(first / "y/9.txt", b""),
    ]
    for path, expected in zip(order, [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b""], strict=True):
        found = find_books([first, second])
        assert taken(found) == {9: expected}
        assert len(found.books[9]) == len(order) - order.index(path)
        path.unlink()


@pytest.mark.parametrize("names", [("9-0.txt", "9-8.txt", "9.txt"), ("9.txt", "9-8.txt", "9-0.txt")])
def test_the_order_holds_inside_a_tar_too(tmp_path, names):
    members = [(name, name.encode()) for name in names]
    found = find_books([put_tar(tmp_path / "a.tar", members)])
    assert taken(found) == {9: b"9.txt"}
    assert [raw.member for raw in found.ranked(9)] == ["9.txt", "9-8.txt", "9-0.txt"]


def test_a_text_in_a_tar_is_skipped_if_a_preferred_one_is_known(tmp_path):
    put(tmp_path / "a/9.txt", b"better")
    put_tar(tmp_path / "b.tar", [("9.txt", b"worse"), ("8.txt", b"only")])
    found = find_books([tmp_path / "a", tmp_path / "b.tar"])
    assert [raw.id for raw, _ in stream(found, lambda size: None)] == [8]
    assert [raw.name for raw in found.ranked(9)] == ["a/9.txt", "b.tar/9.txt"]


def test_the_first_of_two_equal_members_of_a_tar_is_used(tmp_path):
    found = find_books([put_tar(tmp_path / "a.tar", [("9.txt", b"first"), ("9.txt", b"again")])])
    assert taken(found) == {9: b"first"}


def test_damaged_archives_are_named_and_the_rest_is_read(tmp_path):
    put(tmp_path / "1.zip", b"no archive")
    put(tmp_path / "books.zip", b"")
    put(tmp_path / "2.txt", b"two")
    whole = put_tar(tmp_path / "a.tar.xz", [(f"{i}.txt", os.urandom(50_000)) for i in range(10, 20)]).read_bytes()
    put(tmp_path / "a.tar.xz", whole[: len(whole) // 2])
    put(tmp_path / "b.tar.gz", b"nor this")
    found = find_books([tmp_path])
    books = taken(found)
    assert books[2] == b"two"
    assert {10, 11, 12} <= books.keys() < {2, *range(10, 20)}
    root = tmp_path.name
    assert found.damaged[f"{root}/1.zip"][0] == 1
    assert found.damaged[f"{root}/books.zip"][0] is None
    assert {f"{root}/a.tar.xz", f"{root}/b.tar.gz"} <= found.damaged.keys()
    assert all(reason for _, reason in found.damaged.values())
    cut = [book_id for name, (book_id, _) in found.damaged.items() if name.startswith(f"{root}/a.tar.xz/")]
    assert cut == [max(books) + 1]


def test_a_damaged_member_is_found_when_it_is_read(tmp_path):
    path = put_zip(tmp_path / "3.zip", {"3.txt": b"some text that is long enough" * 10})
    data = bytearray(path.read_bytes())
    data[40:50] = bytes(10)
    path.write_bytes(data)
    (raw,) = find_books([tmp_path]).books[3]
    with pytest.raises(DAMAGED):
        read(raw)


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        find_books([tmp_path / "nowhere"])


def test_members_that_point_elsewhere_are_only_read(tmp_path):
    path = put_zip(tmp_path / "in" / "x.zip", {"../../7.txt": b"seven"})
    assert taken(find_books([path])) == {7: b"seven"}
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "x.zip"]
