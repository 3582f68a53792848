"""Groups of tensors that move, detach, fork, save and restore as one."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import torch
from safetensors.torch import load_file, save
from torch import Tensor

SHARED = {"shared": True}
"""Field metadata: all batch rows share this field, it has no batch dimension."""


def saved_as(name: str) -> dict[str, str]:
    """Field metadata: in files this field has another name, the one it had in an earlier version."""
    return {"saved as": name}


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """Base of frozen dataclasses that hold tensors, batch rows first.

    A field is a tensor, None, a number, another record, or a tuple of tensors or records.
    """

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the record with every tensor replaced by `function` of it."""
        return self._combine([], function, shared=True)

    def detach(self) -> Self:
        """Detach every tensor."""
        return self.map(Tensor.detach)

    def clone(self) -> Self:
        """Copy every tensor."""
        return self.map(Tensor.clone)

    def copy_(self, other: Self) -> None:
        """Copy another record's tensors into this one's, except where both are the same tensor."""
        self._combine([other], lambda x, y: x if x is y else x.copy_(y), shared=True)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move to a device, and turn floating-point tensors into another type; flags and counts keep theirs."""
        return self.map(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None))

    def replace_(self, condition: Tensor, other: Self) -> Self:
        """Copy another record's tensors in place if the condition, a 0-d bool tensor, holds; without a device sync."""
        return self._combine([other], lambda x, y: x.copy_(torch.where(condition, y, x)), shared=True)

    def rows(self, rows: slice) -> Self:
        """Return consecutive batch rows, as views: what is written into them is written into this record."""
        return self._combine([], lambda x: x[rows])

    def select(self, rows: Tensor) -> Self:
        """Pick batch rows by number; a row named more than once is forked."""
        return self._combine([], lambda x: x.index_select(0, rows))

    def put(self, rows: Tensor, other: Self) -> Self:
        """Return the record with these rows, by number, replaced by those of another record."""
        return self._combine([other], lambda x, y: x.index_copy(0, rows, y))

    @classmethod
    def join(cls, records: Sequence[Self]) -> Self:
        """Lay the rows of several records side by side in one batch."""
        return records[0]._combine(records[1:], lambda *tensors: torch.cat(tensors))

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor and number under a dotted name, as safetensors and checkpoints want it."""
        return dict(_flatten("", self))

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Self:
        """Rebuild a record from what `state_dict` gave."""
        record: Self = _restore(cls, "", state)
        return record

    def save(self, path: Path | str) -> None:
        """Write the record to a safetensors file."""
        # As bytes: safetensors' own files are readable by their owner only, whatever the umask.
        Path(path).write_bytes(save({name: tensor.contiguous() for name, tensor in self.state_dict().items()}))

    @classmethod
    def load(cls, path: Path | str, device: str = "cpu") -> Self:
        """Read a record from a safetensors file."""
        return cls.from_state_dict(load_file(path, device=device))

    def _combine(self, others: Sequence[Self], function: Callable[..., Tensor], shared: bool = False) -> Self:
        """Apply `function` across records of one kind, tensor by tensor; to shared fields only if asked."""
        changed = {
            field.name: _combine([getattr(record, field.name) for record in (self, *others)], function, shared)
            for field in dataclasses.fields(self)
            if field.init and (shared or "shared" not in field.metadata)
        }
        return dataclasses.replace(self, **changed)


def _combine(values: Sequence[Any], function: Callable[..., Tensor], shared: bool) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return function(*values)
    if isinstance(first, tuple):
        return tuple(_combine(parts, function, shared) for parts in zip(*values, strict=True))
    if isinstance(first, TensorRecord):
        return first._combine(values[1:], function, shared)
    if any(value != first for value in values):
        raise ValueError(f"records that differ in {values!r} cannot be combined; take them from one model")
    return first


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    parts: list[tuple[str, Any]]
    if isinstance(value, TensorRecord):
        parts = [(_key(field), getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
    elif isinstance(value, tuple):
        parts = [(str(i), part) for i, part in enumerate(value)]
    else:
        if value is not None:
            yield name, value if isinstance(value, Tensor) else torch.tensor(value)
        return
    for key, part in parts:
        yield from _flatten(f"{name}.{key}" if name else key, part)


def _key(field: "dataclasses.Field[Any]") -> str:
    """A field's name in files."""
    key: str = field.metadata.get("saved as", field.name)
    return key


def _restore(hint: Any, name: str, state: dict[str, Tensor]) -> Any:
    prefix = f"{name}." if name else ""
    if get_origin(hint) is UnionType:  # `X | None`: None leaves no trace in the state
        hint = get_args(hint)[0]
        if not any(key == name or key.startswith(prefix) for key in state):
            return None
    if get_origin(hint) is tuple:
        count = len({key[len(prefix) :].split(".")[0] for key in state if key.startswith(prefix)})
        return tuple(_restore(get_args(hint)[0], f"{prefix}{i}", state) for i in range(count))
    if isinstance(hint, type) and issubclass(hint, TensorRecord):
        hints = get_type_hints(hint)
        fields = [field for field in dataclasses.fields(hint) if field.init]
        return hint(**{field.name: _restore(hints[field.name], prefix + _key(field), state) for field in fields})
    if name not in state:
        raise ValueError(f"{name!r} is missing from the saved state; was it saved by another kind of record?")
    return state[name] if hint is Tensor else hint(state[name].item())
