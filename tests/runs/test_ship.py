"""`tools/ship.py`: a release of a run that took two runs, its scores, and a card with these and no others."""

import json
import runpy
import sys

import pytest
import torch
from helpers import ROOT
from training_helpers import tiny_corpus, tiny_run_config

import compressive
from compressive.distributed import World
from compressive.runs.export import export
from compressive.runs.run import Run
from compressive.training import loop
from compressive.training.preflight import begin


@pytest.mark.slow
def test_a_model_of_two_runs_is_packed_scored_and_described(tmp_path, monkeypatch, capsys):
    tiny_corpus(tmp_path)
    folders, source = [tmp_path / "first", tmp_path / "second"], None
    for folder, steps in zip(folders, (4, 6), strict=True):
        config = tiny_run_config(tmp_path, steps=steps, eval_every=0, seed=steps)
        loop.train(begin(folder, config, (), False, World(), source))
        source = folder
    release, results = tmp_path / "release", tmp_path / "results.json"
    words = [folders[1], "--results", results, "--out", release, "--precision", "int8", "--streams", 2, "--valid", 400,
             "--memory-sizes", "16,32", "--sizes", "8", "--dynamic", 1e-3, 1e-9, "--device", "cpu"]  # fmt: skip
    flags = [str(word) for word in words]
    monkeypatch.setattr(sys, "argv", ["ship.py", *flags])
    runpy.run_path(str(ROOT / "tools" / "ship.py"), run_name="__main__")

    found, card = json.loads(results.read_text("utf-8")), (release / "README.md").read_text("utf-8")
    assert card in capsys.readouterr().out
    assert (found["config"]["train"]["steps"], found["before"]["config"]["train"]["steps"]) == (6, 4)
    plain = " ".join(card.split())
    then = plain.index("Then, from its weights of step 4, the best on validation: `compressive")
    assert plain.index("4 steps of 4 streams") < then < plain.index("6 steps of 4 streams")
    best = min(found["validation"], key=lambda row: row["bits_per_character"])
    assert {row["memory_size"] for row in found["validation"]} == {16, 32}
    assert [row["memory_size"] for row in found["test"]] == list(dict.fromkeys([16, best["memory_size"]]))
    (adapted,) = found["dynamic"]["test"]
    rates = {row["learning_rate"]: row["bits_per_character"] for row in found["dynamic"]["validation"]}
    assert rates[adapted["learning_rate"]] == min(rates.values())
    assert adapted["memory_size"] == best["memory_size"]
    for row in (*found["test"], adapted):
        assert row["whole_split"]
        assert f"| {row['bits_per_character']:.4f} |" in card
    assert f"dynamic evaluation at a rate of {adapted['learning_rate']:g} |" in card
    (release / "README.md").unlink()  # as if scoring had been cut off
    runpy.run_path(str(ROOT / "tools" / "ship.py"), run_name="__main__")
    assert (release / "README.md").read_text("utf-8") == card
    (release / "README.md").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["ship.py", str(folders[0]), *sys.argv[2:]])
        with pytest.raises(ValueError, match="holds other weights"):
            runpy.run_path(str(ROOT / "tools" / "ship.py"), run_name="__main__")
        patch.setattr(sys, "argv", ["ship.py", *("bf16" if word == "int8" else word for word in flags)])
        with pytest.raises(ValueError, match="or in another form"):
            runpy.run_path(str(ROOT / "tools" / "ship.py"), run_name="__main__")
    (release / "README.md").write_text(card, "utf-8")
    with pytest.raises(ValueError, match="release"):
        runpy.run_path(str(ROOT / "tools" / "ship.py"), run_name="__main__")
    weights = compressive.load(str(release), device="cpu").model.state_dict()
    assert sum(tensor.numel() for tensor in weights.values()) == found["parameters"]
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.slow
def test_a_model_that_started_from_a_release_is_packed_too(tmp_path, monkeypatch):
    """A release does not say how it was trained; the card names it."""
    tiny_corpus(tmp_path)
    first, release, second = (tmp_path / name for name in ("first", "release", "second"))
    for folder, source in ((first, None), (second, release)):
        config = tiny_run_config(tmp_path, steps=4, eval_every=0)
        loop.train(begin(folder, config, (), False, World(), source))
        if source is None:
            export(Run.open(first), release)
    out = tmp_path / "out"
    words = [
        second,
        "--results",
        tmp_path / "results.json",
        "--out",
        out,
        "--sizes",
        "8",
        "--streams",
        2,
        "--valid",
        400,
    ]
    monkeypatch.setattr(sys, "argv", ["ship.py", *map(str, words), "--device", "cpu"])
    runpy.run_path(str(ROOT / "tools" / "ship.py"), run_name="__main__")
    assert f"**Training.** From {release}'s weights of step 4, the best on validation: `compressive" in " ".join(
        (out / "README.md").read_text("utf-8").split()
    )
