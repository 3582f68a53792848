"""One model at one pair of memory sizes: reads whole windows, steps from token to token, and observes attention.

All functions are pure: they take a `Point` or a state and return the next one, so several texts share an engine.
"""

import dataclasses
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compressive.api import TextModel
from compressive.config import ModelConfig
from compressive.inference.fast_decoder import FastDecoder
from compressive.model import decoding
from compressive.model.attention import heads_of
from compressive.model.compression import MostUsed
from compressive.model.decoding import DecodingState, LayerCache, Now
from compressive.model.language_model import IGNORED, CompressiveLM
from compressive.model.memory import Evicted, Memory
from compressive.model.transformer import Layer
from compressive.runs.trained import Trained
from compressive.web.places import Places

ENGINES = 4
"""Pairs of memory sizes whose models are kept; each has a copy of the weights."""


class Sizes(NamedTuple):
    """Slots of both memories, layer by layer."""

    recent: tuple[int, ...]
    compressed: tuple[int, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> "Sizes":
        """Return the sizes of a configuration."""
        return cls(config.memory_sizes, config.compressed_sizes)


@dataclass(frozen=True)
class Point:
    """What is kept where a window begins: everything that going on from there takes."""

    memory: Memory
    places: tuple[Places, ...]  # one per layer
    logits: Tensor | None  # (1, V): scores of the window's first token; None at the beginning of a text


class Engine:
    """A model with given memory sizes. Raises ValueError, where it is made, for sizes that the weights do not allow."""

    def __init__(self, model: CompressiveLM) -> None:
        self.decoder = FastDecoder(model)
        assert isinstance(self.decoder.model, CompressiveLM)
        self.model = self.decoder.model
        self.config, self.sizes = model.config, Sizes.of(model.config)
        self.device = next(model.parameters()).device
        self._reading = threading.Lock()  # the hooks below write into lists
        self._kept: list[Tensor] = []
        self._inputs: list[Tensor] = []  # of every layer
        self._looked: tuple[Point, list[int], DecodingState] | None = None  # the window that was looked into last
        for layer in self.model.trunk.layers:
            layer.register_forward_pre_hook(lambda _, given: self._inputs.append(given[0]))
            if isinstance(layer.compression, MostUsed):
                layer.compression.register_forward_hook(self._note_kept)

    def _note_kept(self, compression: MostUsed, given: tuple[Evicted], _: object) -> None:
        self._kept.append(compression.kept(given[0])[0].cpu())

    def beginning(self) -> Point:
        """Return the point before any token: empty memories."""
        places = (Places.empty(*size) for size in zip(*self.sizes, strict=True))
        return Point(self.model.initial_memory(1), tuple(places), None)

    def fit(self, point: Point) -> Point:
        """Return a point with this engine's memory sizes: grown by empty slots, or shrunk by forgetting."""
        if tuple(len(places.recent) for places in point.places) == self.sizes.recent and (
            tuple(len(places.compressed) for places in point.places) == self.sizes.compressed
        ):
            return point
        memory = dataclasses.replace(point.memory, zeros_visible=self.config.empty_memory == "zeros")
        memory = memory.resize(*map(list, self.sizes))
        places = zip(point.places, *self.sizes, strict=True)
        return Point(memory, tuple(old.resize(*size) for old, *size in places), point.logits)

    @torch.no_grad()
    def read_window(self, tokens: list[int], first: int, point: Point) -> tuple[Point, list[float]]:
        """Read a whole window of tokens, number `first` on, from the point where it begins.

        Returns the next point, and the nats of every token but the first, whose scores the point itself has.
        """
        window, config = torch.tensor([tokens], device=self.device), self.config
        targets = torch.cat([window[:, 1:], window.new_full((1, 1), IGNORED)], dim=1)
        with self._reading:
            out = self.model.trunk(self.model.embedding(window), point.memory)
            kept = iter(self._noted()[0])
        nats = self.model.embedding.nll(out.hidden, targets.clamp(min=0))[0, :-1]
        places = tuple(
            old.push(first, len(tokens), rate, config.compression, next(kept, None) if layer.n_compressed else None)
            for old, rate, layer in zip(point.places, config.compression_rates, self.model.trunk.layers, strict=True)
        )
        logits = self.model.embedding.logits(out.hidden[:, -1])
        return Point(out.memory, places, logits), nats.tolist()

    def begin(self, point: Point) -> DecodingState:
        """Return the state to step from."""
        state: DecodingState = self.decoder.decoding_state(point.memory)
        return state

    def step(self, token: int, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read one token; return the scores (1, V) of the next, and the next state."""
        return self.decoder.step(torch.tensor([token], device=self.device), state)

    def back(self, state: DecodingState, position: int) -> DecodingState:
        """Return a state as it was earlier in its window: what was read since then is hidden, and overwritten later."""
        remaining = self.config.window - position
        return dataclasses.replace(state, position=torch.full_like(state.position, position), remaining=remaining)

    @torch.no_grad()
    def look(self, tokens: list[int], position: int, point: Point) -> tuple[Tensor, list[Tensor]]:
        """Read one token of a window that begins at a point, with reference attention, all before it being read.

        Returns the scores (1, V) and each layer's weights (H, N).
        """
        state = self._before(tokens, position, point)
        layers = [ObservedLayer(layer) for layer in self.model.trunk.layers]
        x = self.model.embedding(torch.tensor([tokens[position]], device=self.device))
        hidden, _ = decoding.step(self.model.trunk, layers, x, self.back(state, position))
        return self.model.embedding.logits(hidden), [layer.weights[0].float().cpu() for layer in layers]

    def _before(self, tokens: list[int], position: int, point: Point) -> DecodingState:
        """A state with keys and values of at least the first `position` tokens of a window, read at once."""
        if self._looked is not None:
            where, read, state = self._looked
            if where is point and len(read) >= position and read[:position] == tokens[:position]:
                return state
        with self._reading:
            self.model.trunk(self.model.embedding(torch.tensor([tokens], device=self.device)), point.memory)
            inputs = self._noted()[1]
        state = self.begin(point)
        for layer, cache, h in zip(self.model.trunk.layers, state.layers, inputs, strict=True):
            window = slice(layer.n_memory, layer.n_memory + len(tokens))
            key, value = heads_of(layer.attention.project_frozen(layer.normed_frozen(h)))
            cache.key[:, :, window], cache.value[:, :, window] = key, value
        self._looked = point, tokens, state
        return state

    def _noted(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the hooks have noted: slots that most-used compression kept, and inputs, of every layer."""
        kept, inputs = self._kept, self._inputs
        self._kept, self._inputs = [], []
        return kept, inputs


class ObservedLayer:
    """A layer's reference step that keeps its attention weights (1, H, N)."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.weights = torch.empty(0)

    def step(self, h: Tensor, cache: LayerCache, now: Now) -> tuple[Tensor, LayerCache]:
        """Lines 5 to 7 and 12 for one position, as `decoding.step_layer` has them."""
        return decoding.step_layer(self.layer, h, cache, now, observe=self._observe)

    def _observe(self, weights: Tensor) -> None:
        self.weights = weights


class Engines:
    """The engines of one trained model, made when their memory sizes are first asked for."""

    def __init__(self, model: TextModel) -> None:
        self.text_model = model
        config = model.config.model
        assert isinstance(config, ModelConfig)
        resets = model.config.train.reset_probability > 0
        self._trained = Trained(config, model.step, model.model.state_dict(), resets)
        self.default = Engine(model.model)
        self._others: OrderedDict[Sizes, Engine] = OrderedDict()
        self._making = threading.Lock()

    def of(self, sizes: Sizes) -> Engine:
        """Return the engine of these sizes. Raises ValueError for sizes that the weights do not allow."""
        if sizes == self.default.sizes:
            return self.default
        with self._making:
            if sizes not in self._others:
                config = self._trained.eval_config(*sizes).model
                model = self._trained.model(config, self.default.device)
                assert isinstance(model, CompressiveLM)
                self._others[sizes] = Engine(model)
            self._others.move_to_end(sizes)
            if len(self._others) > ENGINES:
                self._others.popitem(last=False)
            return self._others[sizes]
