"""The script of `enwik8-best`: two runs, the second from the first, each gone on with after a crash; then scoring."""

import runpy
import subprocess
import sys

import pytest
from helpers import ROOT

from compressive.config import RunConfig


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Run the script with arguments; returns the commands that it would start, with codes to end with."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, codes=()):
        commands, ends = [], iter(codes)

        class Process:
            def __init__(self, command):
                commands.append(command)

            def wait(self):
                """End with a code; an exception is raised at first, as Ctrl-C does while a command saves."""
                code = next(ends, 0)
                if isinstance(code, type):
                    raise code
                return code

        monkeypatch.setattr(subprocess, "Popen", Process)
        monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
        monkeypatch.setattr(sys, "argv", ["enwik8_best.py", "--results", "results.json", *arguments])
        try:
            runpy.run_path(str(ROOT / "experiments" / "enwik8_best.py"), run_name="__main__")
        except SystemExit as end:
            return commands, end.code
        return commands, 0

    return run


def flag(command, name):
    """The value that counts: that of the last flag of a name."""
    return command[len(command) - 1 - command[::-1].index(name) + 1]


def test_the_second_run_starts_from_the_first_and_has_the_preset_s_memories(script):
    (first, second, ship), code = script(
        "--first-steps", "9", "--flags", "--train.steps 7 --train.seed 3 --model.dropout 0.1"
    )
    assert code == 0
    assert [flag(run, "--train.steps") for run in (first, second)] == ["9", "7"]
    assert flag(first, "--train.hold-steps") == "9"  # the rate never falls
    assert flag(first, "--model.memory-size") == "256"
    assert "--model.memory-size" not in second
    assert [flag(run, "--model.dropout") for run in (first, second)] == ["0", "0.1"]
    assert flag(second, "--from") == flag(first, "--out") == "runs/enwik8-best-first"
    assert [flag(run, "--train.seed") for run in (first, second)] == ["3", "3"]
    assert ship[1].endswith("ship.py")
    assert ship[2] == flag(second, "--out") == "runs/enwik8-best"
    assert flag(ship, "--results") == "results.json"
    assert flag(ship, "--out") == "runs/enwik8-best-release"


def test_a_model_that_is_there_already_is_refused_before_anything_is_trained(script, capsys):
    commands, code = script("--weights", str(ROOT / "weights" / "enwik8-best"))
    assert (commands, code) == ([], 2)
    assert "holds a model already; name another folder" in capsys.readouterr().err


def test_a_run_that_crashed_goes_on_as_often_as_asked(script):
    commands, code = script("--retries", "1", codes=[1, 0, 0])
    assert commands[0] == commands[1] != commands[2]
    assert all("--resume" in command for command in commands[:3])
    assert (len(commands), code) == (4, 0)
    commands, code = script("--retries", "1", codes=[1, 5])
    assert (len(commands), code) == (2, 5)
    commands, code = script("--retries", "-1", codes=[5])
    assert (len(commands), code) == (1, 5)


def test_a_run_that_was_interrupted_has_saved_and_does_not_go_on(script):
    commands, code = script("--retries", "3", codes=[KeyboardInterrupt, 75])
    assert (len(commands), code) == (1, 75)


def test_the_rate_of_the_preset_falls_to_zero_after_its_warm_up():
    train = RunConfig.from_preset("enwik8-best").train
    assert (train.decay, train.decay_steps, train.hold_steps, train.final_learning_rate) == ("linear", 0, 0, 0)
