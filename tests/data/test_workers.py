"""The process pool: results in order, a bounded queue, and no process left behind."""

import os
import subprocess
import sys
import time

import pytest
from data_helpers import die, has_begun, negative, note_begin

from compressive.data.workers import AHEAD, cores, in_order

# Worker processes must be able to import the functions they run.
SCRIPT = """
import os, sys, time
from pathlib import Path
from compressive.data.workers import in_order

def work(job):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(0.05)
    return job

if __name__ == "__main__":
    for done in in_order(work, iter(int, 1), 2):
        pass
"""


def test_results_are_in_order_and_the_queue_is_bounded():
    taken = []

    def jobs():
        for job in (*range(7), *range(8, 40)):
            taken.append(job)
            yield job

    results = in_order(negative, jobs(), 2)
    assert next(results) == 0
    assert len(taken) == 2 * AHEAD
    assert [0, *results] == [-job for job in taken]
    assert len(taken) == 39


def test_each_process_calls_begin_first():
    assert list(in_order(has_begun, range(4), 2, note_begin)) == ["yes"] * 4
    assert "BEGUN" not in os.environ


def test_an_error_is_raised_in_place_of_its_result():
    results = in_order(negative, range(40), 2)
    assert [next(results) for _ in range(7)] == [-job for job in range(7)]
    with pytest.raises(ValueError, match="job 7 cannot be done"):
        next(results)


def test_a_dead_process_is_reported():
    with pytest.raises(ChildProcessError, match=r"one of 2 processes died.*--workers 1"):
        list(in_order(die, range(4), 2))


def test_processes_end_when_the_iterator_is_closed():
    results = in_order(negative, iter(int, 1), 2)
    next(results)
    results.close()
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True)
    assert "spawn_main" not in children.stdout


def alive(process):
    """Return whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_end_with_the_one_that_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "seen").mkdir()
    with subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path / "seen"]) as parent:
        deadline = time.monotonic() + 240
        while len(workers := [path.name for path in (tmp_path / "seen").iterdir()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.kill()
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_there_is_a_core():
    assert 1 <= cores() <= (os.cpu_count() or 1)
