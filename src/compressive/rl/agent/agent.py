"""The agent's network: what it sees, its last reward and action, a memory, a policy and a value.

B  lanes    T  steps of an unroll, the model's window    A  actions
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.config.agent import AgentRun
from compressive.model.records import TensorRecord
from compressive.rl.agent.cores import CORES
from compressive.rl.agent.networks import build_encoder


class AgentOutput(NamedTuple):
    """What an unroll gives to learn from."""

    logits: Tensor  # (B, T, A), float32
    values: Tensor  # (B, T + 1), float32; the last, of what comes after the unroll, without a gradient
    compression_loss: Tensor  # ()


class Agent(nn.Module):
    """IMPALA's agent (Espeholt et al. 2018), its LSTM replaced by the core that the configuration names."""

    def __init__(self, config: AgentRun, observation_shape: Sequence[int], n_actions: int) -> None:
        super().__init__()
        options, width = config.agent, config.memory.d_model
        self.window, self.n_actions = config.memory.window, n_actions
        self.encoder = build_encoder(observation_shape, options.channels, options.blocks, options.features)
        self.core = CORES[options.core](options.features + 1 + n_actions, config.memory)
        self.policy, self.value = nn.Linear(width, n_actions), nn.Linear(width, 1)
        nn.init.normal_(self.policy.weight, std=0.01)  # all actions about as likely to begin with
        nn.init.zeros_(self.policy.bias)

    def task_parameters(self) -> list[nn.Parameter]:
        """Return what rewards train."""
        return [parameter for name, parameter in self.named_parameters() if "compress" not in name]

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Return what the compression loss trains."""
        return [parameter for name, parameter in self.named_parameters() if "compress" in name]

    def inputs(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """What the core is given, (n, features + 1 + A), for n observations; reward and action are those before them.

        The reward is clipped to ±1; where an episode starts there was none, and no action.
        """
        features: Tensor = self.encoder(observation)
        before = F.one_hot(action, self.n_actions).float()
        known = torch.cat([reward.clamp(-1, 1)[:, None], before], dim=1).masked_fill(start[:, None], 0)
        return torch.cat([features.float(), known], dim=1)

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (..., A) and values (...), float32."""
        return self.policy(hidden).float(), self.value(hidden).squeeze(-1).float()

    @torch.no_grad()
    def act(self, inputs: Tensor, acting: Any, start: Tensor) -> tuple[Tensor, Any]:
        """Read one step of every lane; return logits (B, A) and what to act from next."""
        hidden, acting = self.core.step(inputs, acting, start)
        return self.policy(hidden).float(), acting

    def forward(
        self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor, state: TensorRecord
    ) -> AgentOutput:
        """Read an unroll and the observation after it, (B, T + 1) each, from the state that acting began with.

        The value of what comes after needs the memory of what was: the core reads that one observation as the
        beginning of its next window, as acting will.
        """
        B, T = start.shape[0], start.shape[1] - 1
        x = self.inputs(*(part.flatten(0, 1) for part in (observation, action, reward, start)))
        x = x.unflatten(0, (B, T + 1))
        out = self.core(x[:, :T], state, start[:, :T])
        logits, values = self.head(out.hidden)
        with torch.no_grad():
            _, after = self.head(self.core(x[:, T:], out.state.detach(), start[:, T:]).hidden)
        return AgentOutput(logits, torch.cat([values, after], dim=1), out.compression_loss)
