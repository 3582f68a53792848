"""Runtime: atomic file writes."""

from pathlib import Path

import pytest

from compressive.runtime import write_atomically


@pytest.mark.parametrize("content", ["größer\n", b"\x00\xff"])
def test_a_file_is_written_whole_with_its_folders(tmp_path, content):
    path = tmp_path / "new" / "a.json"
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(self, content):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
