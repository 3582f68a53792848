"""Checks shared by all configurations; each error names the field, its value and what was expected."""

import dataclasses
import functools
import warnings
from typing import Any, get_args


def check_values(config: Any, zero_allowed: tuple[str, ...] = ()) -> None:
    """Raise ValueError for unknown choices, ints below 1 and floats not above 0; `zero_allowed` fields may be 0."""
    check_choices(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least = 0 if field.name in zero_allowed else 1
        if field.type is int:
            require(is_int(value) and value >= least, field.name, value, f"a whole number of at least {least}")
        elif field.type is float:
            in_range = isinstance(value, int | float) and (value > 0 or (value == 0 and not least))
            require(in_range, field.name, value, "a number above 0" if least else "a number of at least 0")


def check_choices(config: Any) -> None:
    """Raise ValueError if a value is not among the choices of its `Literal` type."""
    for field in dataclasses.fields(config):
        if (choices := get_args(field.type)) and all(isinstance(choice, str) for choice in choices):
            value = getattr(config, field.name)
            require(value in choices, field.name, value, f"one of {', '.join(choices)}")


def is_int(value: object) -> bool:
    """Return whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise a ValueError that names the field, its value and what was expected, unless the condition holds."""
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")


@functools.cache
def warn_once(message: str) -> None:
    """Warn, but only once per process for each message."""
    warnings.warn(message, stacklevel=5)
