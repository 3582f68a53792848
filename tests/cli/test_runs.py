"""`compressive runs` and `compressive compare` on folders as training leaves them."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import make_run, model_config, tiny_corpus, tiny_run_config

from compressive.analysis.overview import UNKNOWN, Overview
from compressive.cli import main
from compressive.config.agent import AgentConfig, AgentRun, LearnConfig, TaskConfig
from compressive.data.speech.codes import MuLawTokenizer
from compressive.data.tokenizer import ByteTokenizer
from compressive.model.language_model import CompressiveLM
from compressive.rl.run import AgentFolder
from compressive.runs import checkpoint
from compressive.runs.export import export
from compressive.runs.run import Run
from compressive.training import loop

LONG_AGO = 1_700_000_000


def write_metrics(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def text_run(folder: Path, seed: int = 0, bits: float = 2.0, model: dict[str, Any] | None = None, **train: Any) -> Run:
    """A run of 20 steps whose score and speed are made up; its files are old."""
    run = make_run(folder, tiny_run_config(folder.parent / "data", model, seed=seed, **train))
    ByteTokenizer().save(folder)
    lines: list[dict[str, Any]] = []
    for step in (5, 10, 15, 20):
        value = bits + 1 / step
        lines.append({"kind": "train", "step": step, "seconds": step, "bits": value, "tokens_per_second": 100.0 + step})
        lines.append({"kind": "eval", "step": step, "seconds": step, "split": "valid", "bits": value})
    write_metrics(folder, lines)
    age(folder)
    return run


def age(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO))


def cut(folder: Path, lines: int) -> None:
    """Keep the first lines of the metrics, as if the run had stopped there."""
    kept = (folder / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)[:lines]
    (folder / "metrics.jsonl").write_text("".join(kept), "utf-8")
    age(folder)


def agent_run(folder: Path) -> AgentFolder:
    config = AgentRun(
        model_config(tiny_run_config(folder)), TaskConfig(envs=4), AgentConfig(), LearnConfig(batch=4, steps=100)
    )
    run = AgentFolder.create(folder, config)
    write_metrics(
        folder,
        [
            {"kind": "train", "step": step, "seconds": step, "return": step / 10, "episodes": 2, "choice_accuracy": 0.5,
             "steps_per_second": 7.0}
            for step in range(10, 101, 10)
        ],
    )  # fmt: skip
    return run


def call(capsys, *words) -> tuple[int, str, str]:
    code = main(list(map(str, words)))
    said = capsys.readouterr()
    return code, said.out, said.err


def save(run: Run, step: int) -> None:
    torch.manual_seed(0)
    checkpoint.save(run.checkpoints, step, {"model": CompressiveLM(model_config(run.config)).state_dict()}, {})
    age(run.folder)


def test_runs_of_every_kind_and_state_are_listed(tmp_path, capsys):
    text_run(tmp_path / "done")
    text_run(tmp_path / "deep" / "killed")
    cut(tmp_path / "deep" / "killed", 4)
    saved = text_run(tmp_path / "stopped")
    cut(tmp_path / "stopped", 4)
    save(saved, 12)
    text_run(tmp_path / "busy")
    cut(tmp_path / "busy", 6)
    os.utime(tmp_path / "busy" / "metrics.jsonl")
    speech = text_run(tmp_path / "speech")
    MuLawTokenizer().save(speech.folder)
    agent_run(tmp_path / "agent")
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "config.json").write_text("{", "utf-8")
    (tmp_path / "lost" / "checkpoints").mkdir(parents=True)

    code, out, err = call(capsys, "runs", tmp_path, "--json")
    found = json.loads(out)
    runs = {Path(run["run"]).name: run for run in found["runs"]}
    assert code == 0
    assert {name: run["state"] for name, run in runs.items()} == {
        "done": "finished", "killed": "failed", "stopped": "interrupted", "busy": "training", "speech": "finished",
        "agent": "finished",
    }  # fmt: skip
    assert {name: run["kind"] for name, run in runs.items() if run["kind"] != "text"} == {
        "speech": "speech", "agent": "agent",
    }  # fmt: skip
    assert runs["done"]["best"] == runs["done"]["final"] == 2.05
    assert (runs["done"]["metric"], runs["speech"]["metric"]) == ("bits_per_character", "bits_per_sample")
    assert (runs["agent"]["metric"], runs["agent"]["best"], runs["agent"]["speed"]) == ("return", 10.0, 7.0)
    assert (runs["stopped"]["steps"], runs["stopped"]["planned_steps"], runs["done"]["speed"]) == (12, 20, 112.5)
    parameters = sum(p.numel() for p in CompressiveLM(model_config(saved.config)).parameters())
    assert runs["stopped"]["parameters"] == parameters
    assert runs["done"]["parameters"] is None
    assert {Path(each["run"]).name for each in found["broken"]} == {"unreadable", "lost"}

    code, out, err = call(capsys, "runs", tmp_path)
    assert code == 0
    assert re.search(r"deep/killed +– +tiny +10/20 +2\.100 bits per character +108 tokens/s +failed", out)
    assert f"warning: {tmp_path / 'unreadable'} is broken: " in err
    assert f"warning: {tmp_path / 'lost'} is broken: " in err


@pytest.mark.slow
def test_a_real_run_is_listed_with_its_preset_and_start(tmp_path, capsys):
    tiny_corpus(tmp_path / "data")
    run = Run.begin(tmp_path / "runs" / "real", tiny_run_config(tmp_path / "data"), resume=False)
    environment = json.loads((run.folder / "environment.jsonl").read_text("utf-8"))
    command = ["compressive", "train", "quickstart", "--out", "x"]
    (run.folder / "environment.jsonl").write_text(json.dumps(environment | {"command": command}) + "\n", "utf-8")
    assert loop.train(run) == loop.FINISHED
    capsys.readouterr()
    (found,) = json.loads(call(capsys, "runs", run.folder, "--json")[1])["runs"]
    assert (found["preset"], found["state"], found["steps"]) == ("quickstart", "finished", 20)
    assert found["started"] == environment["time"]
    assert 0 < found["best"] <= 8


def test_an_empty_folder_and_one_that_is_not_there(tmp_path, capsys):
    assert call(capsys, "runs", tmp_path) == (
        0, f"no runs in {tmp_path}; train one: compressive train quickstart\n", "",
    )  # fmt: skip
    code, _, err = call(capsys, "runs", tmp_path / "nowhere")
    assert code == 2
    assert "is not a folder" in err


def test_runs_that_differ_in_their_seed_are_one_recipe(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for seed, bits in ((0, 2.0), (1, 2.2), (2, 2.1)):
        text_run(tmp_path / f"ours-seed{seed}", seed, bits)
        text_run(tmp_path / f"txl-seed{seed}", seed, bits + 1, {"compressed_size": 0})
    (tmp_path / "ours-seed0" / "evaluation").mkdir()
    (tmp_path / "ours-seed0" / "evaluation" / "test.json").write_text(
        json.dumps({"bits_per_character": 1.5, "whole_split": True})
    )
    folders = sorted(tmp_path.glob("*-seed*"))
    code, out, err = call(capsys, "compare", *folders, "--json", "--plot", tmp_path / "curves.svg")
    assert code == 0
    found = json.loads(out)
    ours, txl = found["recipes"]
    assert (ours["name"], ours["seeds"], txl["name"]) == ("ours", [0, 1, 2], "txl")
    assert ours["best"] == {"mean": pytest.approx(2.15), "low": 2.05, "high": pytest.approx(2.25), "seeds": 3}
    assert ours["test"]["mean"] == 1.5
    assert ours["differs_in"] == {"model.compressed_size": 8}
    assert txl["differs_in"] == {"model.compressed_size": 0}
    drawn = (tmp_path / "curves.svg").read_text("utf-8")
    assert drawn.startswith("<svg ")
    assert "<title>ours, step 20: 2.15 (2.05 to 2.25)</title>" in drawn
    assert err == f"written to {tmp_path / 'curves.svg'}\n"

    code, out, _ = call(capsys, "compare", *folders, "--plot", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "2.1500 (2.0500 to 2.2500)" in out
    assert "ours: 2.15 bits per character, 1 below txl (seeds do not overlap)" in out


def test_agents_are_compared_by_their_return(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("first", "second"):
        agent_run(tmp_path / name)
    code, out, _ = call(capsys, "compare", tmp_path / "first", tmp_path / "second", "--plot", tmp_path / "a.png")
    assert code == 0
    assert "mean over seeds" in out  # the same configuration twice is one recipe
    assert "10.0000" in out


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["text", "agent"],
            r"runs of 2 kinds \(text: .*/text; agent: .*/agent\): compare text, speech and agents each",
        ),
        (["text", "speech"], "runs of 2 kinds"),
        (["text", "words"], r"runs of 2 metrics \(bits per character: .*/text; perplexity: .*/words\)"),
        (["text", "text"], "expected at least 2 different ones"),
        (["text", "nothing"], "is not a run"),
        (["text", "old", "--plot", "x.pdf"], r"x.pdf: expected a figure as .png or .svg"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(tmp_path, capsys, names, message):
    for name in ("text", "speech", "words", "old"):
        text_run(tmp_path / name)
    MuLawTokenizer().save(tmp_path / "speech")
    (tmp_path / "words" / "tokenizer.json").write_text('{"kind": "words"}', "utf-8")
    agent_run(tmp_path / "agent")
    known = ("text", "speech", "words", "old", "agent", "nothing")
    code, out, err = call(capsys, "compare", *(tmp_path / name if name in known else name for name in names))
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert err.count("\n") == 1


def test_names_with_brackets_are_listed_whole(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    home = tmp_path / "a[b]"
    text_run(home / "sweep[lr=3e-4]")
    text_run(home / "sweep[lr=1e-3]", model={"compressed_size": 0}, bits=3)
    config = home / "sweep[lr=1e-3]" / "config.json"
    config.write_text(config.read_text("utf-8").replace('"corpus": "tiny"', '"corpus": "tiny[bold]"'), "utf-8")
    _, out, _ = call(capsys, "runs", home)
    assert "2 runs in " in out
    for name in ("sweep[lr=3e-4]", "sweep[lr=1e-3]", "tiny[bold]"):
        assert name in out
    assert "a[b]" in "".join(out.split("preset")[0].split())
    _, out, _ = call(capsys, "compare", *home.iterdir(), "--plot", tmp_path / "a.svg")
    for name in ("│ sweep[lr=3e-4] ", "│ sweep[lr=1e-3] ", " tiny[bold] │"):
        assert name in out


def test_a_dollar_in_a_name_is_no_formula(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    text_run(tmp_path / r"x$\q$")
    text_run(tmp_path / "y", model={"compressed_size": 0}, bits=3)
    for name in ("a.svg", "a.png"):
        assert call(capsys, "compare", tmp_path / r"x$\q$", tmp_path / "y", "--plot", tmp_path / name)[0] == 0
    assert r">x$\q$</text>" in (tmp_path / "a.svg").read_text("utf-8")


def test_odd_folders_do_not_hide_the_others(tmp_path, capsys):
    odd = text_run(tmp_path / "odd")
    (odd.folder / "environment.jsonl").write_text('[]\n{"time": "2026-01-02T03:04:05Z"}\n', "utf-8")
    (odd.checkpoints / "step-00000012.partial").mkdir(parents=True)
    save(odd, 9)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 12}', "utf-8")
    code, out, _ = call(capsys, "runs", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0
    assert [(Path(run["run"]).name, run["started"]) for run in found["runs"]] == [("odd", "2026-01-02T03:04:05Z")]
    (broken,) = found["broken"]
    assert broken["reason"] == f"{tmp_path / 'gpt2'} is not a run of ours: its config.json has no table `model`"
    newest = checkpoint.latest(odd.checkpoints)
    assert newest is not None
    assert newest.step == 9


@pytest.mark.parametrize(("tokenizer", "kind"), [(ByteTokenizer(), "text"), (MuLawTokenizer(), "speech")])
def test_a_release_has_the_metric_of_its_run(tmp_path, tokenizer, kind):
    run = text_run(tmp_path / "run", model={"vocab_size": 256})
    tokenizer.save(run.folder)
    save(run, 20)
    export(run, tmp_path / "release", "last")
    found = [Overview.read(tmp_path / name) for name in ("run", "release")]
    assert [each.kind for each in found] == [kind, kind]
    assert found[0].metric == found[1].metric != UNKNOWN


def test_a_test_score_is_in_the_unit_of_its_metric(tmp_path):
    run = text_run(tmp_path / "run")
    (run.folder / "evaluation").mkdir()
    scores = {"whole_split": True, "nats": 200.0, "tokens": 100, "perplexity": math.exp(2), "bits_per_character": 2.5}
    (run.folder / "evaluation" / "test.json").write_text(json.dumps(scores), "utf-8")
    assert Overview.read(run.folder).test == 2.5
    (run.folder / "tokenizer.json").write_text('{"kind": "bpe"}', "utf-8")
    assert Overview.read(run.folder).test == pytest.approx(math.exp(2))
    (run.folder / "tokenizer.json").unlink()  # as version 0.1 left it
    assert Overview.read(run.folder).metric == UNKNOWN
    assert Overview.read(run.folder).test == pytest.approx(2 / math.log(2))
