"""Both memories and the window's keys and values as a `Cache`: constant in size, however much was read."""

import copy
import dataclasses
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers import Cache

from compressive.inference.fast_decoder import FastDecoder, Stepper
from compressive.inference.generate import read_rows
from compressive.model.decoding import DecodingState
from compressive.model.language_model import CompressiveLM


class CompressiveCache(Cache):  # type: ignore[misc]  # transformers is not analysed
    """A `DecodingState` of every row, and the decoder that steps it: kernels and CUDA graphs on a GPU.

    Padding is never read, wherever it is: rows are exactly what they would be alone. `copy.deepcopy` forks a cache,
    without its weights. It cannot be cropped, as what was read has entered memory.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, model: CompressiveLM) -> None:
        super().__init__(layers=[])
        self._decoder = FastDecoder(model)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._length = self._rows = 0
        self._state: DecodingState | None = None
        self._stepper: Stepper | None = None  # holds the state instead, between steps
        self._waiting: dict[int, DecodingState] = {}  # rows that are fed padding, as they were before it

    @property
    def state(self) -> DecodingState | None:
        """What was read, rows as they are; None at the beginning. It is the caller's, further reading leaves it be."""
        state = self._state if self._stepper is None else self._stepper.state
        for row, waiting in self._waiting.items():
            assert state is not None
            state = state.put(waiting.position.new_tensor([row]), waiting)
        return state

    def read(self, tokens: Tensor, real: Tensor, keep: int) -> Tensor:
        """Read tokens (B, n), except where `real` (B, n) is False; return logits (B, keep, V) of the last columns.

        Logits at padding mean nothing. Raises ValueError if the cache has other rows, or if there is nothing to read.
        """
        rows, n = tokens.shape
        keep = min(keep, n)
        if self._length and rows != self.batch_size:
            raise ValueError(
                f"{rows} rows for a cache of {self.batch_size}: expected as many; batch_repeat_interleave and "
                "batch_select_indices of the cache change its rows"
            )
        logits = self._step(tokens[:, 0], real[:, 0]) if n == 1 and self._length else self._read(tokens, real, keep)
        self._length += n
        return logits

    def _step(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Read one column. All rows are stepped, but those that are fed padding are kept as they were."""
        padded = (~real).nonzero().squeeze(1)
        if padded.tolist() != list(self._waiting):
            state = self.state
            assert state is not None
            self._waiting = {int(row): state.select(row[None]) for row in padded}
            self._put(state)
        if self._stepper is None:
            assert self._state is not None
            self._stepper, self._state = Stepper(self._decoder, self._state), None
        return self._stepper(tokens.masked_fill(~real, 0))[:, None].clone()

    def _read(self, tokens: Tensor, real: Tensor, keep: int) -> Tensor:
        """Read any number of columns: rows that have as much to read and stand at one position are read together."""
        model, state = self._decoder.model, self.state
        if state is None:
            state = self._decoder.decoding_state(model.initial_memory(len(tokens)))
        counts, kept = real.sum(dim=1).tolist(), real[:, -keep:].sum(dim=1).tolist()
        groups: dict[tuple[int, int, int], list[int]] = {}
        for row, key in enumerate(zip(counts, kept, state.position.tolist(), strict=True)):
            groups.setdefault(key, []).append(row)
        logits: Tensor | None = None
        parts, order = [], []
        for (count, wanted, position), rows in groups.items():
            index = torch.tensor(rows, device=tokens.device)
            remaining = model.config.window - position
            part = dataclasses.replace(state.select(index), remaining=remaining, together=True)
            if count:
                own = tokens[index][real[index]].view(len(rows), count)
                found, part = read_rows(self._decoder, own, part, max(wanted, 1))
                if logits is None:
                    logits = found.new_zeros(len(tokens), keep, found.shape[-1])
                if wanted:
                    at = torch.zeros_like(real[:, -keep:]).index_copy(0, index, real[index, -keep:])
                    logits[at] = found.flatten(0, 1)
            parts.append(part)
            order += rows
        if logits is None:
            raise ValueError("nothing but padding: expected at least one token that attention_mask shows")
        back = torch.tensor(order, device=tokens.device).argsort()
        self._state, self._stepper, self._waiting = DecodingState.join(parts).select(back), None, {}
        self._rows = len(tokens)
        return logits

    def _put(self, state: DecodingState) -> None:
        """Go on from another state."""
        if self._stepper is not None and len(state.position) == self._rows:
            self._stepper.state = state  # what was captured stays of use
        else:
            self._state, self._stepper, self._rows = state, None, len(state.position)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows by number, one for each beam."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork every row into as many, side by side."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Choose rows by number; a row named more than once is forked."""
        state = self.state
        if state is not None:
            self._waiting = {}
            self._put(state.select(indices.to(state.position.device, torch.long)))

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Raise NotImplementedError: memory does not forget the last tokens."""
        raise NotImplementedError("a CompressiveCache cannot be cropped: copy.deepcopy it before you read on")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns were read, padding included."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Number of rows; 0 at the beginning."""
        return self._rows

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return self._length > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        fork = copy.copy(self)
        fork._state, fork._stepper, fork._waiting = self.state, None, {}
        return fork

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch_size} rows, {self._length:,} columns read)"
