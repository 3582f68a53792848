"""The experiment and the benchmark of the agent at a tiny size, with core dependencies only."""

import json
import os
import subprocess

import pytest
from helpers import ROOT
from warm_python import interpreter

pytestmark = pytest.mark.slow

BLOCK = "import sys\nfor name in ('gymnasium', 'ray', 'tyro', 'tokenizers', 'PIL'): sys.modules[name] = None\n"


def run(script, *words):
    """Run a script as a user would, with the packages blocked that it must not need."""
    argv = [script, *map(str, words)]
    code = f"{BLOCK}import runpy; sys.argv = {argv!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [*interpreter(), "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_experiment_writes_one_file_and_resumes(tmp_path):
    results = tmp_path / "rooms.json"
    words = [
        "--preset", "rooms-tiny", "--envs", 4, "--batch", 2, "--minutes", 5, "--delays", 0, 3, "--episodes", 8,
        "--out", tmp_path / "run", "--results", results, "--seed", 3, "--rate", 8,
    ]  # fmt: skip
    done = run("experiments/rooms.py", *words, "--steps", 256)
    assert done.returncode == 0, done.stderr
    done = run("experiments/rooms.py", *words, "--steps", 768)
    assert done.returncode == 0, done.stderr
    assert "from step 256" in done.stdout
    found = json.loads(results.read_text())
    assert (found["steps"], found["seed"], found["curve"][-1]["step"]) == (768, 3, 768)
    assert found["environment"]["commit"]
    assert found["config"]["model"]["compression_rate"] == 8
    assert found["temporal_range"] == 32 + 8 * 32
    assert set(found["policies"]) == {f"{who}_delay_{n}" for who in ("agent", "random", "oracle") for n in (0, 3)}
    assert found["policies"]["agent_delay_3"]["episodes"] == 8
    assert found["policies"]["oracle_delay_3"]["return"] == 11

    # Plotting may need packages that training must not.
    words = ["experiments/rooms.py", "--results", results, "--figure", tmp_path / "curve.png"]
    done = subprocess.run([*interpreter(), *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_several_seeds_share_a_file(tmp_path):
    results = tmp_path / "rooms.json"
    words = [
        "--preset", "rooms-tiny", "--envs", 4, "--batch", 2, "--minutes", 5, "--episodes", 8, "--steps", 256,
        "--results", results, "--out", tmp_path / "runs",
    ]  # fmt: skip
    for seeds in ((5,), (3,)):
        done = run("experiments/rooms.py", *words, "--seeds", *seeds)
        assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert [one["seed"] for one in found["runs"]] == [3, 5]
    assert "seed" not in found["config"]["train"]
    assert all(one["cpu_seconds"] > 0 and one["environment"]["commit"] for one in found["runs"])
    assert all(one["policies"]["agent_delay_0"]["episodes"] == 8 for one in found["runs"])

    done = run("experiments/rooms.py", *words, "--seeds", 4, "--rate", 8)
    assert done.returncode != 0
    assert "has runs of another configuration" in done.stderr


def test_the_benchmark_measures_every_part(tmp_path):
    results = tmp_path / "speed.json"
    done = run(
        "benchmarks/rooms.py", "--preset", "rooms-tiny", "--lanes", 4, "--cores", "txl", "--seconds", 0.01,
        "--results", results,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(results.read_text())["rows"]
    assert (row["core"], row["envs"]) == ("txl", 4)
    assert all(row[f"{part}_steps_per_second"] > 0 for part in ("task", "acting", "learning", "training"))
