"""`compressive export`, and what commands leave alone in a release."""

import dataclasses
import json
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speech_helpers import tiny_wavenet
from training_helpers import command, make_run, model_config, tiny_corpus, tiny_run_config

from compressive.cli import main
from compressive.data.corpus import Corpus, write_corpus
from compressive.data.tokenizer import ByteTokenizer
from compressive.model.language_model import CompressiveLM
from compressive.runs import checkpoint
from compressive.runs.run import Run
from compressive.runs.trained import Trained


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


@pytest.mark.slow
def test_the_documented_example_runs_the_onnx_file_of_a_release(folder, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    done = command("export", folder, "--out", "release", "--onnx", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("release: ")
    assert {"model.onnx", "model.safetensors", "release.json"} <= {
        path.name for path in (tmp_path / "release").iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["release"]
    assert command("generate", tmp_path / "release", "--length", "5").returncode == 0

    page = (Path(__file__).parents[2] / "docs" / "usage.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page.split("## ONNX\n")[1].split("\n## ")[0], re.DOTALL)
    text = b"the cat sat on a mat and then the dog ran to a red hat"
    (tmp_path / "book.txt").write_bytes(text)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)

    run = Run.open(folder)
    model = Trained.load(run).model(model_config(run.config))
    memory = model.initial_memory(1)
    for start in (0, 16, 32):
        with torch.no_grad():
            out = model(torch.tensor([list(text[start : start + 16])]), memory)
        memory = out.memory
    np.testing.assert_allclose(names["logits"], out.logits, atol=2e-5)
    for i, layer in enumerate(memory.layers):
        np.testing.assert_allclose(names["memory"][f"compressed.{i}"], layer.compressed, atol=2e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tiny_wavenet(), "architecture='wavenet' cannot be exported as ONNX: it has no recent and compressed memory"),
        ({"compression": "most_used", "compression_loss": "none"}, "compression='most_used' cannot be exported"),
        ({"head": "logistics"}, "head='logistics' cannot be exported as ONNX: ONNX has no expm1"),
    ],
)
def test_models_without_an_onnx_form_are_refused_in_one_line(model, message, tmp_path, capsys):
    config = tiny_run_config(tmp_path / "data", model if isinstance(model, dict) else None)
    if not isinstance(model, dict):
        config = dataclasses.replace(config, model=model)
    make_run(tmp_path / "run", config)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "release"), "--onnx"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"compressive export: {message}")
    assert error.endswith("; leave out --onnx\n")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_missing_packages_for_onnx_are_one_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", str(folder), "--out", str(tmp_path / "release"), "--onnx"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("compressive export: --onnx needs onnx and onnxscript: pip install 'compressive[onnx]' (")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_onnx_file_is_written_aside_like_the_rest(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxscript")
    words = ["export", str(folder), "--out", str(tmp_path / "release"), "--onnx"]

    def full(model: object, path: Path) -> None:
        assert path.parent.parent == tmp_path
        assert path.parent.name.startswith(".")
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compressive.runs.export.write_onnx", full)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"compressive export: out={tmp_path / 'release'} cannot be written (No space left on device)"
    )
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "release").mkdir()
    assert main(words) == 2
    assert "exists already: choose another folder" in capsys.readouterr().err
    assert list((tmp_path / "release").iterdir()) == []


def test_weights_that_cannot_be_written_beside_onnx_name_the_folder_that_was_asked_for(
    folder, tmp_path, capsys, small_files
):
    pytest.importorskip("onnxscript")
    assert main(["export", str(folder), "--out", str(tmp_path / "release"), "--onnx"]) == 2
    assert capsys.readouterr().err.startswith(f"compressive export: out={tmp_path / 'release'} cannot be written (")
    assert list(tmp_path.iterdir()) == []
