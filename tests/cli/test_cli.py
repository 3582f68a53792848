"""The command table: fast help, clear errors, presets printed as valid TOML."""

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import warnings

import pytest
from training_helpers import command

import compressive
from compressive.cli import COMMANDS, guarded, main
from compressive.config import RunConfig, preset_names
from compressive.config.agent import AgentRun
from compressive.config.checks import warn_once


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
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == preset_names()
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


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"compressive {compressive.__version__}\n"
    assert importlib.metadata.version("compressive") == compressive.__version__


@pytest.mark.parametrize("words", [["data"], ["data", "--help"], ["data", "pg19"], ["rl", "-h"]])
def test_the_beginning_of_a_command_lists_its_commands(words, capsys):
    assert main(words) == 0
    shown, group = capsys.readouterr().out, " ".join(word for word in words if not word.startswith("-"))
    assert all((f"compressive {name} " in shown) == name.startswith(group) for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "compressive: no command 'trian' (did you mean train?)"),
        (["evalute", "runs/x"], "compressive: no command 'evalute runs/x' (did you mean evaluate?)"),
        (["data", "prepear", "text"], "no command 'data prepear text' (did you mean data prepare?)"),
        (["train", "enwik"], "compressive train: preset='enwik': expected a preset as the first argument"),
        (["train", "enwik"], "(did you mean enwik8?)"),
        (["config", "enwik9"], "compressive config: preset='enwik9' does not exist (did you mean enwik8?)"),
        (["train", "rooms-tiny"], "preset='rooms-tiny' is an agent's: compressive rl train rooms-tiny"),
        (["rl", "train", "quickstart"], "preset='quickstart' is a model's: compressive train quickstart"),
        (["train", "--config", "no.toml"], "no.toml does not exist; compressive config PRESET > no.toml writes one"),
        (["train", "quickstart", "--config", "a.toml"], "preset 'quickstart' and --config a.toml: give one of them"),
        (["train", "--resume", "no-run"], "no-run is not a run: it holds no config.json"),
        (
            ["train", "quickstart", "--train.stps", "5"],
            "unrecognized options: --train.stps, 5 (did you mean --train.steps?)",
        ),
        (
            ["train", "quickstart", "--train.steps", "five"],
            "--train.steps='five': expected a whole number; see compressive train quickstart --help",
        ),
        (["train", "quickstart", "--train.learning-rate", "x"], "--train.learning-rate='x': expected a number; see"),
        (
            ["train", "quickstart", "--model.memory-size", "text"],
            "--model.memory-size='text': expected a whole number or several, one per layer; see",
        ),
        (["train", "quickstart", "--train.micro-batch", "x"], "='x': expected auto or a whole number; see"),
        (["generate", "enwik8-small", "--prompt", "a", "--seed", "b"], "--seed='b': expected"),
        (["evaluate"], "compressive evaluate: missing RUN; see compressive evaluate --help"),
        (["analyze", "x"], "missing {memory,attention,layers,report}; see compressive analyze --help"),
        (["train", "quickstart", "--train.step", "5"], "(did you mean --train.steps?)"),
        (["train", "quickstart", "--train.batchsize", "5"], "(did you mean --train.batch?)"),
        (["generate", "enwik8-smal"], "holds no config.json (did you mean enwik8-small?); train one:"),
        (["generate", "rooms"], "compressive generate: rooms is an agent's run: use compressive rl evaluate rooms,"),
        (["rl", "evaluate", "enwik8-small"], "evaluate: enwik8-small is no agent's run, but one of text or audio: use"),
        (["config", "nothing"], "preset='nothing' does not exist; compressive config lists all"),
        (["compare"], "0 runs given: expected at least 2 different ones"),
        (["evaluate", "x", "--split", "foo"], "invalid choice 'foo' for argument '--split'"),
        (["bench", "--steps"], "missing value for argument '--steps'"),
    ],
)
def test_a_wrong_command_gets_one_line_with_what_was_meant(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_presets_have_a_line_each_and_json(capsys):
    assert main(["config", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert list(about) == preset_names()
    assert all(line.endswith(".") and 20 < len(line) < 140 for line in about.values())
    assert main(["config", "enwik8", "--json"]) == 0
    assert RunConfig.from_tables(json.loads(capsys.readouterr().out)) == RunConfig.from_preset("enwik8")


INTERRUPTED_IMPORT = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell inherit that it is ignored
real = builtins.__import__
def interrupt(name, *more):
    if name == {name!r}:
        builtins.__import__ = real
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *more)
builtins.__import__ = interrupt
sys.argv = ["compressive", "evaluate", "nowhere"]
from compressive.__main__ import command
command()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tyro", "torch"])
def test_ctrl_c_within_imports_is_one_line(name):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT.format(name=name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "compressive: interrupted\n")


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_waiting_threads_spin_briefly_unless_the_user_has_a_say(own, expected):
    code = (
        "import os, sys; sys.argv[1:] = ['--version']; from compressive.__main__ import command\n"
        "try: command()\n"
        "finally: print(os.environ.get('GOMP_SPINCOUNT')); assert 'torch' not in sys.modules"
    )
    bare = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=bare | own, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(expected)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(("own", "kept"), [({}, True), ({"MALLOC_TOP_PAD_": "0"}, False)])
def test_freed_memory_is_kept_for_the_next_tensors_unless_the_user_has_a_say(own, kept):
    """Memory that is kept needs no page faults when it is written again, in child processes neither."""
    measure = """if True:
        import ctypes, resource
        libc, size = ctypes.CDLL(None), 20 * 2**20
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            block = libc.malloc(size)
            ctypes.memset(block, 1, size)
            libc.free(block)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print(faults(), faults(), flush=True)"""
    code = f"""if True:
        import subprocess, sys
        from compressive.__main__ import keep_freed_memory
        keep_freed_memory()
        exec({measure!r})
        subprocess.run([sys.executable, "-c", {measure!r}], check=True)"""
    bare = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", code], env=bare | own, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        first, again = map(int, line.split())
        assert (again < first / 8) is kept
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("largest", "calls"),
    [(2**31, [(-3, 2**31 - 1), (-1, 2**31 - 1)]), (2**25, [(-3, 2**31 - 1), (-3, 2**25), (-1, 2**31 - 1)])],
)
def test_older_glibc_takes_a_lower_threshold(monkeypatch, largest, calls):
    made = []

    class Glibc:
        def mallopt(self, name, value):
            made.append((name, value))
            return name != entry.M_MMAP_THRESHOLD or value <= largest

    entry = importlib.import_module("compressive.__main__")
    monkeypatch.setattr(entry.ctypes, "CDLL", lambda _: Glibc())
    monkeypatch.setattr(entry.sys, "platform", "linux")
    monkeypatch.setattr(entry.os, "environ", {})
    entry.keep_freed_memory()
    assert made == calls
    assert entry.os.environ["MALLOC_MMAP_THRESHOLD_"] == str(min(largest, 2**31 - 1))


def test_warnings_are_lines_of_ours(tmp_path, monkeypatch, capsys):
    """Also those raised while arguments are parsed; Python's own form names a file of ours and a line of code."""
    monkeypatch.chdir(tmp_path)
    warn_once.cache_clear()
    words = ["train", "quickstart", "--data.corpus", "missing", "--model.compression-rate", "3", "--out", "run"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "warning: window=64 is not a multiple of compression_rate: the newest memories evicted by each window are "
        "dropped uncompressed, 1 in every layer (compression_rate=3)"
    )


def test_completion_knows_commands_presets_and_flags(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "complete.sh").write_text(capsys.readouterr().out)

    def complete(*words):
        listed = " ".join(f"'{word}'" for word in ("compressive", *words))
        code = (
            f"source complete.sh; COMP_WORDS=({listed}); COMP_CWORD={len(words)}; _compressive; echo ${{COMPREPLY[*]}}"
        )
        return subprocess.run(
            ["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.split()

    assert complete("") == list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    assert complete("data", "") == ["prepare", "pg19"]
    assert complete("data", "pg19", "v") == ["verify"]
    assert complete("train", "enwik8-b") == ["enwik8-base", "enwik8-base-txl", "enwik8-best"]
    assert complete("train", "enwik8", "--train.st") == ["--train.steps"]
    assert complete("rl", "train", "rooms-t") == ["rooms-tiny", "rooms-txl"]
    assert complete("evaluate", "comp") == ["complete.sh"]
    assert "bashcompinit" in (main(["completion", "zsh"]), capsys.readouterr().out)[1]
