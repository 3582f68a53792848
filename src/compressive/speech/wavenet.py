"""WaveNet (van den Oord et al. 2016), the baseline of the paper's section 5.6, in the place of the trunk.

Its memory is what its convolutions still need of the past: of each layer's input the last (kernel − 1) × dilation
samples, together the receptive field less one. So it reads window after window as the Compressive Transformer does, in
the same trainer, and every window gives what one pass over the whole clip would. As TransformerXL's, this memory
carries no gradient: in training it stops where a window of 3,840 samples begins. Generation keeps the same samples in
circular buffers (Paine et al. 2016).

B batch rows, T samples in a window, R residual, S skip channels, K taps of a kernel, d the dilation.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config import WaveNetConfig
from compressive.model.decoding import OwnedRecord
from compressive.model.embedding import linear_nll
from compressive.model.language_model import LanguageModel
from compressive.model.mixture import LogisticMixture
from compressive.model.records import TensorRecord, saved_as
from compressive.model.transformer import TrunkOutput


@dataclass(frozen=True)
class WaveNetMemory(TensorRecord):
    """The past inputs that the convolutions still read."""

    inputs: tuple[Tensor, ...]  # per layer (B, (K - 1)·d, R), oldest first
    age: Tensor  # (B,): samples since the clip began; no tap reaches further back

    @property
    def batch_size(self) -> int:
        """Number of batch rows."""
        return len(self.age)


@dataclass(frozen=True)
class WaveNetState(OwnedRecord):
    """The same as circular buffers, batch rows may be at different positions."""

    inputs: tuple[Tensor, ...]  # per layer (B, (K - 1)·d, R); the slot that is written next holds the oldest
    age: Tensor  # (B,)
    position: Tensor  # (B,): samples read so far
    remaining: int = field(default=sys.maxsize, metadata=saved_as("room"))  # there are no windows to end


class WaveNetLayer(nn.Module):
    """A gated, dilated convolution, added to the activations and to the skip sum."""

    def __init__(self, config: WaveNetConfig, index: int) -> None:
        super().__init__()
        R = config.residual
        self.dilation, self.kernel = config.dilations[index], config.kernel
        self.dropout = nn.Dropout(config.dropout)
        self.convolution = nn.Linear(config.kernel * R, 2 * R)  # taps side by side, oldest first
        self.residual = nn.Linear(R, R) if index < config.n_layers - 1 else None  # nothing reads the last one's
        self.skip = nn.Linear(R, config.skip)
        for linear in (self.convolution, self.residual, self.skip):
            if linear is not None:
                _initialise(linear)

    def forward(self, h: Tensor, before: Tensor, age: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read h (B, T, R) after the inputs `before`; gives the next layer's input, the skip and the next `before`.

        The dilation is read off a shape, so that what is compiled for one layer serves those of any other.
        """
        T, dilation = h.shape[1], before.shape[1] // max(1, self.kernel - 1)
        inputs = torch.cat([before, h], dim=1)
        taps = [inputs[:, k * dilation :][:, :T] for k in range(self.kernel)]
        h, skip = self.mix(h, taps, age, dilation)
        kept = inputs[:, inputs.shape[1] - before.shape[1] :]
        return h, skip, kept.detach().to(before.dtype).contiguous()  # a copy, so that the whole input can be freed

    def step(self, h: Tensor, buffer: Tensor, age: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """The same for one sample per row, h (B, R), which takes the oldest one's place in the buffer."""
        rows, size = torch.arange(len(h), device=h.device), buffer.shape[1]
        taps = [buffer[rows, (position + k * self.dilation) % size] for k in range(self.kernel - 1)]
        output = self.mix(h, [*taps, h], age, self.dilation)
        if size:
            buffer[rows, position % size] = h.to(buffer.dtype)
        return output

    def mix(self, h: Tensor, taps: Sequence[Tensor], age: Tensor, dilation: int) -> tuple[Tensor, Tensor]:
        """The gated unit, given the taps (..., R), oldest first, and how many samples of the clip came before."""
        reach = [(self.kernel - 1 - k) * dilation for k in range(self.kernel)]
        seen = [tap * (age >= distance)[..., None] for tap, distance in zip(taps, reach, strict=True)]
        signal, gate = self.convolution(self.dropout(torch.cat(seen, dim=-1))).chunk(2, dim=-1)
        unit = torch.tanh(signal) * torch.sigmoid(gate)
        return h if self.residual is None else h + self.residual(unit), self.skip(unit)


class WaveNet(nn.Module):
    """From (B, T, R) to (B, T, S), with memory; used as a CompressiveTransformer is."""

    def __init__(self, config: WaveNetConfig) -> None:
        super().__init__()
        self.config = config
        self.layers: Sequence[WaveNetLayer] = nn.ModuleList(  # type: ignore[assignment]
            WaveNetLayer(config, index) for index in range(config.n_layers)
        )
        self.output = nn.Linear(config.skip, config.skip)
        _initialise(self.output)

    def compressor_parameters(self) -> list[nn.Parameter]:
        """There are none."""
        return []

    def initial_memory(self, batch_size: int) -> WaveNetMemory:
        """Silence, none of it seen."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected at least 1")
        weight, config = self.output.weight, self.config
        return WaveNetMemory(
            tuple(
                weight.new_zeros(batch_size, (config.kernel - 1) * dilation, config.residual)
                for dilation in config.dilations
            ),
            torch.zeros(batch_size, dtype=torch.long, device=weight.device),
        )

    def forward(self, x: Tensor, memory: WaveNetMemory, starts: Tensor | None = None) -> TrunkOutput:
        """Read a window x (B, T, R), T at most `window`; `starts` (B, T) marks where new clips begin."""
        self._check(x, memory, starts)
        time = torch.arange(x.shape[1], device=x.device)
        age = memory.age[:, None] + time
        if starts is not None:
            latest = torch.where(starts, time, -1).cummax(dim=1).values
            age = torch.where(latest >= 0, time - latest, age)
        h, total, kept = x, None, []
        for layer, before in zip(self.layers, memory.inputs, strict=True):
            h, skip, after = layer(h, before, age)
            total = skip if total is None else total + skip
            kept.append(after)
        assert total is not None
        losses = x.new_zeros(len(self.layers))
        return TrunkOutput(
            self._finish(total),
            WaveNetMemory(tuple(kept), age[:, -1] + 1),  # type: ignore[arg-type]  # in the place of a Memory
            losses.sum(),
            losses,
        )

    @torch.no_grad()
    def decoding_state(self, memory: WaveNetMemory) -> WaveNetState:
        """Return the state to `step` from."""
        return WaveNetState(memory.inputs, memory.age, torch.zeros_like(memory.age)).clone().owning()

    @torch.no_grad()
    def step(self, x: Tensor, state: WaveNetState, starts: Tensor | None = None) -> tuple[Tensor, WaveNetState]:
        """Read one sample per row, x (B, R); `starts` (B,) marks new clips."""
        state = state.claim()
        age = state.age if starts is None else state.age.masked_fill(starts, 0)
        h, total = x, None
        for layer, buffer in zip(self.layers, state.inputs, strict=True):
            h, skip = layer.step(h, buffer, age, state.position)
            total = skip if total is None else total + skip
        assert total is not None
        state = dataclasses.replace(state, age=age + 1, position=state.position + 1)
        return self._finish(total), state.owning()

    def _finish(self, total: Tensor) -> Tensor:
        """From the skip sum, scaled to unit size, to the features that the head reads."""
        return F.relu(self.output(F.relu(total / math.sqrt(len(self.layers)))))

    def _check(self, x: Tensor, memory: WaveNetMemory, starts: Tensor | None) -> None:
        R, window = self.config.residual, self.config.window
        if x.ndim != 3 or x.shape[2] != R or not 1 <= x.shape[1] <= window:
            raise ValueError(f"input of shape {tuple(x.shape)}: expected (batch, 1 to window={window}, residual={R})")
        if memory.batch_size != x.shape[0]:
            raise ValueError(
                f"memory of batch size {memory.batch_size}: the input has {x.shape[0]}; "
                f"make it with initial_memory(batch_size={x.shape[0]})"
            )
        if starts is not None and (starts.dtype != torch.bool or starts.shape != x.shape[:2]):
            raise ValueError(
                f"starts of type {starts.dtype} and shape {tuple(starts.shape)}: expected a bool mask of the "
                f"input's (batch, time) = {tuple(x.shape[:2])}"
            )


class Softmax(nn.Module):
    """A table of samples in, a linear softmax out, of widths of their own."""

    def __init__(self, vocab_size: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, d_in)
        self.output = nn.Linear(d_out, vocab_size)
        _initialise(self.output)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed samples of any shape, (...) to (..., d_in)."""
        embedded: Tensor = self.table(tokens)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Score all samples, (..., d_out) to (..., V)."""
        scores: Tensor = self.output(hidden)
        return scores

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return -log p of one sample each, (B, T, d_out) and (B, T) to (B, T)."""
        rows = linear_nll(hidden.flatten(0, 1), self.output.weight, self.output.bias, targets.flatten())
        return rows.view_as(targets)


def _initialise(linear: nn.Linear) -> None:
    """Initialise so that outputs have the scale of the input."""
    nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    nn.init.zeros_(linear.bias)


class WaveNetLM(LanguageModel):
    """WaveNet over samples."""

    config: WaveNetConfig
    trunk: WaveNet

    def __init__(self, config: WaveNetConfig) -> None:
        super().__init__()
        widths = config.vocab_size, config.residual, config.skip
        self.config = config
        self.embedding = LogisticMixture(*widths, config.mixtures) if config.head == "logistics" else Softmax(*widths)
        self.trunk = WaveNet(config)
