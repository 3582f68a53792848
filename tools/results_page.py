"""Bring docs/results.md and the README's table up to date with what `compressive experiment` wrote.

    python tools/results_page.py            # after an experiment
    python tools/results_page.py --check    # exit code 1 if something would change

In docs/results.md, `<!-- status -->` begins the table of all experiments, and `<!-- result NAME SCALE -->` the picture,
the table and the verdicts of one; `<!-- end -->` ends either. The README's table is that under "At a glance".
"""

import argparse
import json
import re
import sys
from pathlib import Path

from compressive.experiments import EXPERIMENTS, load
from compressive.experiments.experiment import SCALES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("experiments/results")


def status(root: Path) -> str:
    """Return the table of all experiments: what was run at which scale, and what came out."""
    lines = [f"| experiment | the paper's claim | {' | '.join(SCALES)} |", "|---|---|" + "---|" * len(SCALES)]
    for name in EXPERIMENTS:
        experiment = load(name)
        cells = [_outcome(root, name, scale) for scale in SCALES]
        lines.append(f"| `{name}` | {experiment.source}: {experiment.claim} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _outcome(root: Path, name: str, scale: str) -> str:
    path = root / RESULTS / name / f"{scale}.json"
    if not path.exists():
        return "not run"
    found = json.loads(path.read_text("utf-8"))
    words = [verdict.rstrip(".").split(": ")[-1] for verdict in found["verdicts"]]
    open_ones = sum(word not in ("lower", "higher") for word in words)
    said = "inconclusive" if open_ones == len(words) else f"{len(words) - open_ones} of {len(words)} beyond the spread"
    partly = "" if found["complete"] else ", part of the runs"
    device = (found["rows"][0]["measured"]["gpu"] or "CPU").removeprefix("NVIDIA ")
    return f"{said} ([{device}, {len(found['seeds'])} seeds{partly}](../{RESULTS}/{name}/{scale}.json))"


def result(root: Path, name: str, scale: str) -> str:
    """Return the picture, the table and the verdicts of one experiment."""
    folder = f"../{RESULTS}/{name}"
    page = (root / RESULTS / name / f"{scale}.md").read_text("utf-8")
    table, verdicts = (re.search(rf"(?:^{re.escape(mark)}.*\n)+", page, re.MULTILINE) for mark in ("| ", "- "))
    assert table is not None
    assert verdicts is not None
    return f"![{name} at scale {scale}]({folder}/{scale}.png)\n\n{table[0]}\n{verdicts[0].rstrip()}"


def page(root: Path) -> str:
    """Return docs/results.md with its generated parts up to date."""

    def made(match: re.Match[str]) -> str:
        what = match[1].split()
        body = status(root) if what == ["status"] else result(root, *what[1:])
        return f"<!-- {match[1]} -->\n\n{body}\n\n<!-- end -->"

    text = (root / "docs" / "results.md").read_text("utf-8")
    return re.sub(r"<!-- (status|result \S+ \S+) -->.*?<!-- end -->", made, text, flags=re.DOTALL)


def readme(root: Path) -> str:
    """Return README.md with the table of docs/results.md, whose links are turned."""
    (table,) = re.findall(r"^## At a glance\n(?:[^|\n].*\n|\n)*((?:\|.*\n)+)", page(root), re.MULTILINE)
    table = re.sub(r"\]\((?!http)([^)]+)\)", lambda link: f"]({_from_root(link[1])})", table)
    text = (root / "README.md").read_text("utf-8")
    before, after = re.split(r"(?<=^## Results\n)", text, maxsplit=1, flags=re.MULTILINE)
    return before + re.sub(r"(?:^\|.*\n)+", lambda _: table, after, count=1, flags=re.MULTILINE)


def _from_root(target: str) -> str:
    return target.removeprefix("../") if target.startswith("../") else f"docs/{target}"


def main() -> int:
    """Write both files, or say which would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    old = 0
    for name, made in (("docs/results.md", page), ("README.md", readme)):
        text = made(ROOT)
        if text != (ROOT / name).read_text("utf-8"):
            print(f"{name} {'is out of date: python tools/results_page.py' if check else 'written'}")
            old += 1
            if not check:
                (ROOT / name).write_text(text, "utf-8")
    return int(check and old > 0)


if __name__ == "__main__":
    sys.exit(main())
