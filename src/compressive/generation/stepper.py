"""Steps in place: a state's buffers stay where they are, and on a GPU a step is one CUDA graph, launched as a whole.

A step of a small model is many small kernels, and the host takes longer to launch each than the device to run it. A
graph of them is recorded once and launched again and again; what it reads and writes must then stay where it is.
"""

import copy
import dataclasses
from collections.abc import Callable

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
    it the state is copied into buffers of the stepper's own, the first step is called, the next one captured, and
    from then on only a window's last step, which also compresses, is called again.
    """

    def __init__(
        self, step: Callable[[DecodingState], DecodingState], state: DecodingState, capture: Capture | None
    ) -> None:
        self._step = step
        self._state = state if capture is None else state.clone()
        self._capture = capture
        self._replay: Callable[[], object] | None = None
        self._warm = False

    @property
    def state(self) -> DecodingState:
        """Where the stepper stands; the state is the caller's, further steps do not touch it."""
        return self._state if self._capture is None else self._state.clone()

    def __call__(self) -> None:
        """Take one step."""
        if self._capture is None:
            self._state = self._step(self._state)
        elif self._warm and self._state.room > 1:
            if self._replay is None:
                self._replay = self._capture(self._in_place)
            self._replay()
            self._state = dataclasses.replace(self._state, room=self._state.room - 1)
        else:  # a kernel's first launch may do what cannot be captured, and so does a window's end
            self._state = dataclasses.replace(self._state, room=self._in_place())
            self._warm = True

    def _in_place(self) -> int:
        """Step, and write what is new into the buffers; return the room that is left."""
        after = self._step(self._state.owning())
        self._state.copy_(after)
        return after.room


def cuda_graph(function: Callable[[], object]) -> Callable[[], object]:
    """Record what a function does on the GPU, without doing it; must have been called before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def capture_for(model: nn.Module) -> Capture | None:
    """Capture where it can be done: on a GPU that holds all of the model."""
    whole = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return cuda_graph if whole and next(model.parameters()).is_cuda else None


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
            from compressive.model.fused_step import suit, use_kernels

            for layer in layers if suit(model.config) else ():
                use_kernels(layer)
    return model
