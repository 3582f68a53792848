"""Learning: V-trace actor-critic on whole unrolls (Espeholt et al. 2018, section 4.2), and compression beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from compressive.config.agent import LearnConfig, RewardShape
from compressive.rl.acting import Unroll
from compressive.rl.agent.agent import Agent
from compressive.rl.vtrace import vtrace

FIGURES = (
    "loss", "policy_loss", "baseline_loss", "entropy", "compression_loss",
    "ratio", "gradient_norm", "compressor_gradient_norm", "finite",
)  # fmt: skip
"""What an update gives to report, in this order; the last is whether all of it was finite."""


def shaped(reward: Tensor, shape: RewardShape, scale: float) -> Tensor:
    """Turn rewards into what is learnt from; `asymmetric` is IMPALA's optimistic squashing, as its code has it."""
    if shape == "scaled":
        return reward * scale
    squashed = torch.tanh(reward / 5)
    return 5 * torch.where(reward < 0, 0.3 * squashed, squashed)


class Learner:
    """Updates an agent."""

    def __init__(self, agent: Agent, options: LearnConfig, device: torch.device) -> None:
        self.agent, self.options = agent, options
        self.forward = torch.compile(agent, fullgraph=True) if options.compile else agent
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16")
        self.named = dict(agent.named_parameters())
        self.groups = agent.task_parameters(), agent.compressor_parameters()  # they are clipped apart
        self.optimiser = _optimiser(list(self.named.values()), options)

    def update(self, unroll: Unroll) -> Tensor:
        """Learn from an unroll; returns FIGURES, on the device. An update that is not finite changes no weight."""
        options = self.options
        with self.autocast:
            out = self.forward(unroll.observation, unroll.action, unroll.reward, unroll.start, unroll.state)
        log_policy = F.log_softmax(out.logits, dim=-1)
        taken = unroll.action[:, 1:, None]
        chosen = log_policy.gather(-1, taken).squeeze(-1)
        behaviour = F.log_softmax(unroll.logits, dim=-1).gather(-1, taken).squeeze(-1)
        log_ratios = chosen.detach() - behaviour

        rewards = shaped(unroll.reward[:, 1:], options.reward, options.reward_scale)
        discounts = options.discount * (~unroll.start[:, 1:]).float()
        trace = vtrace(log_ratios, rewards, discounts, out.values.detach())
        policy_loss = -(trace.advantages * chosen).mean()
        baseline_loss = 0.5 * (trace.targets - out.values[:, :-1]).square().mean()
        entropy = -(log_policy.exp() * log_policy).sum(dim=-1).mean()
        loss = policy_loss + options.baseline_cost * baseline_loss - options.entropy_cost * entropy
        (loss + out.compression_loss).backward()  # they share no parameter, so no constant weighs them

        norms = [_norm(group, loss) for group in self.groups]
        finite = (loss + out.compression_loss + norms[0] + norms[1]).isfinite()
        for group, norm in zip(self.groups, norms, strict=True):
            clip_grads_with_norm_(group, options.clip, norm)
        if options.optimiser == "adam":
            self.optimiser.found_inf = (~finite).float()  # type: ignore[attr-defined]  # the fused kernel then does nothing
        else:  # RMSProp without momentum stays where it is if the gradient is zero
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad = torch.where(finite, parameter.grad, 0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        ratio = log_ratios.exp().mean()
        figures = (loss, policy_loss, baseline_loss, entropy, out.compression_loss, ratio, *norms, finite.float())
        return torch.stack([figure.detach().float() for figure in figures])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Weights and the optimiser's state, as the tensors that they are: to be saved, or to be read into."""
        state = self.optimiser.state
        optimiser = {f"{name}.{key}": x for name, p in self.named.items() for key, x in state[p].items()}
        return {"model": {name: p.detach() for name, p in self.named.items()}, "optimiser": optimiser}


def _norm(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients) if gradients else like.new_zeros(())


def _optimiser(parameters: list[nn.Parameter], options: LearnConfig) -> torch.optim.Optimizer:
    """With its state there from the beginning, so that a checkpoint can be read into it."""
    optimiser: torch.optim.Optimizer
    moments: tuple[str, ...]
    if options.optimiser == "adam":
        moments = ("exp_avg", "exp_avg_sq")
        optimiser = torch.optim.Adam(parameters, lr=options.learning_rate, eps=options.epsilon, fused=True)
    else:
        moments = ("square_avg",)
        optimiser = torch.optim.RMSprop(parameters, lr=options.learning_rate, eps=options.epsilon, foreach=True)
    for parameter in parameters:
        step_device = parameter.device if options.optimiser == "adam" else "cpu"
        optimiser.state[parameter] = {"step": torch.zeros((), device=step_device)} | {
            name: torch.zeros_like(parameter) for name in moments
        }
    return optimiser
