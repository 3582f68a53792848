"""Configurations of agents: presets, what is comparable, what is refused."""

import pytest
from rl_helpers import tiny_agent_run

from compressive.config import preset_names
from compressive.config.agent import AgentConfig, AgentRun, LearnConfig, TaskConfig


def test_only_the_original_task_is_comparable_with_humans():
    assert TaskConfig().comparable
    assert TaskConfig(envs=7, width=48, height=36).comparable
    assert TaskConfig("lab:contributed/dmlab30/rooms_select_nonmatching_object").comparable
    for other in (
        TaskConfig("CartPole-v1"),
        TaskConfig(delays=(0, 8)),
        TaskConfig(objects=3),
        TaskConfig(object_size=90),
        TaskConfig("lab:x"),
    ):
        assert not other.comparable


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"task": {"objects": 40}}, "objects=40: expected 2 to 36"),
        ({"task": {"delays": ()}}, r"delays=\(\): expected one or more"),
        ({"task": {"speed": 2000.0}}, "speed=2000.0: expected at most 960"),
        ({"agent": {"core": "gru"}}, "core='gru': expected one of compressive, txl, lstm, none"),
        ({"agent": {"channels": ()}}, r"channels=\(\): expected one or more"),
        ({"train": {"discount": 1.0}}, "discount=1.0: expected a number below 1"),
        ({"train": {"minutes": -1.0}}, "minutes=-1.0: expected a number of at least 0"),
        ({"train": {"batch": 4}}, "batch=4: expected a divisor of 6"),
        ({"train": {"actors": 4}}, "envs=6: expected a multiple of actors=4"),
        ({"model": {"compressed_size": 0}}, "core='compressive' with compressed_size=0"),
        ({"model": {"compression_loss": "none"}}, "nothing would train the compressor"),
    ],
)
def test_impossible_runs_are_refused(tables, message):
    with pytest.raises(ValueError, match=message):
        tiny_agent_run(**tables)


def test_presets_have_the_paper_s_values_and_rollouts_of_64():
    for name in preset_names("task"):  # the trials of rooms-tiny are short
        assert AgentRun.from_preset(name).memory.window == (32 if name == "rooms-tiny" else 64)
    run = AgentRun.from_preset("rooms")
    assert (run.train.learning_rate, run.train.entropy_cost) == (1.5e-5, 2e-3)
    assert (run.model.memory_size, run.model.compressed_size) == (64, 64)
    assert (run.train.discount, run.train.baseline_cost, run.train.optimiser) == (0.99, 0.5, "rmsprop")
    assert run.agent == AgentConfig()
    assert run.task == TaskConfig()
    assert AgentRun.from_preset("rooms-txl").memory.compressed_sizes == (0,) * 4
    with pytest.raises(ValueError, match="expected an agent's preset"):
        AgentRun.from_preset("enwik8")
    assert LearnConfig().reward == "scaled"


def test_configurations_of_version_0_1_still_load():
    """The number of environments was called `lanes`."""
    assert AgentRun.from_tables({"task": {"lanes": 6}, "train": {"batch": 6}}).task.envs == 6
    with pytest.raises(ValueError, match="task field='rooms'"):
        AgentRun.from_tables({"task": {"rooms": 2}})
