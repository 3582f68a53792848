"""The study of the agent's cores: what its rows are, and that one command trains, resumes, measures and writes it."""

import dataclasses
import json

import pytest

from compressive.experiments import agent, load, runner
from compressive.experiments.agent import AgentRow, Delays, Rooms, delays
from compressive.experiments.experiment import SCALES, Measured


@pytest.mark.parametrize("kind", [Rooms, Delays])
@pytest.mark.parametrize("scale", SCALES)
def test_cores_differ_in_nothing_else(kind, scale):
    rows = {row.row.name.removeprefix(f"{kind.name}-"): row.row.config for row in measured(kind(), scale)}
    extra = {"txl-recent"} if kind is Delays else set()
    assert rows.keys() == {"none", "lstm", "txl", "rate1", "rate2", "rate4", "rate8"} | extra
    assert len({(config.task, config.train) for config in rows.values()}) == 1
    slots = {
        name: sum(config.memory.memory_sizes[:1] + config.memory.compressed_sizes[:1]) for name, config in rows.items()
    }
    assert slots["txl"] == slots["rate4"]
    assert rows["txl"].memory.temporal_range == rows["rate1"].memory.temporal_range
    assert [rows[f"rate{rate}"].model.compression_rates[0] for rate in (1, 2, 4, 8)] == [1, 2, 4, 8]


def measured(experiment, scale):
    return [Measured(row, {}) for row in experiment.rows(scale)]


def test_delays_are_within_and_beyond_each_reach():
    for scale in SCALES:
        rows = {row.title: row.config for row in Delays().rows(scale)}
        config = rows["rate 1"]
        assert {found.model.n_layers for found in rows.values()} == {1}
        lengths = delays(config)
        assert sorted(set(config.task.delays)) == list(lengths)
        short = sum(config.task.delays.count(length) for length in lengths[: agent.SHORT])
        assert short > len(config.task.delays) / 2  # they teach what to remember
        for rate in (1, 2, 4, 8):
            reach = rows[f"rate {rate}"].memory.temporal_range
            assert any(reach - config.model.window < length < reach for length in lengths)
        assert lengths[-1] > rows["rate 8"].memory.temporal_range


def short(monkeypatch):
    """Let the study train for two rollouts of few environments, in this process."""
    real = agent.configured

    def configured(preset, tables):
        found = real("rooms-tiny", agent._TINY)
        few = dataclasses.replace(found.task, envs=8)
        brief = dataclasses.replace(found.train, steps=2 * 8 * 16, log_every=1, batch=8)
        return dataclasses.replace(found, task=few, train=brief)

    monkeypatch.setattr(agent, "configured", configured)
    monkeypatch.setattr(agent, "_DELAYED", {scale: {} for scale in SCALES})
    monkeypatch.setattr(agent, "EPISODES", dict.fromkeys(SCALES, 8))
    monkeypatch.setattr(agent, "ENVS", 8)
    monkeypatch.setattr(agent, "delays", lambda config: (0, 5))


@pytest.mark.parametrize("name", ["agent", "agent-delays"])
def test_a_study_is_trained_measured_and_written(name, tmp_path, monkeypatch, capsys):
    short(monkeypatch)
    experiment = load(name)
    assert isinstance(experiment, agent.Rooms | agent.Delays)
    options = runner.Options("tiny", tmp_path / "out", tmp_path / "runs", seeds=(0, 1), device="cpu")
    rows = [row for row in experiment.rows("tiny") if row.title in ("rate 4", "TransformerXL")]
    monkeypatch.setattr(experiment, "rows", lambda scale: rows)
    for task in runner.tasks([experiment], options):
        assert isinstance(task.row, AgentRow)
        assert task.row.train(task.folder, task.seed, tmp_path, "cpu") == 0
        assert task.row.train(task.folder, task.seed, tmp_path, "cpu") == 0  # resumed at its end: nothing is left
        found = experiment.measure(task.row.open(task.folder), "tiny")
        kept = {
            "training_seconds": 1.0,
            "trained": [],
            "measured": dict.fromkeys(runner.MEASURED, "here"),
            "found": found,
        }
        (task.folder / "measured").mkdir()
        (task.folder / "measured" / f"{name}.json").write_text(json.dumps(kept))
    assert runner.run([experiment], options, "the command") == runner.FINISHED
    written = json.loads((tmp_path / "out" / name / "tiny.json").read_text())
    assert written["complete"] is True
    assert len(written["rows"]) == 4
    assert (tmp_path / "out" / name / "tiny.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "rate 4 against" in said
    for title in ("rate 4", "TransformerXL"):
        assert f"| {title} |" in said
    if name == "agent":
        assert "| oracle | 88.0" in said
    else:
        assert [one["delay"] for one in written["rows"][0]["found"]["delays"]] == [0, 5]
