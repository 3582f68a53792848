"""The scripts of examples/ run as their docstrings say, and what they print is what they promise."""

import math
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from warm_python import interpreter

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, *arguments: str, folder: Path) -> str:
    result = subprocess.run(
        [*interpreter(), EXAMPLES / name, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_own_data_is_learnt(tmp_path):
    printed = run("own_data.py", "--steps", "80", "--out", "out", folder=tmp_path)
    (bits,) = re.findall(r"^test: ([\d.]+) bits per character after 80 steps", printed, re.MULTILINE)
    book = sorted((EXAMPLES.parent / "books" / "train").glob("*.txt"))[0].read_bytes()
    shares = [count / len(book) for count in Counter(book).values()]
    assert float(bits) < sum(-share * math.log2(share) for share in shares) - 0.1  # better than letter frequencies
    assert (tmp_path / "out" / "run" / "config.json").is_file()
    assert (tmp_path / "out" / "data" / "mine" / "train.bin").is_file()


def test_the_trunk_remembers_in_another_model(tmp_path):
    printed = run("trunk_in_your_model.py", "--steps", "60", folder=tmp_path)
    ((first, last),) = re.findall(r"^loss ([\d.]+) to ([\d.]+)$", printed, re.MULTILINE)
    assert float(last) < float(first) / 4
    (shares,) = re.findall(r"^accuracy at the end of each window: (.*)$", printed, re.MULTILINE)
    accuracies = [int(share.rstrip("%")) for share in shares.split(", ")]
    assert len(accuracies) == 4
    assert min(accuracies) > 80  # chance is 25


def test_a_compressor_of_one_s_own_trains(tmp_path):
    printed = run("custom_compressor.py", "--steps", "60", folder=tmp_path)
    ((first, last),) = re.findall(r"^loss ([\d.]+) to ([\d.]+) nats per byte", printed, re.MULTILINE)
    assert float(last) < float(first) - 0.8
    assert re.search(r"^trained by the compression loss alone: 8320 parameters$", printed, re.MULTILINE)
    assert re.search(r"^compression loss \d", printed, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_opens_with_its_command(path):
    lines = path.read_text("utf-8").splitlines()
    assert lines[2] == f"python examples/{path.name}"
