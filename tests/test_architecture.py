"""Rules about imports between the rooms of the package: no cycle, a plain model, one dispatcher.

A room is a top-level package or module of `compressive`. Imports count wherever they stand: at the top of a module,
inside a function or under TYPE_CHECKING.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "compressive"


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Return every module of the package by its dotted name below `compressive`, except the package's own two files."""
    names = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if parts in (("__init__",), ("__main__",)):
            continue
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(code: str, module: str, is_package: bool = False) -> set[str]:
    """Return what the code of `compressive.<module>` imports of the package, as dotted names below `compressive`.

    `from compressive.a import b` gives `a.b`, whether b is a module or a name in a.
    """
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["compressive", *module.split(".")]
                package = package[: len(package) - node.level + int(is_package)]
                base = ".".join([*package, *filter(None, [base])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name.removeprefix("compressive.") for name in found if name.startswith("compressive.")}


def room(name: str) -> str:
    """Return the room of a dotted name below `compressive`."""
    return name.split(".")[0]


def graph() -> dict[str, set[str]]:
    """Return for every room the rooms that it imports, itself excluded."""
    names = modules()
    rooms = {room(name) for name in names}
    edges: dict[str, set[str]] = {name: set() for name in rooms}
    for name, path in names.items():
        used = {room(other) for other in imports(path.read_text("utf-8"), name, path.name == "__init__.py")}
        edges[room(name)] |= (used & rooms) - {room(name)}
    return edges


def cycle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a cycle of the graph as a list that begins and ends with the same node, or an empty list."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return []

    for start in sorted(edges):
        if found := visit(start, []):
            return found
    return []


def test_rooms_form_no_cycle():
    found = cycle(graph())
    assert not found, f"rooms import each other in a circle: {' -> '.join(found)}"


def test_a_made_up_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"a"}}) == ["a", "a"]


def test_imports_are_found_wherever_they_stand():
    code = """
import compressive.data.corpus
from compressive.config import ModelConfig
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from compressive.kernels import dispatch
def late():
    from compressive.rl.env import rooms
    from . import neighbour
    from ..runtime import pick_device
"""
    assert imports(code, "training.loop") == {
        "data.corpus", "config.ModelConfig", "kernels.dispatch", "rl.env.rooms", "training.neighbour",
        "runtime.pick_device",
    }  # fmt: skip
    assert imports("from .loop import train", "training", is_package=True) == {"training.loop.train"}


def test_the_graph_is_that_of_the_package():
    edges = graph()
    assert {"cli", "config", "data", "evaluation", "kernels", "model", "rl", "runs", "training"} <= set(edges)
    assert "training" in edges["cli"]
    assert "config" in edges["model"]


@pytest.mark.parametrize("name", [name for name in modules() if room(name) == "model"])
def test_the_model_imports_only_config_and_the_dispatcher(name):
    path = modules()[name]
    used = {
        other
        for other in imports(path.read_text("utf-8"), name, path.name == "__init__.py")
        if room(other) not in ("model", "config") and not f"{other}.".startswith("kernels.dispatch.")
    }
    assert not used, f"compressive.{name} imports {', '.join(sorted(used))}"


@pytest.mark.parametrize("name", [name for name in modules() if room(name) == "kernels"])
def test_kernels_import_nothing_of_the_package_but_config(name):
    path = modules()[name]
    used = {
        other
        for other in imports(path.read_text("utf-8"), name, path.name == "__init__.py")
        if room(other) not in ("kernels", "config")
    }
    assert not used, f"compressive.{name} imports {', '.join(sorted(used))}"


@pytest.mark.parametrize("name", [name for name in modules() if room(name) != "kernels"])
def test_only_kernels_know_of_triton(name):
    code = modules()[name].read_text("utf-8")
    assert "HAS_TRITON" not in code, f"compressive.{name} mentions HAS_TRITON"
    assert not re.search(r"^\s*(import|from) triton\b|import_module\(.triton", code, re.MULTILINE)


def test_the_layers_of_the_documents_hold():
    """A room imports only rooms of lower lines in the graph of docs/architecture.md."""
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text("utf-8")
    (drawn,) = re.findall(r"lower lines:\n\n```\n(.*?)```", page, re.DOTALL)
    line = {name: number for number, names in enumerate(drawn.splitlines()) for name in names.split()}
    edges = graph()
    assert set(line) == set(edges)
    upwards = [f"{name} -> {used}" for name in edges for used in edges[name] if line[used] <= line[name]]
    assert not upwards, ", ".join(upwards)


def test_other_rules_between_rooms():
    """Data knows nothing of speech models, training nothing of agents, evaluation nothing of the command line."""
    edges = graph()
    assert "speech" not in edges["data"]
    assert "rl" not in edges["training"]
    assert "cli" not in edges["evaluation"]
    assert not [name for name, used in edges.items() if "cli" in used]
