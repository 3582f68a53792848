"""Field docs in `help()`: the line beside or below a dataclass's field becomes part of the class's docstring."""

import ast
import functools
import inspect
import sys
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound=type)


def documented(cls: T) -> T:
    """Add an `Attributes` section to a class's docstring: each field with its type, and its doc line or comment."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    fields = _fields(file).get(cls.__name__, {}) if file is not None else {}
    if fields and cls.__doc__:
        lines = [f"    {name} ({kind}): {text}" for name, (kind, text) in fields.items() if text]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__), "", "Attributes:", *lines])
    return cls


@functools.cache
def _fields(file: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Type and doc of each field, by class: the string below it, as tools read it, or the comment on its line."""
    try:
        source = Path(file).read_text("utf-8")
    except OSError:  # compiled files alone
        return {}
    lines, found = source.encode().split(b"\n"), dict[str, dict[str, tuple[str, str]]]()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found.setdefault(node.name, {})
        for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            below = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(below, str):
                text = " ".join(below.split())
            else:
                rest = lines[(statement.end_lineno or 1) - 1][statement.end_col_offset or 0 :]
                text = rest.partition(b"#")[2].decode().strip()
            fields[statement.target.id] = (ast.unparse(statement.annotation), text)
    return found
