"""`compressive evaluate`: options, output and result files."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import build
from training_helpers import command, text, tiny_corpus, tiny_run_config

import compressive
from compressive import cli
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import WordTokenizer
from compressive.evaluation.score import score
from compressive.runs import checkpoint
from compressive.runs.run import Run
from compressive.runs.trained import Trained


def model_of(run):
    trained = Trained.load(run)
    return trained.model(trained.config)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture
def run(tmp_path):
    tiny_corpus(tmp_path / "data")
    return a_run(tmp_path / "run", tiny_run_config(tmp_path / "data"))


def a_run(folder, config):
    run = Run.create(folder, config)
    weights = build(config.model, dtype=torch.float32).state_dict()
    checkpoint.save(run.checkpoints, 7, {"model": weights}, {})
    return run


def evaluate(run, *words):
    return cli.main(["evaluate", str(run.folder), "--device", "cpu", *words])


def hashes(folder):
    """Return the content of every file except results."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "evaluation" not in path.parts)
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_one_evaluation_as_json(run, capsys):
    assert evaluate(run, "--split", "valid", "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == f"written to {run.folder / 'evaluation' / 'valid.json'}\n"
    corpus = run.corpus()
    nll = score(model_of(run), corpus.split("valid"))
    expected = {
        "run": "run", "corpus": "tiny", "split": "valid", "checkpoint": "best", "step": 7, "streams": 1,
        "memory_size": 16, "compressed_size": 8, "empty_memory": "zeros", "empty_memory_reason": "as in training",
        "tokens": len(nll), "whole_split": True, "counted_words": corpus.words("valid"),
        "precision": "fp32", "device": "cpu",
        "bits_per_character": pytest.approx(nll.mean() / math.log(2)), "dynamic_learning_rate": None,
        "word_perplexity": pytest.approx(math.exp(nll.sum() / corpus.words("valid"))), "buckets": [],
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["tokens_per_second"] > 0
    assert json.loads((run.folder / "evaluation" / "valid.json").read_text()) == found


def test_one_evaluation_as_a_table(run, capsys):
    assert evaluate(run, "--limit", "300", "--memory-size", "32") == 0
    shown = capsys.readouterr().out
    assert "bits per character" in shown.splitlines()[1]
    assert "tiny test, the first 300 tokens" in shown
    assert "32 recent, 8 compressed" in shown
    assert "masked (memory is larger than in training)" in shown
    assert "best, step 7" in shown
    assert "word perplexity" not in shown
    assert (run.folder / "evaluation" / "test-m32-first300.json").exists()


def test_bf16_is_compared_with_fp32(run, capsys):
    assert evaluate(run, "--precision", "bf16", "--limit", "300", "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    bits = {}
    for precision in ("bf16", "fp32"):
        nats = score(model_of(run), run.corpus().split("test"), limit=300, precision=precision)
        bits[precision] = nats.mean() / math.log(2)
    assert found["precision"] == "bf16"
    assert found["bf16_less_fp32_bits_per_token"] == pytest.approx(bits["bf16"] - bits["fp32"], abs=1e-9)
    assert found["bf16_less_fp32_bits_per_token"] != 0
    assert f"bf16 {found['bf16_less_fp32_bits_per_token']:+.5f} bits per token against fp32" in captured.err
    assert (run.folder / "evaluation" / "test-first300-bf16.json").exists()
    assert evaluate(run, "--precision", "fp32", "--limit", "300") == 0  # what a CPU takes unless asked
    assert (run.folder / "evaluation" / "test-first300.json").exists()


def test_a_sweep(run, capsys):
    pytest.importorskip("matplotlib")
    words = ("--memory-size", "4,32", "--compressed-size", "0,8", "--limit", "200")
    assert evaluate(run, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    sizes = [(r["memory_size"], r["compressed_size"], r["empty_memory"]) for r in found["results"]]
    assert sizes == [(4, 0, "zeros"), (4, 8, "zeros"), (32, 0, "masked"), (32, 8, "masked")]
    figures = [r["bits_per_character"] for r in found["results"]]
    assert found["metric"] == "bits_per_character"
    assert figures[found["best"]] == min(figures)
    saved = run.folder / "evaluation" / "test-m4_32-c0_8-first200"
    assert json.loads(saved.with_suffix(".json").read_text()) == found
    assert saved.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    elsewhere = run.folder.parent / "figures" / "sizes.png"
    assert evaluate(run, *words, "--plot", str(elsewhere)) == 0
    captured = capsys.readouterr()
    assert elsewhere.exists()
    assert f"{min(figures):.4f}" in captured.out
    assert "choose them with --split valid" in captured.err


def test_a_sweep_without_matplotlib_finishes_and_names_the_extra(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert evaluate(run, "--memory-size", "4,8", "--limit", "50", "--json") == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["results"]) == 2
    assert "warning: no plot: a plot needs matplotlib: pip install 'compressive[plots]'" in captured.err
    assert evaluate(run, "--memory-size", "4,8", "--limit", "50", "--plot", "x.png") == 2  # refused at once


def test_a_failed_sweep_keeps_its_finished_results(run, monkeypatch):
    from compressive.evaluation import sweep

    calls = []

    def fails_the_second_time(*words, **options):
        calls.append(words)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return score(*words, **options)

    monkeypatch.setattr(sweep, "score", fails_the_second_time)
    assert evaluate(run, "--memory-size", "4,8", "--limit", "50") == 2
    assert len(json.loads((run.folder / "evaluation" / "test-m4_8-first50.json").read_text())["results"]) == 1


def test_dynamic_evaluation_leaves_the_run_untouched(run, capsys):
    before = hashes(run.folder)
    assert evaluate(run, "--limit", "300", "--json") == 0
    static = json.loads(capsys.readouterr().out)
    assert evaluate(run, "--limit", "300", "--json", "--dynamic", "--dynamic-learning-rate", "0.003") == 0
    dynamic = json.loads(capsys.readouterr().out)
    assert hashes(run.folder) == before
    assert dynamic["dynamic_learning_rate"] == 0.003
    assert dynamic["bits_per_character"] < 0.95 * static["bits_per_character"]
    assert sorted(path.name for path in (run.folder / "evaluation").iterdir()) == [
        "test-dynamic-first300.json",
        "test-first300.json",
    ]


def test_words_have_frequency_buckets(tmp_path, capsys):
    train = text(2000, 0)
    tokenizer = WordTokenizer.train([train])
    splits = {"train": [train], "valid": [text(90, 1)], "test": [text(180, 2)]}
    write_corpus(tmp_path / "data" / "tiny", "tiny", tokenizer, splits, {}, note="half of it")
    run = a_run(tmp_path / "run", tiny_run_config(tmp_path / "data", {"vocab_size": tokenizer.vocab_size}))
    assert evaluate(run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [bucket["name"] for bucket in found["buckets"]] == [">10K", "1K-10K", "100-1K", "<100"]
    assert sum(bucket["tokens"] for bucket in found["buckets"]) == found["tokens"]
    assert found["bits_per_character"] is None
    assert found["corpus_note"] == "half of it"
    assert evaluate(run) == 0
    shown = capsys.readouterr().out
    assert "perplexity" in shown.splitlines()[1]
    assert "in training <100 times" in shown
    assert "half of it" in shown


def test_unknown_words_are_counted_in_place_of_bits_per_byte(tmp_path, capsys):
    tokenizer = WordTokenizer.train([text(2000, 0)], least=150)
    splits = {"train": [text(2000, 0)], "valid": [text(90, 1)], "test": [text(180, 2)]}
    corpus = write_corpus(tmp_path / "data" / "tiny", "tiny", tokenizer, splits, {})
    unknown = tokenizer.decode(corpus.split("test")).count(b"<unk>")
    assert unknown > 0
    run = a_run(tmp_path / "run", tiny_run_config(tmp_path / "data", {"vocab_size": tokenizer.vocab_size}))
    assert evaluate(run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unknown_tokens"] == unknown
    assert found["bits_per_byte"] is found["word_perplexity"] is None
    assert evaluate(run) == 0
    shown = capsys.readouterr().out
    assert f"{unknown} tokens, {100 * unknown / found['tokens']:.1f} %; they hide text: no bits per byte" in shown
    score = compressive.load(run.folder, device="cpu").score(text(180, 2))
    assert (score.unknown, score.bits_per_byte) == (unknown, None)
    assert score.perplexity == pytest.approx(found["perplexity"], rel=1e-6)


def test_a_model_against_another(run, tmp_path, capsys):
    """Both read the same split, the other with the memory sizes of its training."""
    other = a_run(tmp_path / "other", tiny_run_config(tmp_path / "data", {"compressed_size": 0, "n_layers": 1}))
    words = ("--against", str(other.folder), "--split", "valid", "--compressed-size", "4")
    assert evaluate(run, *words, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    written = run.folder / "evaluation" / "valid-c4-against-other.json"
    assert captured.err == f"written to {written}\n"
    assert json.loads(written.read_text()) == found
    theirs = found["against"]
    assert (found["compressed_size"], theirs["run"], theirs["step"], theirs["compressed_size"]) == (4, "other", 7, 0)
    trained, tokens = Trained.load(run), run.corpus().split("valid")
    nats = [score(trained.model(trained.eval_config(None, 4).model), tokens), score(model_of(other), tokens)]
    bits = [each / math.log(2) for each in nats]
    assert theirs["bits_per_character"] == pytest.approx(bits[1].mean())
    (gain,) = found["gains"]
    assert gain["name"] == "all"
    assert gain["tokens"] == found["tokens"] == len(tokens)
    assert gain["bits"] == pytest.approx(found["bits_per_character"])
    assert gain["difference"] == pytest.approx((bits[0] - bits[1]).mean())
    assert gain["relative_gain"] == pytest.approx(math.exp((nats[1] - nats[0]).mean()) - 1)
    means = [part.mean() for part in np.array_split(bits[0] - bits[1], len(tokens) // 32)]
    assert gain["standard_error"] == pytest.approx(np.std(means, ddof=1) / math.sqrt(len(means)))
    assert evaluate(run, *words) == 0
    shown = capsys.readouterr().out
    assert f"{gain['difference']:+.4f} ± {gain['standard_error']:.4f}" in shown
    assert "16 recent, 0 compressed" in shown


def test_words_against_a_model_gain_by_frequency(tmp_path, capsys):
    train = text(2000, 0)
    tokenizer = WordTokenizer.train([train])
    splits = {"train": [train], "valid": [text(90, 1)], "test": [text(180, 2)]}
    write_corpus(tmp_path / "data" / "tiny", "tiny", tokenizer, splits, {})
    models = ({"vocab_size": tokenizer.vocab_size, "compressed_size": size} for size in (8, 0))
    ours, other = (
        a_run(tmp_path / name, tiny_run_config(tmp_path / "data", model))
        for name, model in zip(("ours", "other"), models, strict=True)
    )
    assert evaluate(ours, "--against", str(other.folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [gain["name"] for gain in found["gains"]] == ["100-1K", "<100", "all"]  # the others have no words
    for gain in found["gains"][:-1]:
        perplexities = [
            next(bucket["perplexity"] for bucket in of["buckets"] if bucket["name"] == gain["name"])
            for of in (found, found["against"])
        ]
        assert [gain["perplexity"], gain["other_perplexity"]] == pytest.approx(perplexities)
        assert gain["relative_gain"] == pytest.approx(perplexities[1] / perplexities[0] - 1)
    assert sum(gain["tokens"] for gain in found["gains"][:-1]) == found["gains"][-1]["tokens"] == found["tokens"]
    assert evaluate(ours, "--against", str(other.folder), "--limit", "60") == 0
    shown = capsys.readouterr().out
    assert "perplexity by frequency in training" in shown
    assert "100-1K times" in shown


def test_models_of_other_tokens_are_not_compared(run, tmp_path, capsys):
    tokenizer = WordTokenizer.train([text(2000, 0)])
    splits = {split: [text(180, 2)] for split in ("train", "valid", "test")}
    write_corpus(tmp_path / "words" / "tiny", "tiny", tokenizer, splits, {})
    other = a_run(tmp_path / "other", tiny_run_config(tmp_path / "words", {"vocab_size": tokenizer.vocab_size}))
    assert evaluate(run, "--against", str(other.folder)) == 2
    said = capsys.readouterr().err
    assert f"other: it has other tokens (words, {tokenizer.vocab_size}) than {run.folder} (bytes, 256)" in said
    assert said.count("\n") == 1
    assert evaluate(run, "--against", str(run.folder), "--memory-size", "4,8") == 2
    assert f"against={run.folder}: expected one memory size, not 2" in capsys.readouterr().err
    assert evaluate(run, "--against", "nowhere") == 2
    assert "nowhere is not a run" in capsys.readouterr().err
    assert not (run.folder / "evaluation").exists()


def test_nan_is_null_in_json(run, capsys):
    weights = {name: w * math.nan for name, w in model_of(run).state_dict().items()}
    checkpoint.save(run.checkpoints, 8, {"model": weights}, {})
    assert evaluate(run, "--json", "--limit", "40") == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] is None
    assert evaluate(run, "--limit", "40") == 0
    assert "nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-size", "abc"], "memory_size='abc': expected whole numbers of at least 0, such as 512"),
        (["--compressed-size=-4"], "compressed_size='-4': expected whole numbers"),
        (["--memory-size", "0"], "memory_size=0: expected at least 1 in layer 0"),
        (["--limit", "0"], "limit=0: expected at least 2"),
        (["--limit", "1"], "limit=1: expected at least 2"),
        (["--limit=-5"], "limit=-5: expected at least 2"),
        (["--streams", "-2"], "streams=-2: expected at least 1"),
        (["--lanes=-2"], "streams=-2: expected at least 1"),  # its name in version 0.1
        (["--streams", "1000000"], "streams=1000000: expected at most 69, as 1,104 tokens have no more windows of 16"),
        (["--streams", "4", "--limit", "50"], "streams=4: expected at most 3, as 50 tokens"),
        (
            ["--memory-size", str(10**12)],
            "memory_size=1000000000000, compressed_size=8, streams=1: memories of 476,838 GiB or more, and this",
        ),
        (["--compressed-size", f"8,{10**30}"], f"compressed_size={10**30}, streams=1: memories of"),
        (["--device", "abacus"], "device='abacus': expected auto, cpu"),
        (["--data-dir", "nowhere"], "nowhere"),
        (["--dynamic", "--dynamic-learning-rate", "0"], "learning_rate=0.0: expected a number above 0"),
        (["--dynamic", "--dynamic-learning-rate", "nan"], "learning_rate=nan: expected a number above 0"),
        (["--out", "."], "out=.: expected a JSON file, such as results.json"),
        (["--out", "a.png"], "out=a.png: expected a JSON file, such as results.json"),
    ],
)
def test_mistakes_are_one_line(words, message, run, capsys):
    assert evaluate(run, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("compressive evaluate: ")
    assert captured.err.count("\n") == 1
    assert not (run.folder / "evaluation").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(run):
    done = command("evaluate", run.folder, "--device", "cuda")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("compressive evaluate: device='cuda': expected auto, cpu or a device that is there")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--split", "dev"], ["--streams", "two"], []])
def test_invalid_arguments_are_refused(words, capsys):
    assert cli.main(["evaluate", *(["run", *words] if words else [])]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("compressive evaluate: ")
    assert captured.err.count("\n") == 1


def test_out_names_the_file_and_creates_its_folder(run, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "results.json"
    assert evaluate(run, "--limit", "50", "--memory-size", "4,8", "--json", "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert json.loads(out.read_text("utf-8")) == json.loads(captured.out)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert f"written to {out}\nwritten to {out.with_suffix('.png')}\n" in captured.err
    assert not (run.folder / "evaluation").exists()


def test_a_file_in_place_of_the_results_folder_costs_a_warning_not_the_score(run):
    (run.folder / "evaluation").write_text("in the way", "utf-8")
    done = command("evaluate", run.folder, "--limit", "50", "--device", "cpu")
    assert done.returncode == 0
    assert "bits per character" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"warning: {run.folder / 'evaluation' / 'test-first50.json'} cannot be written (")
    assert line.endswith("keep the results elsewhere with --out FILE")


def test_a_folder_that_cannot_be_made_fails_after_the_score_if_it_was_asked_for(run):
    words = ("--limit", "50", "--memory-size", "4,8", "--device", "cpu", "--json", "--out", "/proc/nowhere/a.json")
    done = command("evaluate", run.folder, *words)
    assert done.returncode == 2
    assert len(json.loads(done.stdout)["results"]) == 2
    assert "warning: /proc/nowhere/a.json cannot be written (No such file or directory)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plot_that_cannot_be_written_fails_after_the_score_if_it_was_asked_for(run, capsys):
    pytest.importorskip("matplotlib")
    assert evaluate(run, "--limit", "50", "--plot", "/proc/nowhere/a.png") == 2
    captured = capsys.readouterr()
    assert "bits per character" in captured.out
    assert "warning: no plot: [Errno 2] No such file or directory" in captured.err
    assert (run.folder / "evaluation" / "test-first50.json").is_file()


def test_quiet_leaves_the_results(run, capsys):
    assert evaluate(run, "--limit", "50", "--quiet") == 0
    captured = capsys.readouterr()
    assert "bits per character" in captured.out
    assert captured.err == ""


def test_keys_have_no_spaces(run, capsys):
    assert evaluate(run, "--limit", "50", "--memory-size", "4,8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [key for key in (*found, *found["results"][0]) if not re.fullmatch(r"[a-z0-9_]+", key)] == []


def test_a_folder_without_run_or_checkpoint_is_refused(run, capsys):
    assert cli.main(["evaluate", str(run.folder.parent)]) == 2
    assert "is not a run: it holds no config.json" in capsys.readouterr().err
    empty = Run.create(run.folder.parent / "empty", run.config)
    assert evaluate(empty) == 2
    assert "holds no checkpoint yet: compressive train --resume" in capsys.readouterr().err


def test_a_changed_corpus(run, capsys, tmp_path):
    smaller = tiny_run_config(tmp_path / "data", {"vocab_size": 100})
    assert evaluate(a_run(tmp_path / "small", smaller)) == 2
    assert "vocab_size=256 of tiny: expected at most the model's, 100" in capsys.readouterr().err


def test_defaults_in_the_help_are_the_real_ones():
    from compressive.cli.evaluate import Evaluate
    from compressive.evaluation import dynamic
    from compressive.evaluation.score import LONG, STREAMS

    assert Evaluate.dynamic_learning_rate == dynamic.LEARNING_RATE
    assert (STREAMS, LONG) == (16, 2_000_000)


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom compressive.cli import main\n"
        "try:\n    main(['evaluate', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert "--compressed-size" in done.stdout


def test_a_file_is_scored_as_one_text(run, tmp_path, capsys):
    content = text(300, 9)
    (tmp_path / "notes.txt").write_bytes(content)
    assert evaluate(run, "--text", str(tmp_path / "notes.txt"), "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    expected = score(model_of(run), np.frombuffer(content, np.uint8))
    assert found["tokens"] == len(content)
    assert math.isclose(found["nats"], float(expected.sum()), rel_tol=1e-6)
    assert (found["corpus"], found["split"]) == ("notes.txt", None)
    assert not (run.folder / "evaluation").exists()
    assert "nothing is written: keep the results with --out FILE" in captured.err
    assert evaluate(run, "--text", str(tmp_path / "notes.txt")) == 0
    assert f"notes.txt, {len(content):,} tokens" in capsys.readouterr().out


def test_a_file_of_nothing_is_refused(run, tmp_path, capsys):
    (tmp_path / "empty.txt").write_bytes(b"")
    assert evaluate(run, "--text", str(tmp_path / "empty.txt")) == 2
    assert "empty.txt is empty, expected a text to score" in capsys.readouterr().err
