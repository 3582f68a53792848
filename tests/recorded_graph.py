"""A stand-in for a CUDA graph on a CPU: it repeats operations on the tensors that they were recorded with.

What a function does in Python happens once, while it is recorded; a replay only computes, reads what is in the tensors
from outside, and overwrites those made inside. So code that is right with it does not count on anything but tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class _Recorder(TorchDispatchMode):
    """Records every operation, and what it overwrote of tensors from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.inside: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # storages from outside, and what they held

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in function._schema.arguments
        ):
            for x in _tensors((args, kwargs)):
                if _place(x) not in self.inside and _place(x) not in self.before:
                    self.before[_place(x)] = (whole := _storage(x)), whole.clone()
        known = {_place(x) for x in _tensors((args, kwargs))}
        result = function(*args, **kwargs)
        results = _tensors(result)
        self.inside |= {_place(x) for x in results} - known
        self.operations.append((function, args, kwargs, results))
        return result


def recorded(function: Callable[[], object], pool: object = None) -> Callable[[], object]:
    """Record a function, without a lasting effect, and return what repeats its operations."""
    with _Recorder() as recorder:
        function()
    for storage, value in recorder.before.values():
        storage.copy_(value)

    @torch.no_grad()
    def replay() -> None:
        for operation, args, kwargs, results in recorder.operations:
            known = {_place(x) for x in _tensors((args, kwargs))}
            for held, new in zip(results, _tensors(operation(*args, **kwargs)), strict=True):
                if _place(held) not in known:  # neither a view of an argument nor the argument itself
                    held.copy_(new)

    return replay


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, Tensor)]


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _storage(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
