"""Building PG-19: every book is decided and logged, and a killed build resumes without loss."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile

import pytest
from helpers import ROOT

from compressive.cli import main
from compressive.data.pg19 import build as pg19
from compressive.data.pg19.build import build, read_log
from compressive.data.pg19.catalogue import official
from compressive.data.pg19.infer import infer, split_of
from compressive.data.pg19.raw import find_books, stream
from compressive.data.pg19.rule import Parts, Replacement, decode

SHARED = ROOT.parent / "shared" / "data" / "pg19"
COLUMNS = "split,book_id,short_title,publication_date,pg19_bytes,pg19_sha256\n"


def raw(text, title="A Tale", year="1900", language="English"):
    return (
        f"Title: {title}\r\n\r\nAuthor: Some One\r\n\r\nLanguage: {language}\r\n\r\n*** START OF X ***\r\n"
        f"{year}\r\n\r\n{text}\r\n*** END OF X ***\r\nlicence\r\n"
    ).encode()


def body(text, year="1900"):
    return f"{year}\r\n\r\n{text}\r\n*** ".encode()


def put(folder, books):
    for name, content in books.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def listed(path, *books):
    """Write a list from tuples (id, split) or (id, split, size)."""
    rows = [f"{split},{book_id},Book {book_id},1900,{(*size, 1)[0]},00\n" for book_id, split, *size in books]
    path.write_text(COLUMNS + "".join(rows), "utf-8")
    return str(path)


def tree(out):
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def log(out):
    return {entry.id: entry for entry in read_log(out / "build.jsonl")}


LONG = "word " * 3000


def test_a_list_says_what_is_kept_and_where(tmp_path):
    source = put(
        tmp_path / "raw", {"1.txt": raw("one"), "2-8.txt": raw("café").decode().encode("latin-1"), "9.txt": b"x"}
    )
    books = listed(tmp_path / "list.csv", (1, "train"), (2, "test"), (3, "validation"))
    summary = build([source], tmp_path / "out", books, workers=1)
    assert tree(tmp_path / "out").keys() == {"build.jsonl", "train/1.txt", "test/2.txt"}
    assert (tmp_path / "out/test/2.txt").read_bytes() == body("café")
    lines = [json.loads(line) for line in (tmp_path / "out/build.jsonl").read_text("utf-8").splitlines()]
    assert [line["id"] for line in lines] == [1, 2, 9]
    assert lines[0] | {"settings": ""} == {
        "id": 1, "split": "train", "title": "Book 1", "year": 1900, "status": "kept", "reason": "",
        "source": "raw/1.txt", "bytes": len(body("one")), "sha256": hashlib.sha256(body("one")).hexdigest(),
        "year_from": "list", "notes": [], "passed_over": [], "raw_bytes": len(raw("one")),
        "raw_sha256": hashlib.sha256(raw("one")).hexdigest(), "settings": "",
    }  # fmt: skip
    assert lines[1]["notes"] == ["not UTF-8, read as Latin-1"]
    assert (lines[2]["status"], lines[2]["reason"], lines[2]["split"]) == ("dropped", "not in the list", None)
    assert (summary.missing, summary.reused) == (1, 0)
    text = str(summary)
    assert "2 books" in text
    assert "1 train, 0 validation, 1 test" in text
    assert "dropped 1: 1 not in the list" in text
    assert "missing 1" in text


def test_without_a_list_year_and_language_come_from_the_text(tmp_path):
    source = put(
        tmp_path / "raw",
        {
            "1.txt": raw(LONG),
            "2.txt": raw(LONG, year="1919"),
            "3.txt": raw(LONG, year="no year"),
            "4.txt": raw(LONG, language="French"),
            "5.txt": raw("short"),
            "6.txt": raw(LONG, year="1918"),
        },
    )
    summary = build([source], tmp_path / "out", None, workers=1)
    entries = log(tmp_path / "out")
    assert {i: (entry.status, entry.reason) for i, entry in entries.items()} == {
        1: ("kept", ""),
        2: ("dropped", "published after 1918"),
        3: ("dropped", "year unknown"),
        4: ("dropped", "not in English"),
        5: ("dropped", "shorter than 10,000 bytes"),
        6: ("kept", ""),
    }
    assert (entries[1].title, entries[1].year, entries[1].year_from) == ("A Tale by Some One", 1900, "title page")
    assert (tmp_path / "out" / split_of(6) / "6.txt").read_bytes() == body(LONG, "1918")
    assert "dropped 4: 1 published after 1918; 1 year unknown; 1 not in English; 1 shorter" in str(summary)


def test_bad_raw_texts_are_reported_and_the_build_continues(tmp_path, capsys):
    source = put(
        tmp_path / "raw",
        {
            "1.txt": raw("one"),
            "2.txt": b"",
            "3.txt": b"no marker at all \x92",
            "4.zip": b"not an archive",
            "5.txt": b"replaced below",
            "6/6.txt": b"",
            "6.zip": b"not an archive",
            "90.txt": b"",
            "books.zip": b"nor this",
        },
    )
    with zipfile.ZipFile(source / "7.zip", "w") as archive:
        archive.writestr("7.txt", raw("seven" * 100))
    data = bytearray((source / "7.zip").read_bytes())
    data[60:70] = bytes(10)
    (source / "7.zip").write_bytes(data)
    (source / "5.txt").unlink()
    (source / "5.txt").symlink_to(source / "5.txt.gone")
    books = listed(tmp_path / "list.csv", *((i, "train") for i in range(1, 9)), (90, "train", 0))
    summary = build([source], tmp_path / "out", books, workers=1)
    found = {i: (entry.status, entry.reason.split(":")[0]) for i, entry in log(tmp_path / "out").items()}
    assert found == {
        1: ("kept", ""),
        2: ("failed", "the raw text is empty"),
        3: ("kept", ""),
        4: ("failed", "cannot be read"),
        5: ("failed", "cannot be read"),
        6: ("failed", "the raw text is empty"),
        7: ("failed", "cannot be read"),
        90: ("kept", ""),  # as in PG-19
    }
    entries = log(tmp_path / "out")
    assert entries[3].notes[:2] == ("no START line", "no END line")
    assert "0x80" in entries[3].notes[3]
    assert (tmp_path / "out/train/3.txt").read_bytes() == b"no marker at all \xc2\x92"
    assert (tmp_path / "out/train/90.txt").read_bytes() == b""
    assert entries[4].source == "raw/4.zip"
    assert entries[6].passed_over[0].startswith("raw/6.zip (")
    assert summary.missing == 1
    said = capsys.readouterr().err
    assert "warning: cannot read raw/books.zip" in said
    assert "failed 5" in str(summary)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_does_not_stop_the_build(tmp_path):
    source = put(tmp_path / "raw", {"1.txt": raw("one"), "2.txt": raw("two")})
    (source / "2.txt").chmod(0)
    build([source], tmp_path / "out", listed(tmp_path / "l.csv", (1, "train"), (2, "train")), workers=1)
    assert log(tmp_path / "out")[2].reason == "cannot be read: Permission denied"


def test_a_failed_read_does_not_stop_the_build(tmp_path, monkeypatch):
    """Fail as on a disk with a bad sector, or without permission."""
    source = put(tmp_path / "raw", {"1.txt": raw("one"), "2.txt": raw("two")})

    def fail(text):
        if text.id == 2:
            raise PermissionError(13, "Permission denied", str(text.path))
        return text.path.read_bytes()

    monkeypatch.setattr(pg19, "read", fail)
    build([source], tmp_path / "out", listed(tmp_path / "l.csv", (1, "train"), (2, "train")), workers=1)
    entries = log(tmp_path / "out")
    assert (entries[1].status, entries[2].reason) == ("kept", "cannot be read: Permission denied")


def test_raw_texts_that_were_not_chosen_are_in_the_log(tmp_path):
    put(tmp_path / "a", {"1-8.txt": raw("worse"), "1.txt": raw("best")})
    put(tmp_path / "b", {"1.txt": raw("later")})
    books = listed(tmp_path / "l.csv", (1, "train"))
    summary = build([tmp_path / "a", tmp_path / "b"], tmp_path / "out", books, workers=1)
    entry = log(tmp_path / "out")[1]
    assert (entry.source, entry.passed_over) == ("a/1.txt", ("a/1-8.txt", "b/1.txt"))
    assert (tmp_path / "out/train/1.txt").read_bytes() == body("best")
    assert "1 have several raw texts" in str(summary)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_best_text_in_a_tar_is_built_whichever_comes_first(tmp_path, workers):
    names = [f"{i}{kind}.txt" for kind in ("-0", "-8", "") for i in range(1, 8)]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names:
            content = raw(f"{name} " * (20_000 if "-" in name else 1))
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    books = listed(tmp_path / "l.csv", *((i, "train") for i in range(1, 8)))
    for _ in range(2):
        build([tmp_path / "a.tar"], tmp_path / "out", books, workers)
        for i in range(1, 8):
            assert (tmp_path / f"out/train/{i}.txt").read_bytes() == body(f"{i}.txt ")
            assert log(tmp_path / "out")[i].passed_over == (f"a.tar/{i}-8.txt", f"a.tar/{i}-0.txt")


def test_words_are_replaced(tmp_path, monkeypatch):
    table = {hashlib.sha256(b"zorp").hexdigest(): "<DW1>", hashlib.sha256(b"blim").hexdigest(): ""}
    monkeypatch.setattr(pg19, "_replacement", lambda: Replacement(table))
    source = put(tmp_path / "raw", {"1.txt": raw("Zorp and blim men"), "2.txt": raw("blim men")})
    build([source], tmp_path / "out", listed(tmp_path / "l.csv", (1, "train"), (2, "train")), workers=1)
    assert (tmp_path / "out/train/1.txt").read_bytes() == body("<DW1> and <DW52> men")
    assert (tmp_path / "out/train/2.txt").read_bytes() == body("blim men")


@pytest.fixture
def some(tmp_path):
    source = put(tmp_path / "raw", {f"{i}.txt": raw(f"book {i} " * 50) for i in range(1, 7)})
    books = listed(tmp_path / "l.csv", *((i, ("train", "test", "validation")[i % 3]) for i in range(1, 7)))
    return source, books, tmp_path / "out"


def test_built_books_are_not_rebuilt(some):
    source, books, out = some
    assert build([source], out, books, workers=1).reused == 0
    first = tree(out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.txt")}
    assert build([source], out, books, workers=2).reused == 6
    assert tree(out) == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.txt")} == times


def test_changed_books_are_built_again(some, tmp_path):
    source, books, out = some
    build([source], out, books, workers=1)
    first = tree(out)
    (source / "1.txt").write_bytes(raw("another text"))
    (out / "validation/2.txt").write_bytes(b"damaged")
    (out / "train/3.txt").unlink()
    (out / "test/4.txt").write_bytes(first["test/4.txt"][::-1])
    assert build([source], out, books, workers=1).reused == 2
    second = tree(out)
    assert second["test/1.txt"] == body("another text")
    assert {name for name in first if first[name] != second[name]} == {"build.jsonl", "test/1.txt"}
    moved = listed(tmp_path / "other.csv", *((i, "train") for i in (1, 2, 3, 4, 5)))
    summary = build([source], out, moved, workers=1)
    assert (summary.reused, summary.removed) == (1, 5)  # only book 3 was in train before
    assert "removed 5 that an earlier build had made" in str(summary)
    assert tree(out).keys() == {"build.jsonl", *(f"train/{i}.txt" for i in (1, 2, 3, 4, 5))}


def test_another_version_of_the_code_builds_again(some, monkeypatch):
    source, books, out = some
    build([source], out, books, workers=1)
    monkeypatch.setattr(pg19, "_code", lambda: "another")
    assert build([source], out, books, workers=1).reused == 0


def test_leftovers_of_a_killed_build_are_reused_or_removed(some):
    source, books, out = some
    build([source], out, books, workers=1)
    whole = tree(out)
    lines = whole["build.jsonl"].splitlines(keepends=True)
    (out / "build.jsonl").unlink()
    (out / "build.jsonl.part").write_bytes(b"".join(lines[:3]) + lines[3][:40])
    (out / "part").mkdir()
    (out / "part/5").write_bytes(b"half a bo")
    (out / "test/4.txt").write_bytes(b"")
    assert build([source], out, books, workers=1).reused == 3
    assert tree(out) == whole
    assert not (out / "part").exists()


def test_a_build_killed_twice_keeps_the_books_of_both_runs(some, monkeypatch):
    source, books, out = some
    one_by_one = pg19.build_book

    def killed_after(count):
        def build_book(job):
            if job.raw.id > count:
                raise KeyboardInterrupt
            return one_by_one(job)

        monkeypatch.setattr(pg19, "build_book", build_book)
        with pytest.raises(KeyboardInterrupt):
            build([source], out, books, workers=1)
        with (out / "build.jsonl.part").open("a") as part:
            part.write('{"id": 9, "spl')

    killed_after(2)
    killed_after(4)
    monkeypatch.setattr(pg19, "build_book", one_by_one)
    assert build([source], out, books, workers=1).reused == 4


KILLED = """
import os, signal, sys
from compressive.cli import main
from compressive.data.pg19.build import Entry

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
format, seen = Entry.format, []

def format_or_die(self):
    seen.append(self)
    if len(seen) == 12:  # its text is written, its line is not in the log yet
        os.kill(os.getpid(), int(sys.argv[1]))
    return format(self)

Entry.format = format_or_die
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_killed_build_resumes_without_loss(tmp_path, how, code):
    source = put(tmp_path / "raw", {f"{i}.txt": raw(f"{i} words of a book\r\n" * 500) for i in range(1, 41)})
    books = listed(tmp_path / "l.csv", *((i, ("train", "test")[i % 2]) for i in range(1, 41)))
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = ["data", "pg19", "build", "--source", source, "--metadata", books, "--out", killed, "--workers", "2"]
    # Its output ends only after its workers have exited.
    done = subprocess.run([sys.executable, "-c", KILLED, str(int(how)), *words], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert len(list(killed.glob("t*/*.txt"))) == 12
    assert not (killed / "build.jsonl").exists()
    assert build([source], killed, books, workers=2).reused == 11
    build([source], whole, books, workers=1)
    assert tree(killed) == tree(whole)


def test_a_folder_with_other_files_is_never_written_to(some, tmp_path):
    source, books, _ = some
    mine = put(tmp_path / "mine", {"train/1.txt": b"my own"})
    with pytest.raises(ValueError, match=r"holds files, but .* has no build\.jsonl"):
        build([source], mine, books, workers=1)
    for out in (source, source / "deeper", source.parent):
        if out == source.parent:
            source = put(out / "train", {"1.txt": b"raw"})
        with pytest.raises(ValueError, match="lie within each other"):
            build([source], out, books, workers=1)
    assert tree(mine) == {"train/1.txt": b"my own"}


def test_mistakes_are_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    out = str(tmp_path / "out")

    def said(*words):
        assert main(["data", "pg19", "build", "--out", out, *words]) == 2
        return capsys.readouterr().err

    assert "no raw text in" in said("--source", str(tmp_path / "empty"))
    assert not (tmp_path / "out").exists()
    assert "nowhere does not exist" in said("--source", str(tmp_path / "nowhere"))
    assert "no source" in said()
    source = put(tmp_path / "raw", {"1.txt": b"", "x.txt": b""})
    assert "workers=-1" in said("--source", str(source), "--workers", "-1")
    assert "nowhere.csv does not exist" in said("--source", str(source), "--metadata", "nowhere.csv")
    assert "failed 1: 1 the raw text is empty" in said("--source", str(source), "--workers", "1")
    with tarfile.open(tmp_path / "none.tar", "w"):
        pass
    assert "no file is named by a book's id" in said("--source", str(tmp_path / "none.tar"), "--workers", "1")


def test_help_needs_neither_torch_nor_numpy():
    script = """
import sys
from compressive.cli import main
for command in ("build", "verify"):
    try:
        main(["data", "pg19", command, "--help"])
    except SystemExit:
        pass
assert not {"torch", "numpy", "tokenizers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for word in ("--source", "--out", "--metadata", "--workers", "--json", "--official"):
        assert word in done.stdout


def years(archives):
    """Return the errors of inferred years of real books; None if no year was found."""
    found = find_books([SHARED / name for name in archives])
    for text, content in stream(found, lambda size: None):
        parts = Parts.of(decode(content)[0])
        year, expected = infer(parts.header, parts.body).year, official()[text.id].year
        assert expected is not None
        yield None if year is None else year - expected, year


@pytest.mark.skipif(not SHARED.exists(), reason="the raw books are not at hand")
def test_inferred_years_of_real_books_are_mostly_right():
    told = list(years(["books-test.tar.xz", "books-validation.tar.xz"]))
    off = [difference for difference, _ in told if difference is not None]
    assert len(told) == 57
    assert len(off) >= 36
    assert sum(abs(difference) <= 1 for difference in off) >= 0.9 * len(off)
    assert all(year is None or year < 1919 for _, year in told)


def test_the_code_that_is_hashed_into_builds_is_that_of_version_0_1():
    """Changed by a byte, `rule.py`, `infer.py` or `build.py` would make every existing build anew."""
    assert pg19._code() == "218c60f787108c75648fbcd28802f8ddf48410236e488c6e795b882009ae4097"
