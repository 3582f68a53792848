"""What commands print on stderr besides results: one line per read when piped, none if quiet."""

import re

import pytest

from compressive import console


@pytest.fixture(autouse=True)
def talkative():
    console.set_quiet(False)
    yield
    console.set_quiet(False)


def read(sizes, total=None, done=0):
    with console.bytes_read("reading a.txt", total, done) as advance:
        for size in sizes:
            advance(size)


def test_a_piped_read_is_one_line_at_its_end(capsys):
    read([400_000, 600_000], total=3_000_000, done=2_000_000)
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"reading a\.txt: 3\.0 MB in \d+\.\d s\n", said.err)


def test_a_long_piped_read_gives_a_sign_of_life(capsys, monkeypatch):
    monkeypatch.setattr(console, "SIGN_OF_LIFE", 0.0)
    read([400_000, 600_000], total=2_000_000)
    assert capsys.readouterr().err.splitlines()[:2] == [
        "reading a.txt: 0.4 of 2.0 MB",
        "reading a.txt: 1.0 of 2.0 MB",
    ]
    read([400_000])  # of a size that is not known in advance
    assert capsys.readouterr().err.splitlines()[0] == "reading a.txt: 0.4 MB"


def test_a_read_that_fails_prints_no_last_line(capsys):
    def sizes():
        yield 10
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        read(sizes())
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_unless_quiet(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
    read([10], total=10)
    assert "━" in capsys.readouterr().err
    assert not console.progress_bar().disable
    assert console.progress_bar(shown=False).disable
    console.set_quiet(True)
    read([10], total=10)
    assert capsys.readouterr().err == ""
    assert console.progress_bar().disable


def test_without_a_terminal_tasks_print_a_line_a_minute(capsys, monkeypatch):
    with console.progress_bar() as bar:
        task = bar.add_task("test", total=2000)
        bar.update(task, completed=500)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(console, "SIGN_OF_LIFE", 0.0)
        bar.update(task, completed=1000)
        bar.update(bar.add_task("runs"), completed=3)
    assert capsys.readouterr().err == "test: 1,000 of 2,000\nruns: 3 of 100\n"


def test_quiet_leaves_only_warnings(capsys, monkeypatch):
    console.note("the seed is 7")
    console.set_quiet(True)
    assert console.is_quiet()
    monkeypatch.setattr(console, "SIGN_OF_LIFE", 0.0)
    read([10, 20])
    console.note("the seed is 8")
    console.warn("the disk is full")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "the seed is 7\nwarning: the disk is full\n")
