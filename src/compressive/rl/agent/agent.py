"""The agent's network: an encoder, the last reward and action, a memory core, a policy and a value head.

B  environments    T  steps of a rollout, the model's window    A  actions
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
from compressive.rl.env import prng


class AgentOutput(NamedTuple):
    """What the learner needs of a rollout."""

    logits: Tensor  # (B, T, A), float32
    values: Tensor  # (B, T + 1), float32; the last, of the observation after the rollout, has no gradient
    compression_loss: Tensor  # ()
    outcomes: Tensor | None  # (B, T), float32: logits that the next choice will be right; None without that head


class Agent(nn.Module):
    """IMPALA's agent (Espeholt et al. 2018); the core that the configuration names replaces its LSTM."""

    def __init__(self, config: AgentRun, observation_shape: Sequence[int], n_actions: int) -> None:
        super().__init__()
        options, width = config.agent, config.memory.d_model
        self.window, self.n_actions = config.memory.window, n_actions
        self.outcome_steps = options.outcome_steps
        self.encoder = build_encoder(observation_shape, options.channels, options.blocks, options.features)
        self.core = CORES[options.core](options.features + 1 + n_actions, config.memory)
        self.policy, self.value = nn.Linear(width, n_actions), nn.Linear(width, 1)
        nn.init.normal_(self.policy.weight, std=0.01)  # the initial policy is close to uniform
        nn.init.zeros_(self.policy.bias)
        self.outcome = nn.Linear(width, 1) if options.outcome_steps else None

    def task_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the policy, value and entropy losses train."""
        return [parameter for name, parameter in self.named_parameters() if "compress" not in name]

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the compression loss trains."""
        return [parameter for name, parameter in self.named_parameters() if "compress" in name]

    def inputs(self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor) -> Tensor:
        """Return the core's input, (n, features + 1 + A), for n observations.

        `action` and `reward`, (n,), are those before the observation. The reward is clipped to ±1. Where `start` (n,)
        marks the first step of an episode, both are zero.
        """
        features: Tensor = self.encoder(observation)
        last_action = F.one_hot(action, self.n_actions).float()
        last = torch.cat([reward.clamp(-1, 1)[:, None], last_action], dim=1).masked_fill(start[:, None], 0)
        return torch.cat([features.float(), last], dim=1)

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (..., A) and values (...), float32."""
        return self.policy(hidden).float(), self.value(hidden).squeeze(-1).float()

    @torch.no_grad()
    def act(self, inputs: Tensor, acting: Any, start: Tensor) -> tuple[Tensor, Any]:
        """Read one step of every environment; return logits (B, A) and the core's next state."""
        hidden, acting = self.core.step(inputs, acting, start)
        return self.policy(hidden).float(), acting

    def forward(
        self, observation: Tensor, action: Tensor, reward: Tensor, start: Tensor, state: TensorRecord
    ) -> AgentOutput:
        """Read a rollout and the observation after it, (B, T + 1) each, from the state at which acting started.

        The value of the last observation depends on the memory of the rollout. The core reads it as the first step of
        the next window, as acting will.
        """
        B, T = start.shape[0], start.shape[1] - 1
        x = self.inputs(*(part.flatten(0, 1) for part in (observation, action, reward, start)))
        x = x.unflatten(0, (B, T + 1))
        out = self.core(x[:, :T], state, start[:, :T])
        logits, values = self.head(out.hidden)
        with torch.no_grad():
            _, last_value = self.head(self.core(x[:, T:], out.state.detach(), start[:, T:]).hidden)
        outcomes = None if self.outcome is None else self.outcome(out.hidden).squeeze(-1).float()
        return AgentOutput(logits, torch.cat([values, last_value], dim=1), out.compression_loss, outcomes)


def sample_actions(logits: Tensor, key: Tensor, counter: Tensor | int, actions: Tensor) -> Tensor:
    """Sample an action per environment, (B,) int64, from logits (B, A) by the Gumbel-max trick.

    The noise depends on the environments' keys (B,) and the counter alone; `actions` (A,) is 0 to A - 1.
    """
    noise = prng.uniform(key[:, None], counter * len(actions) + actions)
    return (logits - (-noise.log()).log()).argmax(dim=1)
