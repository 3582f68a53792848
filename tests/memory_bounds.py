"""Whether interpreted kernels read and write inside their operands only; on a GPU such an error may go unnoticed."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class Bounds:
    """Notes, while installed, what kernels access outside of the operands of their launch."""

    def __init__(self) -> None:
        self.outside: list[str] = []
        self._kernel = ""
        self._begins = self._ends = np.zeros(0, dtype=np.uint64)

    def install(self, monkeypatch: Any) -> None:
        """Look at every launch and access from now on."""
        operands = GridExecutor._init_args_hst

        def launch(executor: GridExecutor, args: Any, kwargs: Any) -> Any:
            found = operands(executor, args, kwargs)
            ranges = sorted(_ranges([*found[0], *found[1].values()]))
            self._kernel = executor.fn.__name__
            self._begins, self._ends = np.array(ranges or [(0, 0)], dtype=np.uint64).T
            self._ends = np.maximum.accumulate(self._ends)  # operands may lie in one another
            if any(name == "addresses_ptr" for name in executor.arg_names):  # it finds its tensors by their addresses
                self._ends = np.array([np.iinfo(np.uint64).max], dtype=np.uint64)
                self._begins = np.zeros(1, dtype=np.uint64)
            return found

        monkeypatch.setattr(GridExecutor, "_init_args_hst", launch)
        for name, mask_at in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
            monkeypatch.setattr(InterpreterBuilder, name, self._checked(name, mask_at))

    def _checked(self, name: str, mask_at: int) -> Any:
        access = getattr(InterpreterBuilder, name)

        def checked(builder: Any, *operands: Any, **more: Any) -> Any:
            pointers, mask = operands[mask_at // 3], operands[mask_at]
            self._check(name, pointers, np.broadcast_to(mask.data, pointers.data.shape))
            return access(builder, *operands, **more)

        return checked

    def _check(self, name: str, pointers: Any, mask: Any) -> None:
        size = np.uint64(np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize)
        addresses = pointers.data[mask]
        before = np.searchsorted(self._begins, addresses, side="right").astype(np.int64) - 1
        outside = (before < 0) | (addresses + size > self._ends[np.maximum(before, 0)])
        if outside.any():
            self.outside.append(f"{self._kernel}: {name} of {outside.sum()} elements outside of its operands")


def _ranges(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """The addresses of tensors: where each begins, and where it ends."""
    for value in values:
        if isinstance(value, tuple):
            yield from _ranges(value)
        elif hasattr(value, "block_shape"):  # a tensor descriptor
            yield from _ranges([value.base])
        elif hasattr(value, "data_ptr"):
            x = interpreter._unwrap_tensor(value)
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            yield x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size() * (x.numel() > 0)
