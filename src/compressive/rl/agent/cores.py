"""The agent's memory cores behind one interface: they act step by step and learn window by window.

A rollout stores the core's state at its beginning. Acting starts from that state, reads one window step by step and
ends with the next state. Learning reads the same window from the same state in one pass and sees the same memory,
because a rollout is exactly one window: memory is not updated or compressed within it.

B  environments    T  steps of a rollout, the model's window    D  d_model
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compressive.config import ModelConfig
from compressive.model.decoding import DecodingState
from compressive.model.memory import Memory
from compressive.model.records import TensorRecord, saved_as
from compressive.model.transformer import CompressiveTransformer


class CoreOutput(NamedTuple):
    """What a core returns for a window."""

    hidden: Tensor  # (B, T, D)
    state: Any  # at the start of the next window
    compression_loss: Tensor  # ()


class Core(nn.Module):
    """A recurrent memory for B environments, from `inputs` features per step to d_model of the configuration."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__()

    def initial_state(self, n_envs: int) -> Any:
        """Return the state before the first step."""
        raise NotImplementedError

    def begin(self, state: Any) -> Any:
        """Turn the state at the start of a window into the one that `step` carries."""
        return state

    def step(self, x: Tensor, acting: Any, starts: Tensor) -> tuple[Tensor, Any]:
        """Read one step, x (B, inputs); return (B, D) and the next state. `starts` (B,) bool marks new episodes."""
        raise NotImplementedError

    def end(self, acting: Any) -> Any:
        """Return the state for the next rollout; call it after a whole window."""
        return acting

    def forward(self, x: Tensor, state: Any, starts: Tensor) -> CoreOutput:
        """Read a window x (B, T, inputs); `starts` (B, T) bool marks new episodes."""
        raise NotImplementedError


class TransformerCore(Core):
    """The package's own trunk; without compressed memory it is a TransformerXL.

    A layer norm is applied to its input. Unlike token embeddings, image features grow during training, and unbounded
    inputs saturate the attention. Without the norm the small task is learnt less often (docs/log.md).
    """

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__(inputs, config)
        self.embedding = nn.Sequential(nn.Linear(inputs, config.d_model), nn.LayerNorm(config.d_model))
        self.trunk = CompressiveTransformer(config)

    def initial_state(self, n_envs: int) -> Memory:  # noqa: D102
        return self.trunk.initial_memory(n_envs)

    def begin(self, state: Memory) -> DecodingState:
        """Project the memory to keys and values with the current weights, as learning does."""
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
    """The state of an LSTM."""

    hidden: Tensor  # (B, D)
    cell: Tensor  # (B, D)


class LSTMCore(Core):
    """IMPALA's own memory, an LSTM. Its state is reset where an episode starts.

    Forget gates have a bias of 1 at the start, so that it remembers before it has learnt to (Jozefowicz et al. 2015).
    """

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__(inputs, config)
        self.width = config.d_model
        self.cell = nn.LSTMCell(inputs, config.d_model)
        forget = slice(self.width, 2 * self.width)
        with torch.no_grad():
            self.cell.bias_ih[forget] = 1
            self.cell.bias_hh[forget] = 0

    def initial_state(self, n_envs: int) -> LSTMState:  # noqa: D102
        zeros = self.cell.weight_hh.new_zeros(n_envs, self.width)
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
    """An empty state that knows the number of environments."""

    envs: Tensor = field(metadata=saved_as("lanes"))  # (B, 0)


class NoCore(Core):
    """No memory: a layer that reads the current step only."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__(inputs, config)
        self.layer = nn.Sequential(nn.Linear(inputs, config.d_model), nn.ReLU())

    def initial_state(self, n_envs: int) -> NoState:  # noqa: D102
        return NoState(next(self.parameters()).new_zeros(n_envs, 0))

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
