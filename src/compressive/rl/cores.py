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


class TransformerCore(nn.Module):
    """The package's own trunk; with no compressed memory it is a TransformerXL."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Linear(inputs, config.d_model)
        self.trunk = CompressiveTransformer(config)

    def initial_state(self, lanes: int) -> Memory:
        """Empty memories."""
        return self.trunk.initial_memory(lanes)

    def begin(self, state: Memory) -> DecodingState:
        """Make ready to act: memory is projected with the weights as they are now, as learning will do it."""
        return self.trunk.decoding_state(state)

    def step(self, x: Tensor, acting: DecodingState, starts: Tensor) -> tuple[Tensor, DecodingState]:
        """Read one position per lane, x (B, inputs)."""
        return self.trunk.step(self.embedding(x).to(x.dtype), acting, starts)

    def end(self, acting: DecodingState) -> Memory:
        """Give the state for the next unroll, once a whole window was read."""
        return acting.memory

    def forward(self, x: Tensor, state: Memory, starts: Tensor) -> CoreOutput:
        """Read a window x (B, T, inputs)."""
        out = self.trunk(self.embedding(x).to(x.dtype), state, starts)
        return CoreOutput(out.hidden, out.memory, out.compression_loss)


@dataclass(frozen=True)
class LSTMState(TensorRecord):
    """What an LSTM carries along."""

    hidden: Tensor  # (B, D)
    cell: Tensor  # (B, D)


class LSTMCore(nn.Module):
    """IMPALA's own memory; forgets everything where an episode begins."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.d_model
        self.cell = nn.LSTMCell(inputs, config.d_model)

    def initial_state(self, lanes: int) -> LSTMState:
        """Zeros."""
        zeros = self.cell.weight_hh.new_zeros(lanes, self.width)
        return LSTMState(zeros, zeros)

    def begin(self, state: LSTMState) -> LSTMState:
        """Nothing to be made ready."""
        return state

    def step(self, x: Tensor, acting: LSTMState, starts: Tensor) -> tuple[Tensor, LSTMState]:
        """Read one position per lane, x (B, inputs)."""
        kept = ~starts[:, None]
        hidden, cell = self.cell(x, (acting.hidden * kept, acting.cell * kept))
        return hidden, LSTMState(hidden.float(), cell.float())

    def end(self, acting: LSTMState) -> LSTMState:
        """Give the state for the next unroll."""
        return acting

    def forward(self, x: Tensor, state: LSTMState, starts: Tensor) -> CoreOutput:
        """Read a window x (B, T, inputs)."""
        outputs = []
        for position, start in zip(x.unbind(1), starts.unbind(1), strict=True):
            hidden, state = self.step(position, state, start)
            outputs.append(hidden)
        return CoreOutput(torch.stack(outputs, dim=1), state.detach(), x.new_zeros(()))


@dataclass(frozen=True)
class NoState(TensorRecord):
    """Nothing, for so many lanes."""

    lanes: Tensor  # (B, 0)


class NoCore(nn.Module):
    """No memory: a layer that sees the present alone."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(inputs, config.d_model), nn.ReLU())

    def initial_state(self, lanes: int) -> NoState:
        """Nothing."""
        return NoState(next(self.parameters()).new_zeros(lanes, 0))

    def begin(self, state: NoState) -> NoState:
        """Nothing to be made ready."""
        return state

    def step(self, x: Tensor, acting: NoState, starts: Tensor) -> tuple[Tensor, NoState]:
        """Read one position per lane, x (B, inputs)."""
        return self.layer(x), acting

    def end(self, acting: NoState) -> NoState:
        """Nothing to be kept."""
        return acting

    def forward(self, x: Tensor, state: NoState, starts: Tensor) -> CoreOutput:
        """Read a window x (B, T, inputs)."""
        return CoreOutput(self.layer(x), state, x.new_zeros(()))


CORES: dict[str, type[TransformerCore] | type[LSTMCore] | type[NoCore]] = {
    "compressive": TransformerCore,
    "txl": TransformerCore,
    "lstm": LSTMCore,
    "none": NoCore,
}
