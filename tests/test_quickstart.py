"""The newcomer's path: the very commands of `make quickstart`, on tiny books."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from training_helpers import text
from warm_python import interpreter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def quickstart_commands(steps: int) -> list[str]:
    """What make would run, less the making of the environment."""
    shown = subprocess.run(
        ["make", "-n", "quickstart", f"STEPS={steps}", "BIN=BIN"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line.removeprefix("BIN/compressive ") for line in shown.stdout.splitlines() if "BIN/compressive" in line]


def run_all(commands: list[str], folder: Path) -> list[str]:
    printed = []
    for command in commands:
        result = subprocess.run(
            f"{shlex.join(interpreter())} -m compressive {command}", shell=True, cwd=folder, capture_output=True,
            text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        printed.append(result.stdout)
    return printed


def test_the_quickstart_s_commands_work(tmp_path):
    for name, words in (("train", 4_000), ("valid", 800), ("test", 800)):
        (tmp_path / "books" / name).mkdir(parents=True)
        (tmp_path / "books" / name / "1.txt").write_bytes(text(words, len(name)))
    shutil.copytree(ROOT / "books" / "prompts", tmp_path / "books" / "prompts")
    commands = quickstart_commands(10)
    assert [command.split()[0] for command in commands] == ["data", "train", "evaluate", "generate", "analyze"]
    printed = run_all(commands, tmp_path)
    assert "step 10/10" in printed[1]
    assert "bits per character" in printed[2]
    assert len(printed[3]) > 100
    assert "xz -9e of the same text" in printed[4]
    assert "compressed memory is worth" in printed[4]
    assert (tmp_path / "runs" / "quickstart" / "report.html").stat().st_size > 50_000


@pytest.mark.soak
def test_the_quickstart_beats_xz(tmp_path):
    """On the real books, at its full length: minutes."""
    (tmp_path / "books").symlink_to(ROOT / "books")
    commands = quickstart_commands(int(os.environ.get("STEPS", "2000")))
    run_all(commands, tmp_path)
    figures = json.loads((tmp_path / "runs" / "quickstart" / "report.json").read_text())
    assert figures["test"]["bits"] < figures["test"]["xz"]
