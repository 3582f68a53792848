"""Programs in a fork of a warm Python behave as those in a new one, and the real entry points start."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from warm_python import interpreter

from compressive.config import preset_names

pytestmark = pytest.mark.slow

SHOW = "import os, sys; print(sys.argv, sys.path[:2], __name__, os.getcwd(), os.environ['A'], sys.stdin.read())"


def both(*words: str, **options) -> list[subprocess.CompletedProcess[str]]:
    """What a program gives in a new Python and in a warm one."""
    starts = ([sys.executable], interpreter())
    return [subprocess.run([*start, *words], capture_output=True, text=True, **options) for start in starts]


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_arguments_streams_folder_and_environment_are_its_own(kind, tmp_path):
    (tmp_path / "shown.py").write_text(SHOW)
    start = {"-c": ["-c", SHOW], "-m": ["-m", "shown"], "script": [str(tmp_path / "shown.py")]}[kind]
    environment = os.environ | {"A": "ä", "PYTHONPATH": "/nowhere"}
    new, warm = both(*start, "one", "two words", cwd=tmp_path, env=environment, input="said")
    assert new.returncode == 0, new.stderr
    assert (warm.stdout, warm.stderr, warm.returncode) == (new.stdout, new.stderr, 0)


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print('out'); print('error', file=sys.stderr); sys.exit(3)",
        "import sys; sys.exit('said why')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os._exit(4)",
        "import atexit, threading as t; atexit.register(print, 'last'); t.Thread(target=print, args=['first']).start()",
        "import torch; print(torch.get_num_threads(), torch.get_default_dtype())",
    ],
)
def test_it_ends_as_a_new_one_does(code):
    new, warm = both("-c", code, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (warm.stdout, warm.stderr, warm.returncode) == (new.stdout, new.stderr, new.returncode)


def test_every_program_has_a_seed_of_its_own():
    code = "import numpy, random, torch; print(torch.initial_seed(), numpy.random.rand(), random.random())"
    seen = [subprocess.check_output([*interpreter(), "-c", code]).split() for _ in range(2)]
    assert not set(seen[0]) & set(seen[1])


def test_an_error_has_its_traceback_and_code_1():
    new, warm = both("-c", "1 / 0")
    assert warm.returncode == new.returncode == 1
    assert warm.stderr.startswith("Traceback")
    assert warm.stderr.splitlines()[-2:] == new.stderr.splitlines()[-2:]


def test_nothing_of_the_package_is_there_before_its_program():
    code = "import sys; print([name for name in sys.modules if name.split('.')[0] == 'compressive'])"
    assert subprocess.run([*interpreter(), "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_signals_reach_the_program_and_a_killed_client_takes_it_along():
    code = "import os, signal, time; signal.signal(15, lambda *_: os._exit(7)); print(os.getpid(), flush=True); "
    with subprocess.Popen([*interpreter(), "-c", code + "time.sleep(240)"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(240) == 7
    with subprocess.Popen([*interpreter(), "-c", code + "time.sleep(240)"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        program = Path("/proc", process.stdout.readline().decode().strip())
        process.kill()
        assert process.stdout.read() == b""  # the program held the other end of the pipe
    deadline = time.monotonic() + 240
    while program.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "start", [[sys.executable, "-m", "compressive"], [sysconfig.get_path("scripts") + "/compressive"]]
)
def test_the_real_entry_points_start(start, tmp_path):
    listed = subprocess.run([*start, "config"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == preset_names()
    refused = subprocess.run([*start, "generate", "nothing"], cwd=tmp_path, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("compressive generate: nothing is not a run")
