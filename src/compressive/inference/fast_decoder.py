"""Fast decoding: weights cast and joined once, kernels where the dispatcher lets them run, and a step as a CUDA graph.

    decoder = FastDecoder(model)
    logits, state = decoder.step(tokens, decoder.decoding_state(memory))

A step of a small model is many small kernels, and the host takes longer to launch each than the device to run it.
`StepGraph` records a step once as a CUDA graph and replays it; what a graph reads and writes must stay where it is.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compressive.config import ModelConfig
from compressive.kernels.dispatch import choose
from compressive.model import decoding
from compressive.model.decoding import DecodingState, LayerCache, Now, StepLayer
from compressive.model.language_model import CompressiveLM, LanguageModel
from compressive.model.transformer import Layer
from compressive.runtime import Capture, cuda_graph


class FastDecoder:
    """Steps a model as `model.step` does, in evaluation mode, faster.

    `model` is a copy of the model whose weights are those of the original, or cast to autocast's type where they are
    multiplied in it. A model in shards is used as it is.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self.model = model if self.sharded else _for_inference(model)
        self.layers: Sequence[StepLayer] | None = None
        if isinstance(self.model, CompressiveLM) and not self.sharded:
            kernels = step_kernels(self.model.config, next(self.model.parameters()).device)
            self.layers = [FastLayer(layer, *kernels) for layer in self.model.trunk.layers]

    @torch.no_grad()
    def step(self, tokens: Tensor, state: Any, starts: Tensor | None = None) -> tuple[Tensor, Any]:
        """Read one token per row (B,); `starts` (B,) marks new documents. Returns logits (B, V) and the next state."""
        model = self.model
        if self.layers is None:
            return model.step(tokens, state, starts)
        assert isinstance(model, CompressiveLM)
        hidden, state = decoding.step(model.trunk, self.layers, model.embedding(tokens), state, starts)
        return model.embedding.logits(hidden), state

    def decoding_state(self, memory: Any) -> Any:
        """Return the state to `step` from."""
        return self.model.decoding_state(memory)

    def capture(self) -> Capture | None:
        """Return what captures steps: CUDA graphs on a GPU that holds the whole model, else None."""
        if self.sharded or not next(self.model.parameters()).is_cuda:
            return None
        return functools.partial(cuda_graph, pool=torch.cuda.graph_pool_handle())


class FastLayer:
    """One layer's step: W_q, W_k and W_v as one product, attention and the rest as kernels where these can run."""

    def __init__(self, layer: Layer, attends: bool, finishes: bool) -> None:
        self.layer = layer
        self.joined = torch.cat([layer.attention.query.weight, layer.attention.key_value.weight]).detach()
        self.attends, self.finishes = attends, finishes  # as kernels

    def step(self, h: Tensor, cache: LayerCache, now: Now) -> tuple[Tensor, LayerCache]:
        """Lines 5 to 7 and 12 for one position per row, h (B, D), as `decoding.step_layer` has them."""
        layer, attention = self.layer, self.layer.attention
        if not self.attends:
            return decoding.step_layer(layer, h, cache, now, self.joined)
        from compressive.kernels.relative_attention_step import linear_step, relative_attention_step

        projected = linear_step(layer.normed(h), self.joined)
        q, k, v = projected.view(len(h), 3, attention.n_heads, -1).unbind(dim=1)
        attended, weights = relative_attention_step(
            q, k, v, cache.key, cache.value, cache.near, attention.content_bias, attention.position_bias,
            now.position, now.hidden,
            r_far=cache.far, v_far=attention.far_position_bias if attention.separate else None,
            n_compressed=layer.n_compressed, n_memory=layer.n_memory, with_weights=cache.received is not None,
        )  # fmt: skip
        attended, cache = attended.flatten(1), decoding.receive(layer, cache, weights)
        if self.finishes:
            return self._finish(h, attended), cache
        return layer.mlp_block(layer.add_attention(h, attention.output(attended))), cache

    def _finish(self, h: Tensor, attended: Tensor) -> Tensor:
        """Lines 7 and 12 as kernels: each product with the norm before it and the ReLU or skip connection after it."""
        from compressive.kernels.relative_attention_step import linear_step, norm_step

        layer = self.layer
        widen, narrow = (module for module in layer.mlp if isinstance(module, nn.Linear))
        a = linear_step(attended, layer.attention.output.weight, residual=h)
        norm = layer.mlp_norm if layer.pre_norm else layer.attention_norm
        hidden = linear_step(a, widen.weight, widen.bias, norm=norm, relu=True)
        if layer.pre_norm:
            return linear_step(hidden, narrow.weight, narrow.bias, residual=a)
        return norm_step(
            linear_step(hidden, narrow.weight, narrow.bias, residual=a, residual_norm=norm), layer.mlp_norm
        )


def step_kernels(config: ModelConfig, device: torch.device) -> tuple[bool, bool]:
    """Whether kernels attend in a step on a device, and whether they also do what comes after attention."""
    case: dict[str, Any] = {"device": device.type, "sharded": False}
    attends = choose("relative_attention_step", head_width=config.d_head, **case)
    finishes = choose("linear_step", width=config.d_model, **case)
    return attends.form == "kernel", attends.form == finishes.form == "kernel"


def _for_inference(model: LanguageModel) -> LanguageModel:
    """Copy a model's modules, not its weights: evaluation mode, no gradients, matrices cast once under autocast."""
    device = next(model.parameters()).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    matrices = {
        parameter for module in model.modules() if isinstance(module, nn.Linear) for parameter in module.parameters()
    }

    def weight(parameter: nn.Parameter) -> nn.Parameter:
        cast = autocast if parameter in matrices and parameter.dtype == torch.float32 else None
        # Without requires_grad autocast does not cache its casts, whose memory would not live as long as a graph.
        return nn.Parameter(parameter.detach().to(cast), requires_grad=False)

    shared = {id(parameter): weight(parameter) for parameter in dict.fromkeys(model.parameters())}
    return copy.deepcopy(model, shared).eval()


class StepGraph:
    """Takes steps from state to state, as a CUDA graph where steps can be captured.

    `step` takes a state and returns the next. Everything else that it reads or writes, such as the tokens, are
    tensors of its owner that stay where they are. Without `capture` it is called for each step. With it the state is
    copied into buffers of the graph's own; of steps within a window, and of steps that end the windows of all rows and
    compress them, the first is called, the second captured, and replayed from then on. Steps that end the windows of
    some rows only are called: their shapes depend on data.
    """

    def __init__(
        self, step: Callable[[DecodingState], DecodingState], state: DecodingState, capture: Capture | None
    ) -> None:
        self._step = step
        self._state = state if capture is None else state.clone()
        self._capture = capture
        self._replays: dict[bool, Callable[[], object]] = {}  # by whether a step ends windows
        self._remaining: dict[bool, int] = {}  # what is left after such steps, by what was called

    @property
    def state(self) -> DecodingState:
        """The current state; it is the caller's, further steps do not touch it."""
        return self._state if self._capture is None else self._state.clone()

    @state.setter
    def state(self, state: DecodingState) -> None:
        """Go on from another state of as many rows."""
        if self._capture is None:
            self._state = state
        else:  # what was captured reads and writes these buffers
            self._state.copy_(state)
            self._state = dataclasses.replace(self._state, remaining=state.remaining, together=state.together)

    def __call__(self) -> None:
        """Take one step."""
        remaining = self._state.remaining
        ends = remaining == 1
        if self._capture is None:
            self._state = self._step(self._state)
        elif ends not in self._remaining or (ends and not self._state.together):
            # A kernel's first launch may do what cannot be captured.
            self._remaining[ends] = self._in_place()
            self._state = dataclasses.replace(self._state, remaining=self._remaining[ends])
        else:
            if ends not in self._replays:
                self._replays[ends] = self._capture(self._in_place)
            self._replays[ends]()
            after = self._remaining[True] if ends else remaining - 1
            self._state = dataclasses.replace(self._state, remaining=after)

    def _in_place(self) -> int:
        """Step, and write what is new into the buffers; return how many steps remain."""
        after = self._step(self._state.owning())
        self._state.copy_(after)
        return after.remaining


class Stepper:
    """Reads tokens one per row at a time from a state on, as a CUDA graph where the decoder's steps can be captured."""

    def __init__(self, decoder: FastDecoder, state: DecodingState) -> None:
        self._decoder = decoder
        self._tokens = torch.zeros_like(state.position)
        dtype = next(x.dtype for x in state.state_dict().values() if x.is_floating_point())
        shape = len(self._tokens), decoder.model.config.vocab_size
        self._logits = torch.empty(shape, dtype=dtype, device=self._tokens.device)
        self._steps = StepGraph(self._step, state, decoder.capture())

    @property
    def state(self) -> DecodingState:
        """The current state; it is the caller's. A state of as many rows may be set, to go on from it."""
        return self._steps.state

    @state.setter
    def state(self, state: DecodingState) -> None:
        self._steps.state = state

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens (B,); return the logits (B, V) after them, which the next call overwrites."""
        self._tokens.copy_(tokens)
        self._steps()
        return self._logits

    def _step(self, state: DecodingState) -> DecodingState:
        logits, state = self._decoder.step(self._tokens, state)
        self._logits.copy_(logits)
        return state
