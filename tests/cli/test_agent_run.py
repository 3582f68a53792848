"""Commands for text and audio, given an agent's run."""

import dataclasses
import json

import pytest
from training_helpers import command

from compressive.config.agent import AgentRun


@pytest.mark.parametrize("words", [["evaluate"], ["generate"], ["analyze", "memory"]])
def test_an_agents_run_points_to_the_commands_for_agents(tmp_path, words):
    config = dataclasses.asdict(AgentRun.from_preset("rooms-tiny"))
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "config.json").write_text(json.dumps(config), "utf-8")
    done = command(words[0], "agent", *words[1:], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"compressive {words[0]}: agent is an agent's run: use compressive rl evaluate agent")
    assert done.stderr.count("\n") == 1
