"""`examples/slurm.sh` with stand-ins for Slurm's commands: two tasks train, stop, and go on when queued again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_helpers import tiny_corpus

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "slurm.sh"
SRUN = """#!{python}
import os, signal, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--kill")]
tasks = []
for rank in range(2):
    own = os.environ | {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2"}}
    tasks.append(subprocess.Popen(words, env=own))
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
assert os.environ["SRUN_CPUS_PER_TASK"] == "3"
open("srun.pid", "w").write(str(os.getpid()))
codes = [task.wait() for task in tasks]
sys.exit(max(codes))
"""
SCONTROL = """#!/bin/sh
echo "$@" >> scontrol.log
[ "$1" = show ] && echo 127.0.0.1
exit 0
"""


@pytest.mark.slow
def test_a_job_that_is_stopped_is_queued_again_and_goes_on(tmp_path):
    tiny_corpus(tmp_path / "data")
    tools = tmp_path / "bin"
    tools.mkdir()
    python = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    commands = {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL, "python": python}
    for name, text in commands.items():
        (tools / name).write_text(text, "utf-8")
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),  # also the port where they meet
        "SLURM_JOB_NODELIST": "here",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",  # of the shell that called sbatch: not where the tasks meet
        "OMP_NUM_THREADS": "1",
    }
    small = (
        "--model.n-layers 1 --model.d-model 16 --model.n-heads 2 --model.d-ff 16 --model.window 8 --model.memory-size 8"
    )
    small += (
        " --model.compressed-size 8 --train.batch 2 --train.eval-every 0 --train.sample-every 0 --train.log-every 5"
    )
    small += " --train.steps 300"
    words = ["bash", str(SCRIPT), "quickstart", "--data.corpus", "tiny", "--out", "run", *small.split()]
    metrics = tmp_path / "run" / "metrics.jsonl"

    with (tmp_path / "first.log").open("w") as log:
        job = subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not (metrics.is_file() and metrics.stat().st_size):
                assert job.poll() is None, (tmp_path / "first.log").read_text("utf-8")
                assert time.monotonic() < deadline
                time.sleep(0.1)
            # Slurm signals the tasks once (a second signal would end them unsaved); with preemption the script, too.
            os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
            os.kill(job.pid, signal.SIGTERM)
            assert job.wait(timeout=120) == 75, (tmp_path / "first.log").read_text("utf-8")
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert f"requeue {os.getpid()}" in (tmp_path / "scontrol.log").read_text("utf-8")

    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", from step " in done.stdout
    assert "done: 300 steps" in done.stdout


def test_it_says_how_it_is_started(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(["bash", SCRIPT, "pg19"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "start it with sbatch" in done.stderr
