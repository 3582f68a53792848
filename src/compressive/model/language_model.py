"""The language model: tokens in, scores of the next token out, trunk and memory between."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compressive.config import ModelConfig, Precision
from compressive.config.documented import documented
from compressive.model.decoding import DecodingState
from compressive.model.embedding import build_embedding
from compressive.model.memory import Memory
from compressive.model.transformer import CompressiveTransformer, TrunkOutput

IGNORED = -100
"""Targets of this value are ignored, as torch's losses do."""


@documented
@dataclass(frozen=True)
class LMOutput:
    """What one window of tokens gives."""

    logits: Tensor | None
    """Scores of all tokens, (B, T, V); None if targets were given."""
    nll: Tensor | None
    """-log p of each target in nats, (B, T), 0 for targets of -100; None if no targets were given."""
    memory: Memory
    """Memory to pass on with the next window."""
    compression_loss: Tensor
    """Sum over layers, (); 0 where there is none."""
    compression_losses: Tensor
    """The same by layer, (n_layers,)."""


class Head(Protocol):
    """Both ends of a language model: tokens to activations, and activations to scores of the next token."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Embed tokens, (...) to (..., width of the trunk's input)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all tokens, (..., width of the trunk's output) to (..., V)."""

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """-log p of one token each, (B, T, width) and (B, T) to (B, T)."""


class Trunk(Protocol):
    """What is between: windows in and out, with a memory that is carried and a state to decode from."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Its layers, first to last."""

    def __call__(self, x: Tensor, memory: Any, starts: Tensor | None = None) -> TrunkOutput:
        """Read a window (B, T, width)."""

    def initial_memory(self, batch_size: int) -> Any:
        """The memory before anything was read."""

    def compressor_parameters(self) -> list[nn.Parameter]:
        """What the compression loss trains."""

    def decoding_state(self, memory: Any) -> Any:
        """The state to `step` from."""

    def step(self, x: Tensor, state: Any, starts: Tensor | None = None) -> tuple[Tensor, Any]:
        """Read one position per batch row (B, width)."""


class SequenceConfig(Protocol):
    """What every configuration of a sequence model has."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""

    @property
    def window(self) -> int:
        """Longest stretch of tokens read at once."""


class LanguageModel(nn.Module):
    """A trunk between an embedding and its scores: what trains, scores and samples needs to know no more."""

    config: SequenceConfig
    embedding: Head
    trunk: Trunk

    def initial_memory(self, batch_size: int, precision: Precision = "fp32") -> Memory:
        """Return empty memories for a batch, on the model's device.

        They have the model's type. With `precision="bf16"`, for products under autocast, activations are in bf16, as
        all products with them are; usage and flags stay.
        """
        memory: Memory = self.trunk.initial_memory(batch_size)
        return memory.map(lambda x: x.bfloat16() if x.ndim == 3 else x) if precision == "bf16" else memory

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Return exactly the parameters that the compression loss trains."""
        return self.trunk.compressor_parameters()

    def task_parameters(self) -> list[nn.Parameter]:
        """Return all the others: what the task loss trains."""
        return [parameter for name, parameter in self.named_parameters() if "compress" not in name]

    def forward(
        self, tokens: Tensor, memory: Memory, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> LMOutput:
        """Read a window of tokens (B, T), T at most `window`.

        Gives logits for every position or, with targets (B, T), their negative log-likelihood without ever
        building all logits. Targets of -100 are ignored: their likelihood is given as 0, so that a mean over the others
        is `out.nll.sum() / (targets != -100).sum()`. `starts` (B, T), bool, marks where a new document begins: nothing
        before it is visible from then on. Raises TypeError for what is no tensor or no memory, ValueError for tokens
        of other types or shapes.
        """
        tokens = self._checked("tokens", tokens, 2)
        scored = None if targets is None else self._checked_targets(targets, tokens)
        out = self.trunk(self.embedding(tokens), memory, starts)
        return LMOutput(
            logits=self.embedding.logits(out.hidden) if scored is None else None,
            nll=None if scored is None else self.embedding.nll(out.hidden, scored[0]).masked_fill(scored[1], 0),
            memory=out.memory,
            compression_loss=out.compression_loss,
            compression_losses=out.compression_losses,
        )

    def decoding_state(self, memory: Memory) -> DecodingState:
        """Return the state to `step` from: keys and values of all slots, and an empty window."""
        state: DecodingState = self.trunk.decoding_state(memory)
        return state

    @torch.no_grad()
    def step(self, tokens: Tensor, state: DecodingState, starts: Tensor | None = None) -> tuple[Tensor, DecodingState]:
        """Read one token per row (B,); return the logits (B, V) that `forward` gives there, and the next state."""
        tokens = self._checked("tokens", tokens, 1)
        hidden, state = self.trunk.step(self.embedding(tokens), state, starts)
        return self.embedding.logits(hidden), state

    def _checked_targets(self, targets: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Targets without those that are ignored, and which those are, bool."""
        targets = _integers("targets", targets, 2)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets of shape {tuple(targets.shape)}: expected that of tokens, {tuple(tokens.shape)}")
        ignored = targets == IGNORED
        targets = targets.masked_fill(ignored, 0)
        self.check_range("targets", targets)
        return targets, ignored

    def _checked(self, name: str, tokens: Tensor, ndim: int) -> Tensor:
        """Tokens as long integers; refuse what are none."""
        tokens = _integers(name, tokens, ndim)
        self.check_range(name, tokens)
        return tokens

    def check_range(self, name: str, tokens: Tensor) -> None:
        """Raise ValueError for tokens that the model does not have, where a look at the values costs no waiting."""
        if torch.compiler.is_compiling() or tokens.device.type != "cpu" or tokens.numel() == 0:
            return
        V = self.config.vocab_size
        low, high = (int(extreme) for extreme in tokens.aminmax())
        if low < 0 or high >= V:
            raise ValueError(
                f"{name} from {low} to {high}: expected 0 to {V - 1}; "
                "use the tokeniser that the model was made for, or a larger vocab_size"
            )


def _integers(name: str, tokens: Tensor, ndim: int) -> Tensor:
    """Tokens as long integers; refuse other types and shapes."""
    shape = "(batch, time)" if ndim == 2 else "(batch,)"
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"{name} of type {type(tokens).__name__}: expected a tensor of integers {shape}, as torch.tensor(...) makes"
        )
    if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
        raise ValueError(f"{name} of type {tokens.dtype}: expected integers, such as torch.long")
    if tokens.ndim != ndim:
        raise ValueError(f"{name} of shape {tuple(tokens.shape)}: expected {shape}")
    return tokens.long()


class CompressiveLM(LanguageModel):
    """A Compressive Transformer over tokens."""

    config: ModelConfig
    trunk: CompressiveTransformer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = build_embedding(config)
        self.trunk = CompressiveTransformer(config)
