"""Results files: one folder per name, files named by date and device, and references that exist."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

FILES = sorted(
    path for room in ("benchmarks", "experiments") for path in (ROOT / room / "results").rglob("*") if path.is_file()
)
SCALES = re.compile(r"(tiny|small|paper)\.(json|md|png)")
"""What `compressive experiment` writes: one result per scale, the last one; date and device are in the file."""
EXPERIMENTS = [path for path in FILES if SCALES.fullmatch(path.name)]
FILES = [path for path in FILES if path not in EXPERIMENTS]
NAME = re.compile(r"(?P<series>\d{4}-\d\d-\d\d-(?P<device>cpu|h200))(?:-(?P<number>[1-9])|-seed(?P<seed>\d))?\.json")
"""DATE-DEVICE.json; several of one day are all numbered, so that the newest sorts last; seeds are named as such."""
LOG = (ROOT / "docs" / "log.md").read_text("utf-8")
CITED = sorted(set(re.findall(r"(?:benchmarks|experiments)/results/[\w./-]+\.json", LOG)))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_a_results_file_is_named_by_date_and_device_and_says_what_it_is(path: Path) -> None:
    assert len(path.relative_to(ROOT).parts) == 4, "expected ROOM/results/NAME/DATE-DEVICE.json"
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", path.parent.name)
    assert NAME.fullmatch(path.name), "expected DATE-DEVICE.json"
    found = json.loads(path.read_text("utf-8"))
    assert isinstance(found["what"], str)
    tables = [found, *(value for value in found.values() if isinstance(value, dict))]
    assert any(table.get(key) for table in tables for key in ("command", "commands", "commit"))
    for commit in filter(None, (table.get("commit") for table in tables)):
        assert re.match(r"[0-9a-f]{7,12}\b", commit)
    date = path.name[:10]
    assert all(time.startswith(date) for time in times(tables))


@pytest.mark.parametrize("path", [path for path in EXPERIMENTS if path.suffix == ".json"], ids=shown)
def test_a_result_of_an_experiment_is_complete_and_has_its_table_and_its_picture(path: Path) -> None:
    found = json.loads(path.read_text("utf-8"))
    assert (found["experiment"], found["scale"]) == (path.parent.name, path.stem)
    assert found["complete"] is True
    assert re.match(r"[0-9a-f]{7,12}\b", found["commit"])
    assert found["hardware"]["torch"]
    assert {row["seed"] for row in found["rows"]} == set(found["seeds"])
    page = path.with_suffix(".md").read_text("utf-8")
    assert all(verdict in page for verdict in found["verdicts"])
    assert path.with_suffix(".png").is_file()
    assert [key for key in keys(found) if re.search(r"\s", key)] == []


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_no_key_of_a_results_file_has_a_space(path: Path) -> None:
    assert [key for key in keys(json.loads(path.read_text("utf-8"))) if re.search(r"\s", key)] == []


def keys(content: Any) -> Iterator[str]:
    """Every key of a JSON document."""
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from keys(value)
    if isinstance(content, dict):
        yield from content


def times(tables: list[dict[str, Any]]) -> list[str]:
    """The times that a results file was written at, where it holds any."""
    return [table["time"] for table in tables if isinstance(table.get("time"), str)]


def test_several_files_of_a_day_are_numbered_in_the_order_of_their_times() -> None:
    days = defaultdict(list)
    for path in FILES:
        name = NAME.fullmatch(path.name)
        assert name is not None
        if name["seed"] is None:
            days[path.parent, name["series"]].append(path)
    for files in days.values():
        if len(files) > 1:
            assert [path.stem[-2:] for path in files] == [f"-{number}" for number in range(1, len(files) + 1)]
            written = [json.loads(path.read_text("utf-8")).get("time") for path in files]
            assert (known := [time for time in written if time]) == sorted(known)
        else:
            assert NAME.fullmatch(files[0].name)["number"] is None  # type: ignore[index]


def test_a_superseded_file_is_kept_only_where_the_log_cites_it() -> None:
    newest: dict[tuple[Path, str], Path] = {}
    for path in FILES:
        name = NAME.fullmatch(path.name)
        assert name is not None
        if name["seed"] is None:
            newest[path.parent, name["device"]] = path
    superseded = [shown(path) for path in FILES if "seed" not in path.name and path not in newest.values()]
    assert superseded
    assert [path for path in superseded if path not in CITED] == []


@pytest.mark.parametrize("path", CITED)
def test_every_results_file_that_the_log_cites_exists(path: str) -> None:
    assert (ROOT / path).is_file()
