"""The language model: tokens in, scores of the next token out, trunk and memory between."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressive.config import ModelConfig
from compressive.model.decoding import DecodingState
from compressive.model.embedding import build_embedding
from compressive.model.memory import Memory
from compressive.model.transformer import CompressiveTransformer


@dataclass(frozen=True)
class LMOutput:
    """What one window of tokens gives."""

    logits: Tensor | None  # (B, T, V), when no targets were given
    nll: Tensor | None  # (B, T), -log p of each target in nats, when they were
    memory: Memory
    compression_loss: Tensor  # (), the sum over layers; 0 where there is none
    compression_losses: Tensor  # (n_layers,)


class CompressiveLM(nn.Module):
    """A Compressive Transformer over tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = build_embedding(config)
        self.trunk = CompressiveTransformer(config)

    def initial_memory(self, batch_size: int) -> Memory:
        """Return empty memories for so many lanes, on the model's device and in its type."""
        return self.trunk.initial_memory(batch_size)

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
        building all logits. `starts` (B, T), bool, marks where a new document begins: nothing before it is
        visible from then on.
        """
        tokens = self._checked("tokens", tokens, 2)
        if targets is not None:
            targets = self._checked("targets", targets, 2)
            if targets.shape != tokens.shape:
                raise ValueError(
                    f"targets of shape {tuple(targets.shape)}: expected that of tokens, {tuple(tokens.shape)}"
                )
        out = self.trunk(self.embedding(tokens), memory, starts)
        return LMOutput(
            logits=self.embedding.logits(out.hidden) if targets is None else None,
            nll=None if targets is None else self.embedding.nll(out.hidden, targets),
            memory=out.memory,
            compression_loss=out.compression_loss,
            compression_losses=out.compression_losses,
        )

    def decoding_state(self, memory: Memory) -> DecodingState:
        """Return the state to `step` from: keys and values of all slots, and an empty window."""
        return self.trunk.decoding_state(memory)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: DecodingState, starts: Tensor | None = None) -> tuple[Tensor, DecodingState]:
        """Read one token per lane (B,); return the logits (B, V) that `forward` gives there, and the next state."""
        tokens = self._checked("tokens", tokens, 1)
        hidden, state = self.trunk.step(self.embedding(tokens), state, starts)
        return self.embedding.logits(hidden), state

    def _checked(self, name: str, tokens: Tensor, ndim: int) -> Tensor:
        """Refuse what are not tokens; their range only where a look at the values costs no waiting."""
        V = self.config.vocab_size
        if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
            raise ValueError(f"{name} of type {tokens.dtype}: expected integers, such as torch.long")
        if tokens.ndim != ndim:
            shape = "(batch, time)" if ndim == 2 else "(batch,)"
            raise ValueError(f"{name} of shape {tuple(tokens.shape)}: expected {shape}")
        tokens = tokens.long()
        if torch.compiler.is_compiling() or tokens.device.type != "cpu" or tokens.numel() == 0:
            return tokens
        low, high = (int(extreme) for extreme in tokens.aminmax())
        if low < 0 or high >= V:
            raise ValueError(
                f"{name} from {low} to {high}: expected 0 to {V - 1}; "
                "use the tokeniser that the model was made for, or a larger vocab_size"
            )
        return tokens
