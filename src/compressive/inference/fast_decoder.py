"""Steps in place: a state's buffers stay where they are, and on a GPU a step is one CUDA graph, launched as a whole.

A step of a small model is many small kernels, and the host takes longer to launch each than the device to run it. A
graph of them is recorded once and launched again and again; what it reads and writes must then stay where it is.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compressive.model.attention import HAS_TRITON
from compressive.model.decoding import DecodingState
from compressive.model.language_model import CompressiveLM
from compressive.model.transformer import Layer

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Gives what repeats, on the device, all that a function did there when it was captured."""


class Stepper:
    """Goes from state to state.

    `step` takes a state and returns the next, as `model.step` does. Everything else that it reads or writes, such as
    the tokens, are tensors of its owner that stay where they are. Without `capture` it is called for each step; with
    it the state is copied into buffers of the stepper's own. Of steps within a window, and of those that end the
    windows of all lanes and compress them, the first is called, the next captured, and launched again from then on.
    Steps that end the windows of some lanes are called: which lanes these are only the device knows.
    """

    def __init__(
        self, step: Callable[[DecodingState], DecodingState], state: DecodingState, capture: Capture | None
    ) -> None:
        self._step = step
        self._state = state if capture is None else state.clone()
        self._capture = capture
        self._replays: dict[bool, Callable[[], object]] = {}  # by whether a step ends windows
        self._rooms: dict[bool, int] = {}  # what is left after such steps, by what was called

    @property
    def state(self) -> DecodingState:
        """Where the stepper stands; the state is the caller's, further steps do not touch it."""
        return self._state if self._capture is None else self._state.clone()

    def __call__(self) -> None:
        """Take one step."""
        room = self._state.room
        ends = room == 1
        if self._capture is None:
            self._state = self._step(self._state)
        elif ends not in self._rooms or (ends and not self._state.together):
            # A kernel's first launch may do what cannot be captured.
            self._rooms[ends] = self._in_place()
            self._state = dataclasses.replace(self._state, room=self._rooms[ends])
        else:
            if ends not in self._replays:
                self._replays[ends] = self._capture(self._in_place)
            self._replays[ends]()
            self._state = dataclasses.replace(self._state, room=self._rooms[True] if ends else room - 1)

    def _in_place(self) -> int:
        """Step, and write what is new into the buffers; return the room that is left."""
        after = self._step(self._state.owning())
        self._state.copy_(after)
        return after.room


def cuda_graph(function: Callable[[], object], pool: Any = None) -> Callable[[], object]:
    """Record what a function does on the GPU, without doing it; must have been called before.

    Functions that leave nothing behind but in tensors of others may share a pool of memory.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        function()
    return graph.replay


def capture_for(model: nn.Module) -> Capture | None:
    """Capture where it can be done: on a GPU that holds all of the model."""
    whole = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if not whole or not next(model.parameters()).is_cuda:
        return None
    return functools.partial(cuda_graph, pool=torch.cuda.graph_pool_handle())


def for_steps(model: CompressiveLM) -> CompressiveLM:
    """Return the model as steps want it: in evaluation mode, and its weights as they are used, over and over.

    W_q, W_k and W_v are joined, and on a GPU a layer is a few fused kernels. Under autocast matrices are in its type
    already, rather than turned into it at every step. All other weights are those of the model itself; a model in
    shards is returned as it is.
    """
    parameters = dict.fromkeys(model.parameters())
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return model
    device = next(iter(parameters)).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    matrices = {
        parameter for module in model.modules() if isinstance(module, nn.Linear) for parameter in module.parameters()
    }

    def weight(parameter: nn.Parameter) -> nn.Parameter:
        cast = autocast if parameter in matrices and parameter.dtype == torch.float32 else None
        # Without a gradient autocast keeps nothing of it in its cache, which does not live as long as a graph.
        return nn.Parameter(parameter.detach().to(cast), requires_grad=False)

    with torch.no_grad():
        model = copy.deepcopy(model, {id(parameter): weight(parameter) for parameter in parameters}).eval()
        layers = [module for module in model.modules() if isinstance(module, Layer)]
        for attention in (layer.attention for layer in layers):
            attention.joined = torch.cat([attention.query.weight, attention.key_value.weight])
        if device == "cuda" and HAS_TRITON:
            from compressive.kernels.relative_attention_step import suit, use_kernels

            for layer in layers if suit(model.config) else ():
                use_kernels(layer)
    return model
