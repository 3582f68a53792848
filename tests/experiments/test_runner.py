"""The runner of experiments: what is trained, resumed, shared, stopped in time, refused, and written."""

import json
import os
import re
import shutil
import time
import types
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from helpers import TESTS
from training_helpers import tiny_corpus
from warm_python import interpreter

from compressive.cli import main
from compressive.config import RunConfig
from compressive.experiments import EXPERIMENTS, load, runner
from compressive.experiments.experiment import SCALES, Comparison, Measured, figure_of, markdown, prepare_corpus
from compressive.runs import checkpoint

TINY, AGAIN = "experiment_helpers:Tiny", "experiment_helpers:Again"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the tiny corpus, to run in."""
    monkeypatch.chdir(tmp_path)
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(runner, "INTERPRETER", interpreter())
    tiny_corpus(tmp_path / "data")
    return tmp_path


def read(home, name="tiny-experiment", scale="tiny"):
    return json.loads((home / "experiments" / "results" / name / f"{scale}.json").read_text())


# The rule


def test_a_difference_within_the_spread_of_seeds_is_inconclusive():
    within = Comparison.of([1.3554, 1.3596], [1.3448, 1.3599])
    assert within.verdict == "inconclusive"
    assert within.spread == pytest.approx(0.0151)
    assert (
        within.sentence("a", "b") == "a against b: +0.0051 ± 0.0337 bits, seeds differ by up to 0.0151: inconclusive."
    )
    assert Comparison.of([1.0, 1.25], [1.25, 1.5]).verdict == "inconclusive"  # as much as the spread is not more


def test_a_difference_beyond_the_spread_is_lower_or_higher():
    assert Comparison.of([1.10, 1.11], [1.20, 1.22]).verdict == "lower"
    assert Comparison.of([1.20, 1.22], [1.10, 1.11]).verdict == "higher"
    assert Comparison.of([1.10, 1.11], [1.20, 1.22]).sentence("a", "b").endswith(": lower.")
    assert Comparison.of([1.10, 1.11], [1.20, 1.22], [1.0, 1.2], []).verdict == "inconclusive"  # another row's spread


def test_measurements_of_the_same_runs_are_compared_seed_by_seed():
    assert Comparison.of([1.0, 1.5], [1.1, 1.62]).verdict == "inconclusive"
    assert Comparison.paired([1.0, 1.5], [1.1, 1.62]).verdict == "inconclusive"  # two differences tell too little
    assert Comparison.paired([1.0, 1.5, 1.2], [1.1, 1.62, 1.31]).verdict == "lower"
    assert Comparison.paired([1.0, 1.5], [1.1, 1.4]).verdict == "inconclusive"
    assert Comparison.paired([], []).verdict == "inconclusive"


def test_one_seed_or_none_is_inconclusive():
    assert Comparison.of([1.0], [2.0]).verdict == "inconclusive"
    assert Comparison.of([1.0, 1.0], [2.0]).verdict == "inconclusive"
    assert "one seed: inconclusive" in Comparison.of([1.0], [2.0]).sentence("a", "b")
    assert Comparison.of([], [2.0, 2.0]).verdict == "inconclusive"
    assert Comparison.of([], [2.0]).sentence("a", "b") == "a against b: not measured yet."


@pytest.mark.parametrize("seeds", [2, 3])
def test_verdicts_without_a_difference_are_rare(seeds):
    random = np.random.default_rng(0)
    draws = random.normal(size=(2000, 3, seeds))
    for compare in (Comparison.of, lambda a, b, _: Comparison.paired(a, b)):
        found = [compare(*map(list, rows)).verdict for rows in draws]
        assert sum(verdict != "inconclusive" for verdict in found) < 0.065 * len(found)  # 5 %, and the noise of 2,000


def test_the_interval_of_a_difference_is_student_s():
    found = Comparison.of([1.0, 1.2, 1.1], [2.0, 2.3, 2.0])
    assert found.margin == pytest.approx(0.3205, abs=1e-3)  # as scipy.stats.ttest_ind has it
    paired = Comparison.paired([1.0, 1.5, 1.2], [1.1, 1.62, 1.31])
    assert paired.margin == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)


def test_figures_show_the_spread():
    assert figure_of([]) == "–"
    assert figure_of([1.5]) == "1.5000"
    assert figure_of([1.0, 2.0, 1.2], 1) == "1.4 (1.0 to 2.0)"
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


# Definitions


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_defined_at_every_scale(name, scale, tmp_path):
    """All configurations are valid, and nothing that matters is the same: no training is needed to know."""
    found = load(name)
    assert found.name == name
    assert load(found.path).name == name
    planned = runner.tasks([found], runner.Options(scale, runs=tmp_path))
    assert planned
    assert all(re.fullmatch(r"[a-z0-9-]+", task.row.name) for task in planned)
    assert len({task.row.title for task in planned}) == len({task.row.name for task in planned})
    for task in planned:
        of = task.row.cost(scale)
        assert 0 <= of.compressors < of.parameters
        assert of.seconds > 0
    if scale != "paper":
        assert len(found.seeds[scale]) >= 2
        on: dict[str, list[Any]] = defaultdict(list)
        for task in planned:
            config = task.row.config
            on[config.data.corpus if isinstance(config, RunConfig) else config.task.name].append(task.row)
        for compared in on.values():
            assert len({row.cost(scale).tokens for row in compared}) == 1
            windows = {row.config.model.window: row.config.train.steps for row in compared}  # WaveNet's are longer
            assert all(row.config.train.steps == windows[row.config.model.window] for row in compared)
    assert found.verdicts([Measured(row, {}) for row in found.rows(scale)])


FIRST = ("enwik8", "compression-functions", "memory-sizes", "attention", "layers", "recall", "pg19")


def test_small_fits_into_slices_of_an_hour_in_all(tmp_path):
    """What the paper says first of text; the rest of text in less; agents, which learn slower, take an evening."""
    seconds: dict[str, float] = defaultdict(float)
    first = {task.row.name for task in runner.tasks(list(map(load, FIRST)), runner.Options("small", runs=tmp_path))}
    for task in runner.tasks(list(map(load, EXPERIMENTS)), runner.Options("small", runs=tmp_path)):
        kind = "agent" if task.row.name.startswith("agent") else "first" if task.row.name in first else "rest"
        seconds[kind] += task.row.cost("small").seconds
    assert seconds["first"] < 75 * 60
    assert seconds["rest"] < 45 * 60
    assert seconds["agent"] < 8 * 3600


def test_rows_of_the_same_name_must_be_the_same(tmp_path, monkeypatch):
    enwik8, other = load("enwik8"), load("enwik8")
    monkeypatch.setattr(other, "rows", lambda scale: load("enwik8").rows("small"))
    with pytest.raises(ValueError, match="give it another name"):
        runner.tasks([enwik8, other], runner.Options("tiny", runs=tmp_path))


def test_corpora_that_are_not_there_are_named_with_their_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="compressive data prepare enwik8 --data-dir here"):
        prepare_corpus("enwik8", tmp_path.relative_to(tmp_path) / "here")
    with pytest.raises(FileNotFoundError, match="root of the repository"):
        prepare_corpus("books", tmp_path)


def test_wrong_options_are_refused():
    for wrong, said in (({"jobs": -1}, "jobs=-1"), ({"minutes": 0.0}, "minutes=0"), ({"seeds": (1, 1)}, "seeds=")):
        with pytest.raises(ValueError, match=said):
            runner.Options("tiny", **wrong)
    with pytest.raises(ValueError, match="choose one of enwik8"):
        load("enwik9")
    with pytest.raises(ValueError, match="cannot be imported"):
        load("no_such_module:Mine")


# Running


@pytest.mark.slow
def test_runs_are_trained_once_shared_and_written(home, capsys, monkeypatch):
    options = runner.Options("tiny", jobs=2)
    assert runner.run([load(TINY)], options, "the command") == runner.FINISHED
    said = capsys.readouterr()
    assert "with, seed 1: measured" in said.err
    found = read(home)
    assert found["complete"] is True
    assert found["command"] == "the command"
    assert [(row["row"], row["seed"]) for row in found["rows"]] == [
        ("with", 0), ("with", 1), ("without", 0), ("without", 1)]  # fmt: skip
    assert found["hardware"]["torch"]
    assert found["configs"]["without"]["model"]["compressed_size"] == 0
    assert found["rows"][0]["compressors"] > 0 == found["rows"][2]["compressors"]
    assert found["verdicts"][0].startswith("with against without: ")
    assert found["verdicts"][0] in said.out
    page = (home / "experiments" / "results" / "tiny-experiment" / "tiny.md").read_text()
    assert page.count("\n| ") == 4
    assert found["verdicts"][0] in page
    assert (home / "experiments" / "results" / "tiny-experiment" / "tiny.png").read_bytes()[:4] == b"\x89PNG"

    # Another experiment measures the same runs: nothing is trained again.
    before = {path: path.stat().st_mtime_ns for path in home.glob("runs/experiments/tiny/*/checkpoints/step-*")}
    assert len(before) == 4
    assert runner.run([load(TINY), load(AGAIN)], options, "") == runner.FINISHED
    assert {path: path.stat().st_mtime_ns for path in before} == before
    bits = [[row["found"]["test"]["bits_per_byte"] for row in file["rows"]] for file in (read(home, "again"), found)]
    assert bits[0] == bits[1]
    capsys.readouterr()

    # What is measured needs no weights, and no process.
    for path in home.glob("runs/experiments/tiny/*/checkpoints"):
        shutil.rmtree(path)
    for path in home.glob("experiments/results/*/*"):
        path.unlink()
    monkeypatch.setattr(runner, "INTERPRETER", ["false"])
    assert runner.run([load(AGAIN)], options, "") == runner.FINISHED
    assert "4 of 4 runs are measured already" in capsys.readouterr().err
    assert read(home, "again")["complete"] is True

    # Without jobs the tables are those of what there is, also where there is no corpus.
    shutil.rmtree(home / "data")
    options = runner.Options("tiny", jobs=0, seeds=(0, 1, 2))
    assert runner.run([load(AGAIN)], options, "") == runner.TO_BE_CONTINUED
    assert "2 runs are left" in capsys.readouterr().err
    assert read(home, "again")["complete"] is False


@pytest.mark.slow
def test_a_run_that_is_out_of_time_is_resumed_by_the_same_command(home, capsys, monkeypatch):
    (task,) = runner.tasks([load(TINY)], options := runner.Options("small", minutes=5))

    def until(step):
        """Let the minutes be over once the run has come to a step."""
        clock = types.SimpleNamespace(monotonic=lambda: 1e9 * (task.step >= step), sleep=time.sleep)
        monkeypatch.setattr(runner, "time", clock)

    until(3)
    assert runner.run([load(TINY)], options, "the command") == runner.TO_BE_CONTINUED
    said = capsys.readouterr().err
    assert "long, seed 0: begins at step 0" in said
    assert "stopping after 5 minutes" in said
    assert "to be continued: 1 run is left; the same command goes on where it stopped: the command" in said
    first = checkpoint.latest(task.folder / "checkpoints")
    assert first is not None
    assert not (home / "experiments").exists()  # nothing is measured yet
    until(first.step + 3)
    assert runner.run([load(TINY)], options, "the command") == runner.TO_BE_CONTINUED
    assert f"long, seed 0: goes on from step {first.step:,}" in capsys.readouterr().err
    second = checkpoint.latest(task.folder / "checkpoints")
    assert second is not None
    assert second.step > first.step


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_go_on(home, capsys, monkeypatch):
    monkeypatch.setenv("TINY_FAILS", "with-seed0")
    options = runner.Options("tiny", seeds=(0,))
    assert runner.run([load(TINY)], options, "") == runner.FAILED
    assert "with, seed 0: failed (ValueError: this run is told to fail)" in capsys.readouterr().err
    found = read(home)
    assert found["complete"] is False
    assert [row["row"] for row in found["rows"]] == ["without"]
    assert "not measured yet" in found["verdicts"][0]
    page = (home / "experiments" / "results" / "tiny-experiment" / "tiny.md").read_text()
    assert "Not complete: 1 of 2 runs are missing" in page
    (task, _) = runner.tasks([load(TINY)], options)
    row = json.loads((task.folder / "row.json").read_text())
    del row["config"]["train"]["recompute"]  # as if it had been written before there was such a field
    (task.folder / "row.json").write_text(json.dumps(row))
    assert len(runner.tasks([load(TINY)], options)) == 2
    monkeypatch.delenv("TINY_FAILS")
    monkeypatch.setenv("TINY_STEPS", "7")
    with pytest.raises(ValueError, match="was trained with another configuration"):
        runner.tasks([load(TINY)], options)


def test_the_command_lists_experiments_and_their_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["experiment"]) == 0
    listed = capsys.readouterr().out
    for name in EXPERIMENTS:
        assert re.search(rf"^{name}  \(.+\)\n    .+\n    tiny +\d+ runs, about \d+ (s|min) of", listed, re.MULTILINE)
    assert main(["experiment", "enwik8", "--scale", "small", "--dry-run", "--seeds", "4"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("not begun") == 3
    assert "compressive-seed4" in listed
    assert main(["experiment", "enwik8", "--jobs", "-1"]) == 2
    assert "jobs=-1: expected at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
