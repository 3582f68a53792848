"""`compressive analyze` on a tiny run."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_helpers import make_run, model_config, text, tiny_corpus, tiny_run_config

from compressive.cli import main
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import WordTokenizer
from compressive.model.language_model import CompressiveLM
from compressive.runs import checkpoint

FEW = ["--tokens", "400", "--streams", "4"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Create a corpus and untrained runs: only the command is tested."""
    home = tmp_path_factory.mktemp("analyze")
    tiny_corpus(home / "data")
    models: dict[str, dict[str, Any]] = {
        "run": {},
        "txl": {"compressed_size": 0},
        "bptt": {"compression_loss": "none"},
    }
    for name, model in models.items():
        run = make_run(home / name, tiny_run_config(home / "data", model, unroll=2))
        torch.manual_seed(0)
        checkpoint.save(run.checkpoints, 7, {"model": CompressiveLM(model_config(run.config)).state_dict()}, {})
    folder = home / "run"
    lines = [
        {"kind": "train", "step": s, "loss": 5 / s, "bits": 8 / s, "compression_loss": 1 / s, "learning_rate": 1e-3,
         "gradient_norm": None if s == 3 else 1.0, "compressor_gradient_norm": 1.0, "tokens_per_second": 100.0}
        for s in range(1, 7)
    ]  # fmt: skip
    lines.append({"kind": "eval", "step": 6, "split": "valid", "loss": 1.0, "bits": 1.5})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "tra', "utf-8")
    (folder / "samples").mkdir()
    for step in range(1, 8):
        sampled = f"[prompt]\nthe <cat>\n[sample]\nsat on {step} & mats\n"
        (folder / "samples" / f"step-{step:08d}.txt").write_text(sampled, "utf-8")
    return home


def call(capsys, *words):
    code = main(["analyze", *map(str, words)])
    captured = capsys.readouterr()
    return SimpleNamespace(code=code, out=captured.out, err=captured.err)


@pytest.mark.parametrize("what", ["memory", "attention", "layers"])
def test_an_analysis_is_shown_and_kept(home, capsys, what):
    pytest.importorskip("matplotlib")
    done = call(capsys, home / "run", what, *FEW)
    assert done.code == 0
    words = {"memory": "compressed memory is worth", "attention": "compressed 6", "layers": "standard error"}
    assert words[what] in done.out
    folder = home / "run" / "analysis"
    assert (folder / f"{what}.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((folder / f"{what}.json").read_text("utf-8"))
    assert (kept["split"], kept["step"]) == ("valid", 7)
    assert "streams" not in kept
    assert ("lanes" in kept) == (what == "memory")  # the key of version 0.1 stays


def test_json_is_printed_alone_and_sizes_may_differ(home, capsys, tmp_path):
    done = call(
        capsys, home / "run", "attention", *FEW, "--json", "--out", tmp_path, "--split", "test", "--compressed-size", 12
    )
    found = json.loads(done.out)
    assert found["split"] == "test"
    assert found["buckets"][0] == ["compressed", 1, 2.0]
    assert json.loads((tmp_path / "attention.json").read_text("utf-8")) == found


def test_numbers_are_written_without_matplotlib(home, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = call(capsys, home / "run", "layers", *FEW, "--out", tmp_path)
    assert done.code == 0
    assert "pip install 'compressive[plots]'" in done.err
    assert (tmp_path / "layers.json").exists()
    done = call(capsys, home / "run", "report", *FEW)  # a report needs figures
    assert done.code == 2
    assert "pip install 'compressive[plots]'" in done.err


def test_runs_without_compressed_memory_or_without_its_loss(home, capsys, tmp_path):
    assert "compressed_size=0" in call(capsys, home / "txl", "layers", *FEW).err
    assert "compressed" not in call(capsys, home / "txl", "memory", *FEW, "--out", tmp_path).out
    assert call(capsys, home / "bptt", "layers", *FEW, "--out", tmp_path).code == 0


def test_mistakes_are_one_clear_line(home, capsys):
    mistakes = (
        (["--streams", "1"], "streams=1"),
        (["--lanes", "1"], "streams=1"),  # its name in version 0.1
        (["--memory-size", "5000"], "expected at least"),
    )
    for words, message in mistakes:
        done = call(capsys, home / "run", "memory", *FEW, *words)
        assert done.code == 2
        assert message in done.err
        assert len(done.err.splitlines()) == 1


def test_the_report_is_one_page_that_needs_nothing_else(home, capsys):
    pytest.importorskip("matplotlib")
    done = call(capsys, home / "run", "report", *FEW)
    assert done.code == 0
    path = home / "run" / "report.html"
    assert done.out.splitlines()[-1] == str(path)
    assert "xz(train + test) - xz(train)" in done.out
    assert json.loads(path.with_suffix(".json").read_text("utf-8"))["test"]["xz"] > 0
    page = path.read_text("utf-8")
    assert len(re.findall(r'src="data:image/png;base64,', page)) == 5
    assert not re.findall(r'(?:src|href)="(?!data:)|url\(|@import|https?://', page)
    for words in ("bits per character", "xz -9e", "xz(train + test) − xz(train)", "what compressed memory is worth"):
        assert words in page
    assert re.search(r"With compressed memory hidden the loss goes from \d\.\d+ to \d\.\d+ bits per token", page)
    assert "<i>the &lt;cat&gt;</i>sat on 7 &amp; mats" in page
    assert page.count("<details") == 6  # five of seven samples, and the configuration
    assert page.count("<details open>") == 1


def test_the_report_of_a_word_model_shows_perplexity(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    texts = {name: [text(600, seed)] for seed, name in enumerate(("train", "valid", "test"))}
    tokenizer = WordTokenizer.train(texts["train"])
    write_corpus(tmp_path / "data" / "tiny", "tiny", tokenizer, texts, {})
    run = make_run(tmp_path / "run", tiny_run_config(tmp_path / "data", {"vocab_size": tokenizer.vocab_size}))
    checkpoint.save(run.checkpoints, 1, {"model": CompressiveLM(model_config(run.config)).state_dict()}, {})
    assert call(capsys, run.folder, "report", *FEW).code == 0
    page = (run.folder / "report.html").read_text("utf-8")
    assert "perplexity" in page
    assert "xz" not in re.sub(r"base64,[^\"]*", "", page)


def test_the_report_of_a_transformer_xl_without_metrics(home, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    done = call(capsys, home / "txl", "report", *FEW, "--out", tmp_path, "--test-tokens", 500)
    assert done.code == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("data:image/png") == 2
    assert "no compressed memory" in page
    assert "the first 500 tokens of the test split" in page
    assert "No samples" in page
