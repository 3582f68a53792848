"""`compressive export`, and what commands leave alone in a release."""

import json
import resource
import shutil

import pytest
import torch
from training_helpers import command, make_run, model_config, tiny_corpus, tiny_run_config

from compressive.cli import main
from compressive.data.corpus import Corpus, write_corpus
from compressive.data.tokenizer import ByteTokenizer
from compressive.model.language_model import CompressiveLM
from compressive.runs import checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create an untrained run: only the command is tested."""
    home = tmp_path_factory.mktemp("export")
    tiny_corpus(home / "data")
    run = make_run(home / "run", tiny_run_config(home / "data"))
    torch.manual_seed(0)
    checkpoint.save(run.checkpoints, 1, {"model": CompressiveLM(model_config(run.config)).state_dict()}, {})
    return run.folder


@pytest.fixture
def release(folder, tmp_path, capsys):
    assert main(["export", str(folder), "--out", str(tmp_path / "release")]) == 0
    assert "compressive generate" in capsys.readouterr().out
    return tmp_path / "release"


@pytest.fixture
def small_files():
    """Let no file grow above 4 KiB: a write beyond it fails as on a full disk, with another number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_that_cannot_be_written_are_one_line_and_leave_nothing(folder, tmp_path, capsys, small_files):
    assert main(["export", str(folder), "--out", str(tmp_path / "new" / "release")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"compressive export: out={tmp_path / 'new' / 'release'} cannot be written (")
    assert "File too large" in captured.err
    assert captured.err.count("\n") == 1
    assert list((tmp_path / "new").iterdir()) == []


def test_a_disk_that_fills_up_after_the_weights_is_one_line(folder, tmp_path, capsys, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ByteTokenizer, "save", full)
    assert main(["export", str(folder), "--out", str(tmp_path / "release")]) == 2
    assert "cannot be written (No space left on device): choose another folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(folder):
    done = command("export", folder, "--out", "/proc/nowhere/release")
    assert done.returncode == 2
    assert done.stderr.startswith("compressive export: out=/proc/nowhere/release cannot be written (No such file")
    assert done.stderr.count("\n") == 1


def test_a_release_is_made_without_the_corpus_and_refuses_another(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "run")
    config = tiny_run_config(tmp_path / "data")
    run = make_run(tmp_path / "run", config)
    run.keep_corpus(Corpus.open(tiny_corpus(tmp_path / "data")))
    shutil.rmtree(tmp_path / "data")
    release = str(tmp_path / "release")
    assert main(["export", str(run.folder), "--out", release]) == 0
    assert main(["generate", release, "--length", "5"]) == 0
    others = {split: [b"another text"] for split in ("train", "valid", "test")}
    write_corpus(tmp_path / "data" / "tiny", "tiny", ByteTokenizer(), others, {})
    capsys.readouterr()
    for words in (["evaluate", release], ["analyze", release, "memory"]):
        assert main(words) == 2
        assert "was prepared anew: it holds other text than" in capsys.readouterr().err


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_written_into_a_release(release, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    before = content(release)
    few = ["--tokens", "400", "--streams", "4"]
    for words in (
        ["evaluate", release, "--limit", "50", "--json"],
        ["evaluate", release, "--limit", "50", "--json", "--memory-size", "4,8"],
        ["analyze", release, "memory", "--json", *few],
        ["analyze", release, "report", "--json", *few],
    ):
        assert main(list(map(str, words))) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)
        assert "nothing is written into a release: keep the results with --out F" in captured.err
    assert content(release) == before

    for words in (
        ["evaluate", release, "--limit", "50", "--out", tmp_path / "kept" / "a.json"],
        ["analyze", release, "memory", *few, "--out", tmp_path / "kept"],
    ):
        assert main(list(map(str, words))) == 0
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"a.json", "memory.json", "memory.png"}
    assert content(release) == before
