"""Models that ship with the package: found by their names, and scored where their corpus is not prepared."""

import json

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import latest, make_run, model_config, text, tiny_corpus, tiny_run_config

import compressive
from compressive.cli import main
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import ByteTokenizer
from compressive.model.language_model import CompressiveLM
from compressive.runs import checkpoint, shipped
from compressive.runs.run import ORIGIN, Run


@pytest.fixture
def named(tmp_path, monkeypatch, capsys):
    """A release among the shipped models, as `small`; its corpus is not prepared, and the working folder is empty."""
    home, room = tmp_path / "home", tmp_path / "shipped"
    tiny_corpus(home / "data")
    run = make_run(home / "run", tiny_run_config(home / "data"))
    torch.manual_seed(0)
    checkpoint.save(run.checkpoints, 7, {"model": CompressiveLM(model_config(run.config)).state_dict()}, {})
    room.mkdir()
    assert main(["export", str(run.folder), "--out", str(room / "small"), "--precision", "bf16"]) == 0
    config = json.loads((room / "small" / "config.json").read_text())
    config["data"]["data_dir"] = "data"
    (room / "small" / "config.json").write_text(json.dumps(config))
    splits = {name: [text(400, seed)] for seed, name in enumerate(("train", "valid", "test"))}
    write_corpus(room / "small" / shipped.EXCERPT, "tiny", ByteTokenizer(), splits, {}, "an excerpt")
    monkeypatch.setattr(shipped, "SHIPPED", room)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    capsys.readouterr()
    return room / "small"


def test_a_name_is_found_and_a_folder_of_that_name_wins(named, tmp_path):
    assert shipped.shipped_names() == ["small"]
    assert shipped.shipped("small") == named
    assert shipped.shipped("./other/small").parts == ("other", "small")
    assert shipped.spelled(named) == "small"
    (tmp_path / "here" / "small").mkdir()
    assert str(shipped.shipped("small")) == "small"


def test_an_unknown_name_is_told_which_there_are(named, capsys):
    assert main(["generate", "smal"]) == 2
    assert "shipped models: small" in capsys.readouterr().err


def test_weights_in_bf16_are_half_as_large_and_loaded_as_fp32(named):
    assert {weight.dtype for weight in load_file(named / "model.safetensors").values()} == {torch.bfloat16}
    model = compressive.load("small", device="cpu")
    assert {weight.dtype for weight in model.model.parameters()} == {torch.float32}
    assert len(model.generate("the cat", length=5)) > 0


def test_without_its_corpus_the_excerpt_is_scored_and_said(named, capsys):
    assert main(["evaluate", "small", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["tokens"], found["corpus_note"]) == (len(text(400, 2)), "an excerpt")
    assert "data/tiny is not prepared: reading the excerpt that comes with small" in captured.err
    assert main(["analyze", "small", "memory", "--tokens", "400", "--streams", "2"]) == 0
    assert "compressed memory is worth" in capsys.readouterr().out
    assert sorted(path.name for path in named.iterdir() if path.is_dir()) == [shipped.EXCERPT]  # nothing was written


def test_with_its_corpus_the_whole_is_scored(named, tmp_path, capsys):
    assert main(["evaluate", "small", "--json", "--data-dir", str(tmp_path / "home" / "data")]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == len(text(300, 2))
    (tmp_path / "here" / "data").symlink_to(tmp_path / "home" / "data")
    assert main(["evaluate", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == len(text(300, 2))


def test_fine_tuning_starts_from_a_name(named, tmp_path, capsys):
    (tmp_path / "mine.txt").write_bytes(text(1000, 5))
    assert main(["data", "prepare", "text", str(tmp_path / "mine.txt"), "--name", "mine", "--vocabulary", "small"]) == 0
    model = Run.open(named).config.model
    config = tmp_path / "mine.toml"
    values = {name: getattr(model, name) for name in ("n_layers", "d_model", "n_heads", "d_ff", "window")}
    lines = [f"{name} = {value}" for name, value in values.items()]
    config.write_text(
        "\n".join(["[model]", *lines, "memory_size = 8", "compressed_size = 4", "[data]", 'corpus = "mine"'])
    )
    words = ["--train.steps", "1", "--train.batch", "2", "--train.eval-every", "0", "--train.device", "cpu"]
    assert main(["train", "--config", str(config), "--from", "small", "--out", "run", *words]) == 0
    assert json.loads((tmp_path / "here" / "run" / ORIGIN).read_text())["source"] == "small"
    before, after = (
        load_file(named / "model.safetensors"),
        latest(tmp_path / "here" / "run" / "checkpoints").tensors("model"),
    )
    name = "trunk.layers.0.mlp.0.weight"
    assert torch.allclose(before[name].float(), after[name], atol=1e-2)
