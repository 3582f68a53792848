"""`compressive analyze` on a tiny run."""

import html
import json
import re
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_helpers import command, make_run, model_config, text, tiny_corpus, tiny_run_config

from compressive.analysis.report.run import Request
from compressive.analysis.report.text import _evaluated
from compressive.cli import main
from compressive.config import transformer
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import WordTokenizer
from compressive.model.language_model import CompressiveLM
from compressive.runs import checkpoint
from compressive.runs.run import Run

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
    assert ("streams" in kept) == (what == "memory")


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


@pytest.mark.parametrize(
    ("what", "words", "message"),
    [
        ("memory", ["--streams", "1"], "streams=1: expected at least 2"),
        ("attention", ["--streams", "-5"], "streams=-5: expected at least 2"),
        ("memory", ["--lanes", "1"], "streams=1: expected at least 2"),  # its name in version 0.1
        ("layers", ["--tokens", "0"], "tokens=0: expected at least 1"),
        ("report", ["--tokens", "-5"], "tokens=-5: expected at least 1"),
        ("memory", ["--memory-size", "5000"], "expected at least"),
        ("memory", ["--memory-size", str(10**30)], "expected at least"),
        ("report", ["--test-tokens", "-5"], "test_tokens=-5: expected at least 2, or 0"),
        ("report", ["--test-tokens", "1"], "test_tokens=1: expected at least 2, or 0"),
        ("report", ["--memory-size", "8"], "memory_size=8: the report is about the sizes in training"),
        ("report", ["--episodes", "1"], "episodes=1: expected at least 2"),
        ("memory", ["--live"], "live=True with memory: only the report"),
        ("layers", ["--device", "abacus"], "device='abacus': expected auto, cpu"),
        ("layers", ["--out", __file__], "test_analyze.py is a file: expected a folder"),
    ],
)
def test_mistakes_are_one_clear_line(home, capsys, what, words, message):
    done = call(capsys, home / "run", what, *FEW, *words)
    assert done.code == 2
    assert done.out == ""
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_more_streams_and_tokens_than_the_text_has_are_cut_to_what_it_has(home, capsys, tmp_path):
    words = ("--streams", 10**6, "--tokens", 10**12, "--json", "--out", tmp_path)
    found = json.loads(call(capsys, home / "run", "memory", *words).out)
    assert found["streams"] == 3
    assert found["tokens"] == 3 * (23 - 3) * 16  # 23 windows each, three of which fill the memories


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(home):
    done = command("analyze", home / "run", "memory", "--device", "cuda")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("compressive analyze: device='cuda': expected auto, cpu or a device that is there")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["memory", "attention", "layers", "report"])
def test_json_is_one_object_whose_keys_have_no_spaces(home, capsys, tmp_path, what):
    pytest.importorskip("matplotlib")
    done = call(capsys, home / "run", what, *FEW, "--json", "--out", tmp_path)
    found = json.loads(done.out)
    assert found == json.loads((tmp_path / f"{what}.json").read_text("utf-8"))
    assert [key for key in keys(found) if not re.fullmatch(r"[a-z0-9_]+", key)] == []
    suffix = "report.html and .json" if what == "report" else f"{what}.json and .png"
    assert done.err == f"written to {tmp_path / suffix}\n"


def keys(content: Any) -> list[str]:
    """Every key of a JSON document."""
    if not isinstance(content, dict):
        return [key for value in content for key in keys(value)] if isinstance(content, list) else []
    return [*content, *keys(list(content.values()))]


def test_a_file_in_place_of_the_results_folder_costs_a_warning_not_the_results(home, tmp_path):
    shutil.copytree(home / "txl", tmp_path / "run")
    folder = tmp_path / "run" / "analysis"
    folder.write_text("in the way", "utf-8")
    done = command("analyze", tmp_path / "run", "memory", *FEW, "--device", "cpu")
    assert done.returncode == 0
    assert "recent memory is worth" in done.stdout
    assert done.stderr.startswith(f"warning: {folder} cannot be written to (")
    assert done.stderr.endswith("keep the results elsewhere with --out FOLDER\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["memory", "report"])
def test_a_folder_that_cannot_be_made_fails_after_the_results_if_it_was_asked_for(home, capsys, what):
    pytest.importorskip("matplotlib")
    done = call(capsys, home / "txl", what, *FEW, "--json", "--out", "/proc/nowhere")
    assert done.code == 2
    assert json.loads(done.out)
    assert done.err.startswith("warning: /proc/nowhere cannot be written to (No such file or directory)")


def test_the_report_is_one_page_that_needs_nothing_else(home, capsys):
    pytest.importorskip("matplotlib")
    done = call(capsys, home / "run", "report", *FEW)
    assert done.code == 0
    path = home / "run" / "report.html"
    assert done.err == f"written to {path} and .json\n"
    assert "xz(train + test) - xz(train)" in done.out
    numbers = json.loads(path.with_suffix(".json").read_text("utf-8"))
    test = numbers["test"]
    verdict = f"{test['bits']:.2f} bits per character, {test['bits'] - test['xz']:.2f} above xz"
    assert numbers["verdict"].startswith(verdict)
    page = path.read_text("utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:|#)|url\((?!#)|@import|https?://', page)
    assert f"<h1>{numbers['verdict']}</h1>" in page
    assert page.index("<h1>") < page.index("<nav") < page.index("<h2>")
    anchors = re.findall(r'<a href="#([^"]+)">', page)
    assert re.findall(r'<section id="([^"]+)">', page) == anchors
    assert len(anchors) == len(set(anchors)) == 10
    for words in ("bits per character", "xz -9e", "xz(train + test) − xz(train)", "what compressed memory is worth"):
        assert words in page
    for words in ("8 slots = 32 tokens", "4 become 1", "standard error over streams", "prefers-color-scheme: dark"):
        assert words in page
    assert re.search(r"Compressed memory (saves|costs|makes no clear difference)", page)
    assert page.count("<figure>") == 11
    assert re.search(r'<b class="s\d g\d" title="\d+\.\d\d bits; compressed memory (saved|cost) \d', page)
    assert "<title>training, step 6: 1.333 bits per token</title>" in page
    assert "The point at step 3 is not finite, and not drawn." in page  # its gradient norm
    assert "<i>the &lt;cat&gt;</i>sat on 7 &amp; mats" in page
    assert page.count("<details") == 6  # five of seven samples, and the configuration
    assert page.count("<details open>") == 1


@pytest.mark.slow
def test_xz_is_computed_once_for_a_corpus_or_left_out(home, capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copytree(home / "data", tmp_path / "data")
    (tmp_path / "data" / "tiny" / "xz.json").unlink(missing_ok=True)
    words = (home / "run", "report", *FEW, "--json", "--out", tmp_path, "--data-dir", tmp_path / "data")
    without = json.loads(call(capsys, *words, "--no-xz").out)
    assert without["test"]["xz"] is None
    assert without["verdict"].endswith("bits per character")
    first = json.loads(call(capsys, *words).out)
    assert first["test"]["xz_after_training"] < first["test"]["xz"]
    monkeypatch.setattr("lzma.compress", None)  # it is not asked again
    assert json.loads(call(capsys, *words).out)["test"] == first["test"]


@pytest.mark.slow
def test_a_score_of_the_whole_test_split_is_used_again(home, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copytree(home / "run", tmp_path / "my run")
    assert main(["evaluate", str(tmp_path / "my run"), "--streams", "2"]) == 0
    capsys.readouterr()
    path = tmp_path / "my run" / "evaluation" / "test-streams2.json"
    kept = json.loads(path.read_text("utf-8"))
    words = (tmp_path / "my run", "report", *FEW, "--json", "--test-tokens", 500)
    found = json.loads(call(capsys, *words).out)["test"]
    assert found["bits"] == pytest.approx(kept["bits_per_character"])
    assert (found["whole"], found["streams"], found["scored_by"]) == (True, 2, "evaluation/test-streams2.json")
    path.write_text(json.dumps(kept | {"step": 6}), "utf-8")  # of another checkpoint
    found = json.loads(call(capsys, *words).out)["test"]
    assert (found["tokens"], found["scored_by"]) == (500, "this report")
    page = html.unescape((tmp_path / "my run" / "report.html").read_text("utf-8"))
    assert f"compressive evaluate '{tmp_path / 'my run'}' --split test" in page


def test_a_score_with_other_empty_memory_is_not_used(home, tmp_path):
    shutil.copytree(home / "run", tmp_path / "run")
    run = Run.open(tmp_path / "run")
    config = transformer(run.config.model)
    kept = {
        "split": "test", "checkpoint": "best", "step": 7, "whole_split": True, "precision": "fp32",
        "dynamic_learning_rate": None, "memory_size": config.memory_size, "compressed_size": config.compressed_size,
    }  # fmt: skip
    other = "zeros" if config.empty_memory == "masked" else "masked"

    def used(**files):
        shutil.rmtree(run.folder / "evaluation", ignore_errors=True)
        (run.folder / "evaluation").mkdir()
        for name, more in files.items():
            path = run.folder / "evaluation" / f"{name.replace('_', '-')}.json"
            path.write_text(json.dumps(kept | more), "utf-8")
        found = _evaluated(run, 7, config, Request())
        return None if found is None else found["path"]

    same = {"empty_memory": config.empty_memory}
    assert used(test_masked={"empty_memory": other}) is None
    assert used(test_masked={"empty_memory": other}, test=same) == "evaluation/test.json"
    assert used(test_a=same, test=same) == "evaluation/test.json"
    assert used(test_a=same) == "evaluation/test-a.json"
    assert used(test={}) == "evaluation/test.json"  # an old file, which does not say it
    assert used(test_a={}) is None


@pytest.mark.slow
def test_a_live_report_follows_a_run_until_it_stops(home, capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    shutil.copytree(home / "run", folder)
    checkpoints = (folder / "checkpoints").rename(tmp_path / "later")
    pages = []

    def sleep(_: float) -> None:
        """What happens to a run meanwhile: its first checkpoint, more metrics, its end."""
        pages.append((folder / "report.html").read_text("utf-8"))
        if len(pages) == 1:
            checkpoints.rename(folder / "checkpoints")
        if len(pages) == 2:
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write('\n{"kind": "train", "step": 15, "bits": 0.123}\n')
        if len(pages) == 3:
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write('{"kind": "train", "step": 20, "bits": 0.1}\n')

    monkeypatch.setattr("time.sleep", sleep)
    done = call(capsys, folder, "report", *FEW, "--live")
    assert done.code == 0
    assert "report.html is written every 20 s" in done.err
    last = (folder / "report.html").read_text("utf-8")
    assert len(pages) == 3
    assert all('<meta http-equiv="refresh" content="20">' in page for page in pages)
    assert 'http-equiv="refresh"' not in last
    assert "There is no checkpoint yet" in pages[0]
    assert "This run is training: step 7 of 20" in pages[1]
    assert "xz was left out" in pages[1]
    assert "step 15: 0.123" in pages[2]
    assert "step 15: 0.123" not in pages[1]
    assert "xz -9e" in last


def test_the_report_of_a_word_model_shows_perplexity(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    texts = {name: [text(600, seed)] for seed, name in enumerate(("train", "valid", "test"))}
    tokenizer = WordTokenizer.train(texts["train"])
    write_corpus(tmp_path / "data" / "tiny", "tiny", tokenizer, texts, {})
    run = make_run(tmp_path / "run", tiny_run_config(tmp_path / "data", {"vocab_size": tokenizer.vocab_size}))
    checkpoint.save(run.checkpoints, 1, {"model": CompressiveLM(model_config(run.config)).state_dict()}, {})
    done = call(capsys, run.folder, "report", *FEW, "--json")
    assert done.code == 0
    assert json.loads(done.out)["test"]["bits"] is None
    page = (run.folder / "report.html").read_text("utf-8")
    assert "perplexity" in page
    assert "there is no score per byte" in page
    assert "xz" not in re.sub(r"base64,[^\"]*", "", page)


def test_the_report_of_a_transformer_xl_without_metrics(home, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    done = call(capsys, home / "txl", "report", *FEW, "--out", tmp_path, "--test-tokens", 500)
    assert done.code == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("<figure>") == 5
    assert "no compressed memory" in page
    assert "What this model remembers" in page
    assert 'id="by-gain"' not in page
    assert "the first 500 tokens of the test split" in page
    assert "No samples" in page
