"""The speech experiment at tiny size: equal samples, stopped and resumed, without the audio libraries."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT
from speech_helpers import tiny_speech
from warm_python import interpreter

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "experiments" / "speech.py"
BARE = "import runpy, sys; sys.modules |= dict.fromkeys(('soundfile', 'soxr', 'tyro', 'tokenizers')); " + (
    f"sys.argv = [{str(SCRIPT)!r}, *sys.argv[1:]]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
)


def run(*words, cwd):
    return subprocess.run(
        [*interpreter(), "-c", BARE, *map(str, words)], cwd=cwd, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The experiment started, stopped at its deadline, and resumed to the end."""
    home = tmp_path_factory.mktemp("experiment")
    tiny_speech(home / "data")
    words = [
        "--corpus", "tiny", "--family", "speech-small", "--chunk", 128, "--batch", 2, "--seconds", 1, "--eager",
        "--precision", "fp32", "--points", 2, "--curve-samples", 400, "--test-samples", 500, "--streams", 2,
        "--sample", 0.005, "--out", "out", "--results", "results.json", "--commit", "abc",
    ]  # fmt: skip
    sitting = 1
    while not any(file.stat().st_size for file in (home / "out").glob("*/metrics.jsonl")):  # on a busy machine
        stopped = run(*words, "--sitting", sitting, cwd=home)
        assert stopped.returncode == 75, stopped.stderr
        assert "not done yet" in stopped.stdout
        sitting *= 2
    old_names = "--lanes", 2, "--draw", 0.005
    alone = run(*words, *old_names, "--only", "wavenet", "--sitting", 300, cwd=home)
    assert alone.returncode == 0, alone.stderr
    found = json.loads((home / "results.json").read_text())
    assert (list(found["models"]), found["complete"]) == (["wavenet"], False)
    done = run(*words, "--sitting", 300, cwd=home)
    assert done.returncode == 0, done.stderr
    return home


def test_a_deadline_before_training_handles_signals_is_no_crash(monkeypatch):
    train_until = runpy.run_path(str(SCRIPT))["train_until"]
    monkeypatch.setitem(train_until.__globals__, "train", lambda run: time.sleep(60))
    before = signal.getsignal(signal.SIGTERM)
    assert train_until(None, time.monotonic() + 0.1) == 75
    assert signal.getsignal(signal.SIGTERM) == before


def test_all_models_see_equally_many_samples(home):
    found = json.loads((home / "results.json").read_text())
    assert found["complete"]
    assert found["commit"] == "abc"
    assert found["hardware"]["torch"]
    seen = {name: model["samples_seen"] for name, model in found["models"].items()}
    assert set(seen) == {"compressive", "transformer-xl", "wavenet"}
    assert set(seen.values()) == {found["plan"]["samples"]}
    sizes = [model["parameters"] for model in found["models"].values()]
    assert max(sizes) / min(sizes) < 1.03


def test_curves_are_of_the_same_updates_and_the_same_samples(home):
    found = json.loads((home / "results.json").read_text())
    curves = [model["curves"] for model in found["models"].values()]
    for split in ("valid", "test"):
        updates = [[point["update"] for point in curve[split]] for curve in curves]
        assert updates[0] == updates[1] == updates[2]
        assert len(updates[0]) >= 2
    assert found["training_speed_to_wavenet"]["wavenet"] == 1
    for model in found["models"].values():
        assert model["best"]["test"]["samples"] == model["last"]["test"]["samples"] == 500
        assert model["best"]["valid"]["bits"] <= model["last"]["valid"]["bits"] + 0.2
        assert model["samples_per_second"] > 0
    assert set(found["floors_test_bits_per_sample"]) == {"unigram", "bigram", "linear_prediction"}
    assert (home / "out" / "wavenet.wav").stat().st_size == 44 + 2 * 120


def test_a_figure_is_plotted_from_the_results(home, monkeypatch):
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setattr(
        sys, "argv", ["speech.py", "--results", str(home / "results.json"), "--figure", str(home / "a.png")]
    )
    assert script["main"]() == 0
    assert (home / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plan_is_not_changed_on_the_way(home, monkeypatch):
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "argv", ["speech.py", "--corpus", "tiny", "--out", "out", "--results", "results.json"])
    with pytest.raises(SystemExit, match="was made with another family, chunk, batch"):
        script["main"]()
