"""Runtime: atomic file writes, CUDA graphs."""

import contextlib
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compressive.runtime import cuda_graph, pick_device, write_atomically


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


@pytest.mark.parametrize(("name", "current"), [("cuda:1", torch.device("cuda:1")), ("cuda", None), ("cpu", None)])
def test_a_gpu_with_a_number_becomes_the_current_one(name, current, monkeypatch):
    """Captures take a stream of the current device: one of another GPU's work would be empty."""
    became: list[torch.device] = []
    on_cpu = torch.empty(1)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: on_cpu)
    monkeypatch.setattr(torch.cuda, "set_device", became.append)
    assert pick_device(name) == torch.device(name)
    assert became == [current] * (current is not None)


def test_a_graph_is_captured_beside_other_threads_and_without_collecting_garbage(monkeypatch):
    """The thread that writes a checkpoint synchronises a stream, which a capture of all threads would not survive."""
    seen: dict[str, object] = {}

    @contextlib.contextmanager
    def capturing(graph, **options):
        seen.update(options, collected=gc.isenabled())
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed"))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    assert cuda_graph(lambda: seen.update(called=True), pool="pool")() == "replayed"
    assert seen == {"pool": "pool", "capture_error_mode": "thread_local", "collected": False, "called": True}
    assert gc.isenabled()

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cuda_graph(fail)
    assert gc.isenabled()
