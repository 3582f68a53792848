"""The command table: fast help, clear errors, presets printed as valid TOML."""

import os
import subprocess
import sys
import tomllib

import pytest
from training_helpers import command

from compressive.cli import COMMANDS, guarded, main
from compressive.config import RunConfig, preset_names
from compressive.config.agent import AgentRun


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_help_lists_every_command(words, capsys):
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(f"compressive {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_needs_no_torch(name):
    code = (
        "import sys; from compressive.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *name.split(), "--help"], capture_output=True, text=True, check=True
    )
    assert f"compressive {name}" in result.stdout
    assert len(result.stdout) > 300


def test_an_unknown_command_is_refused(capsys):
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


def test_errors_that_a_user_can_fix_are_one_line(capsys):
    def fail():
        raise FileNotFoundError("no such corpus; prepare it")

    assert guarded(fail, "compressive x") == 2
    assert capsys.readouterr().err == "compressive x: no such corpus; prepare it\n"

    def bug():
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError):
        guarded(bug, "compressive x")


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_shown_in_full_and_can_be_read_back(name, capsys):
    assert main(["config", name]) == 0
    kind = AgentRun if name in preset_names("task") else RunConfig
    assert kind.from_tables(tomllib.loads(capsys.readouterr().out)) == kind.from_preset(name)


def test_presets_are_listed(capsys):
    assert main(["config"]) == 0
    assert capsys.readouterr().out.split() == preset_names()
    assert main(["config", "enwik9"]) == 2


def test_a_closed_pipe_is_not_an_error():
    result = subprocess.run(
        f"{sys.executable} -m compressive config enwik8 | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "[model]\n"
    assert result.stderr == ""


@pytest.mark.parametrize("rank", [{}, {"RANK": "1"}], ids=["alone", "one of several"])
def test_under_torchrun_the_process_exits_without_interpreter_shutdown(rank):
    """The process exits without shutdown, so gloo's threads cannot abort it; exit code and output are kept."""
    code = "import atexit; from compressive.cli import leave; atexit.register(print, 'down'); print('said'); leave(3)"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | rank
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (found.returncode, found.stdout) == (3, "said\n" if rank else "said\ndown\n")


def test_unknown_tables_and_fields_are_refused():
    with pytest.raises(ValueError, match="table='modle': expected one of model, data, train"):
        RunConfig.from_tables({"modle": {}})
    with pytest.raises(ValueError, match="train field='step': expected one of steps, batch"):
        RunConfig.from_tables({"train": {"step": 3}})


@pytest.mark.slow
def test_a_missing_run_is_refused(tmp_path):
    for words in (["evaluate"], ["generate"], ["analyze"]):
        more = ["memory"] if words == ["analyze"] else []
        result = command(*words, tmp_path / "nothing", *more)
        assert result.returncode == 2
        assert "is not a run: it holds no config.json; train one: compressive train PRESET --out" in result.stderr
