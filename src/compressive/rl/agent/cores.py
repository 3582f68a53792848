"""The agent's memory, chosen by name, behind one interface: it acts step by step and learns window by window.

A core's state at the beginning of an unroll is what is stored with it. Acting begins from that state, reads a whole
window and ends in the next state; learning reads the same window from the same state in one pass, and sees just what
acting saw: an unroll is a window, so no memory is pushed or compressed within it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compressive.config import ModelConfig
from compressive.model.decoding import DecodingState
from compressive.model.memory import Memory
from compressive.model.records import TensorRecord
from compressive.model.transformer import CompressiveTransformer


class CoreOutput(NamedTuple):
    """What a window gives."""

    hidden: Tensor  # (B, T, D)
    state: Any  # the next window's
    compression_loss: Tensor  # ()


class Core(nn.Module):
    """A memory of lanes; `inputs` wide are the features it is given, d_model of the configuration what it gives."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__()

    def initial_state(self, lanes: int) -> Any:
        """The state before anything was seen."""
        raise NotImplementedError

    def begin(self, state: Any) -> Any:
        """Make ready to act from a state, at the beginning of a window."""
        return state

    def step(self, x: Tensor, acting: Any, starts: Tensor) -> tuple[Tensor, Any]:
        """Read one position per lane, x (B, inputs); starts (B,) marks new episodes. Gives (B, D)."""
        raise NotImplementedError

    def end(self, acting: Any) -> Any:
        """Give the state for the next unroll, once a whole window was read."""
        return acting

    def forward(self, x: Tensor, state: Any, starts: Tensor) -> CoreOutput:
        """Read a window x (B, T, inputs)."""
        raise NotImplementedError


class TransformerCore(Core):
    """The package's own trunk; with no compressed memory it is a TransformerXL.

    What goes in is normalised: unlike the embeddings of tokens, features of pictures grow while they are learnt, and
    attention over what has no bound hardens. Without this norm the small task is learnt less often (docs/log.md).
    """

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__(inputs, config)
        self.embedding = nn.Sequential(nn.Linear(inputs, config.d_model), nn.LayerNorm(config.d_model))
        self.trunk = CompressiveTransformer(config)

    def initial_state(self, lanes: int) -> Memory:  # noqa: D102
        return self.trunk.initial_memory(lanes)

    def begin(self, state: Memory) -> DecodingState:
        """Project what is in memory with the weights as they are now, as learning will do it."""
        return self.trunk.decoding_state(state)

    def step(self, x: Tensor, acting: DecodingState, starts: Tensor) -> tuple[Tensor, DecodingState]:  # noqa: D102
        return self.trunk.step(self.embedding(x).to(x.dtype), acting, starts)

    def end(self, acting: DecodingState) -> Memory:  # noqa: D102
        return acting.memory

    def forward(self, x: Tensor, state: Memory, starts: Tensor) -> CoreOutput:  # noqa: D102
        out = self.trunk(self.embedding(x).to(x.dtype), state, starts)
        return CoreOutput(out.hidden, out.memory, out.compression_loss)


@dataclass(frozen=True)
class LSTMState(TensorRecord):
    """What an LSTM carries along."""

    hidden: Tensor  # (B, D)
    cell: Tensor  # (B, D)


class LSTMCore(Core):
    """IMPALA's own memory; forgets everything where an episode begins."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__(inputs, config)
        self.width = config.d_model
        self.cell = nn.LSTMCell(inputs, config.d_model)

    def initial_state(self, lanes: int) -> LSTMState:  # noqa: D102
        zeros = self.cell.weight_hh.new_zeros(lanes, self.width)
        return LSTMState(zeros, zeros)

    def step(self, x: Tensor, acting: LSTMState, starts: Tensor) -> tuple[Tensor, LSTMState]:  # noqa: D102
        kept = ~starts[:, None]
        hidden, cell = self.cell(x, (acting.hidden * kept, acting.cell * kept))
        return hidden, LSTMState(hidden.float(), cell.float())

    def forward(self, x: Tensor, state: LSTMState, starts: Tensor) -> CoreOutput:  # noqa: D102
        outputs = []
        for position, start in zip(x.unbind(1), starts.unbind(1), strict=True):
            hidden, state = self.step(position, state, start)
            outputs.append(hidden)
        return CoreOutput(torch.stack(outputs, dim=1), state, x.new_zeros(()))


@dataclass(frozen=True)
class NoState(TensorRecord):
    """Nothing, for so many lanes."""

    lanes: Tensor  # (B, 0)


class NoCore(Core):
    """No memory: a layer that sees the present alone."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__(inputs, config)
        self.layer = nn.Sequential(nn.Linear(inputs, config.d_model), nn.ReLU())

    def initial_state(self, lanes: int) -> NoState:  # noqa: D102
        return NoState(next(self.parameters()).new_zeros(lanes, 0))

    def step(self, x: Tensor, acting: NoState, starts: Tensor) -> tuple[Tensor, NoState]:  # noqa: D102
        return self.layer(x), acting

    def forward(self, x: Tensor, state: NoState, starts: Tensor) -> CoreOutput:  # noqa: D102
        return CoreOutput(self.layer(x), state, x.new_zeros(()))


CORES: dict[str, type[Core]] = {
    "compressive": TransformerCore,
    "txl": TransformerCore,
    "lstm": LSTMCore,
    "none": NoCore,
}
