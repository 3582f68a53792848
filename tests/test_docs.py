"""The README and docs/paper.md are kept true: the example runs, the tree is whole, every named place exists."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compressive.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAPER = (ROOT / "docs" / "paper.md").read_text("utf-8")


def test_the_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["memory"].compressed[0].any()
    assert all(p.grad is not None for p in names["model"].parameters())


COMMANDS = re.findall(r"^compressive (.+?)(?:\s+#.*)?$|`compressive (.+?)`", README, re.MULTILINE)


@pytest.mark.parametrize("line", [a or b for a, b in COMMANDS])
def test_the_readme_s_commands_are_understood(line, tmp_path, monkeypatch):
    """Every word of them is parsed and checked; what they would do is done by other tests, on less."""
    done = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compressive.training.loop.train", lambda run, world: done.append(run) or 0)
    monkeypatch.setattr("compressive.rl.loop.train", lambda run: done.append(run) or 0)
    for module, function in (
        ("evaluate", "evaluate"),
        ("generate", "generate"),
        ("analyze", "analyze"),
        ("data", "_prepare"),
        ("export", "export"),
        ("bench", "bench"),
        ("pg19.build", "build"),
        ("pg19.verify", "verify"),
        ("pg19.stats", "stats"),
        ("pg19.topics", "topics"),
        ("rl.evaluate", "evaluate"),
        ("rl.watch", "watch"),
    ):
        monkeypatch.setattr(f"compressive.cli.{module}.{function}", lambda options, *_: done.append(options) or 0)
    assert main(shlex.split(line)) == 0
    assert len(done) == (0 if line.startswith("config") else 1)


def test_the_readme_has_commands():
    assert len(COMMANDS) >= 10


def test_the_readme_s_quickstart_figures_are_those_of_its_results():
    path = ROOT / "experiments" / "results" / "quickstart" / "2026-11-15-cpu.json"
    result = json.loads(path.read_text("utf-8"))["report"]
    test, worth = result["test"], result["compressed_memory_is_worth"]
    row = f"| **{test['bits']:.3f}** | {test['xz']:.3f} | {test['xz_after_training']:.3f} | "
    assert row + f"{worth['mean']:.3f} ± {worth['error']:.3f} |" in README


def played(file, who):
    """Return, choices and right ones of a player, as the tables show them."""
    row = json.loads((ROOT / "experiments" / "results" / file).read_text("utf-8"))["played"][f"{who}, delay 0"]
    per_episode, right = row["choices"] / row["episodes"], row["choice_accuracy"] * 100
    return f"{row['return']:.1f} ± {row['margin of 95 %']:.1f} | {per_episode:.1f} | {right:.1f} %"


def test_the_figures_of_the_agent_are_those_of_its_results():
    for shown, name in (("agent", "agent"), ("chance", "random"), ("oracle", "oracle")):
        assert f"| {shown} | {played('rooms-tiny/2026-11-16-cpu-seed0.json', name)} |" in README
    page = (ROOT / "docs" / "agent.md").read_text("utf-8")
    for seed in range(5):
        assert f"| {seed} | {played(f'rooms-tiny/2026-11-16-cpu-seed{seed}.json', 'agent')} |" in page


def test_the_readme_tree_shows_every_module():
    (tree,) = re.findall(r"```\n(src/compressive/.*?)```", README, re.DOTALL)
    shown = sorted(re.findall(r"(?<= )(\w+\.py)\b", tree.split("books/")[0]))
    present = sorted(path.name for path in (ROOT / "src").rglob("*.py") if not path.name.startswith("__"))
    assert shown == present


@pytest.mark.parametrize(("path", "symbol"), sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAPER))))
def test_every_place_that_the_paper_s_table_names_exists(path, symbol):
    thing = importlib.import_module("compressive." + path.removesuffix(".py").replace("/", "."))
    for name in symbol.split("."):
        thing = getattr(thing, name)


def test_every_preset_is_in_the_paper_s_table():
    named = set(re.findall(r"`presets/([\w-]+\.toml)`", PAPER))
    assert named == {path.name for path in (ROOT / "src" / "compressive" / "presets").glob("*.toml")}


def test_every_algorithm_line_is_in_the_paper_s_table():
    for heading, lines in (("Algorithm 1", 12), ("Algorithm 2", 8)):
        section = PAPER.split(f"## {heading}")[1].split("\n## ")[0]
        rows = re.findall(r"^\| (\d+)(?:-(\d+))? \|", section, re.MULTILINE)
        covered = [n for first, last in rows for n in range(int(first), int(last or first) + 1)]
        assert covered == list(range(1, lines + 1))


def test_the_scaling_table_is_what_the_script_computes():
    result = subprocess.run(
        [sys.executable, ROOT / "experiments" / "scaling.py"], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() in (ROOT / "docs" / "scaling.md").read_text("utf-8")
