"""Learning: V-trace actor-critic on whole rollouts (Espeholt et al. 2018, section 4.2), plus the compression loss."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from compressive.config.agent import LearnConfig, RewardShape
from compressive.rl.acting import Rollout
from compressive.rl.agent.agent import Agent
from compressive.rl.vtrace import vtrace
from compressive.runtime import autocast

Value = TypeVar("Value")


class UpdateStats(NamedTuple, Generic[Value]):
    """What an update reports: 0-d float32 tensors on the device, or floats once they are read back."""

    loss: Value  # of policy, value and entropy together
    policy_loss: Value
    baseline_loss: Value
    entropy: Value
    outcome_loss: Value  # of the head that predicts choices; 0 without it
    compression_loss: Value
    ratio: Value  # mean importance ratio, target over behaviour policy; 1 on policy
    gradient_norm: Value  # before clipping, of all parameters but the compressors'
    compressor_gradient_norm: Value
    foresight: Value  # correlation of the value before a choice with its outcome, times `foreseen`
    foreseen: Value  # choices of the update; 0 if they are not of both kinds, so that there is no correlation
    finite: Value  # 1 if losses and norms were finite; if 0, no weight was changed


def mean_stats(updates: Sequence[UpdateStats[Tensor]]) -> UpdateStats[Tensor]:
    """Average the statistics of several updates; `finite` is 1 only if all were finite."""
    table = torch.stack([torch.stack(update) for update in updates])  # (updates, fields)
    finite = torch.stack([update.finite for update in updates]).amin()
    return UpdateStats(*table.mean(dim=0).unbind())._replace(finite=finite)


def shaped(reward: Tensor, shape: RewardShape, scale: float) -> Tensor:
    """Return the rewards to learn from: scaled, or `asymmetric`, IMPALA's squashing as in its code."""
    if shape == "scaled":
        return reward * scale
    squashed = torch.tanh(reward / 5)
    return 5 * torch.where(reward < 0, 0.3 * squashed, squashed)


def between(first: float, last: float | None, progress: float) -> float:
    """Return the value at `progress`, from 0 to 1, of one that goes linearly from `first` to `last`; None: constant."""
    return first if last is None else first + (last - first) * min(1.0, progress)


def outcome_prediction_loss(logits: Tensor, choice: Tensor, start: Tensor, steps: int) -> Tensor:
    """Return the cross-entropy of predicting a choice's outcome in the last `steps` steps before it, ().

    logits (B, T) that it will be right; choice (B, T + 1), 1, -1 or 0, and start (B, T + 1) as in a Rollout. Steps
    without a choice in the rollout so soon after them, within the same episode, do not count.
    """
    T = logits.shape[1]
    outcome, waiting = torch.zeros_like(logits), torch.ones_like(logits, dtype=torch.bool)
    for ahead in range(1, steps + 1):  # the choice that action t + ahead - 1 made
        made, began = (F.pad(x[:, ahead:], (0, T + 1 - x[:, ahead:].shape[1]))[:, :T] for x in (choice, start))
        outcome = torch.where(waiting & (made != 0), made.float(), outcome)
        waiting = waiting & (made == 0) & ~began
    counts = outcome != 0
    losses = F.binary_cross_entropy_with_logits(logits, (outcome > 0).float(), reduction="none")
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def correlation(values: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Return the correlation of values (B, T) with the outcomes of choices (B, T), 1 or -1, and their number, () each.

    Where choices are not of both kinds there is none: both are 0.
    """
    made = (choice != 0).float()
    count = made.sum()
    x, y = (part - (part * made).sum() / count.clamp(min=1) for part in (values.detach(), choice.float()))
    covariance, spread = (x * y * made).sum(), ((x * x * made).sum() * (y * y * made).sum()).sqrt()
    return torch.where(spread > 0, covariance / spread.clamp(min=1e-12), 0.0), count * (spread > 0)


class Learner:
    """The agent's losses and its optimiser."""

    def __init__(self, agent: Agent, options: LearnConfig, device: torch.device) -> None:
        self.agent, self.options, self.device = agent, options, device
        self.forward = torch.compile(agent, fullgraph=True) if options.compile else agent
        self.autocast = autocast(device, options.precision)
        self.named = dict(agent.named_parameters())
        self.vtrace = torch.compile(vtrace, fullgraph=True) if options.compile else vtrace
        self.groups = agent.task_parameters(), agent.compressor_parameters()  # clipped separately
        self.optimiser = _optimiser(list(self.named.values()), options)

    def update(self, rollout: Rollout, progress: float = 0.0) -> UpdateStats[Tensor]:
        """Update the agent once from a rollout; a non-finite update changes no weight. No device sync but on MPS.

        `progress`, from 0 to 1, is the share of training that is over, for the rates that change with it.
        """
        options = self.options
        entropy_cost = between(options.entropy_cost, options.final_entropy_cost, progress)
        for parameters in self.optimiser.param_groups:
            parameters["lr"] = between(options.learning_rate, options.final_learning_rate, progress)
        with self.autocast:
            out = self.forward(rollout.observation, rollout.action, rollout.reward, rollout.start, rollout.state)
        log_policy = F.log_softmax(out.logits, dim=-1)
        taken = rollout.action[:, 1:, None]
        chosen = log_policy.gather(-1, taken).squeeze(-1)
        behaviour = F.log_softmax(rollout.logits, dim=-1).gather(-1, taken).squeeze(-1)
        log_ratios = chosen.detach() - behaviour

        rewards = shaped(rollout.reward[:, 1:], options.reward, options.reward_scale)
        discounts = options.discount * (~rollout.start[:, 1:]).float()
        trace = self.vtrace(log_ratios, rewards, discounts, out.values.detach())
        policy_loss = -(trace.advantages * chosen).mean()
        baseline_loss = 0.5 * (trace.targets - out.values[:, :-1]).square().mean()
        entropy = -(log_policy.exp() * log_policy).sum(dim=-1).mean()
        loss = policy_loss + options.baseline_cost * baseline_loss - entropy_cost * entropy
        outcome_loss = loss.new_zeros(())
        if out.outcomes is not None:
            outcome_loss = outcome_prediction_loss(
                out.outcomes, rollout.choice, rollout.start, self.agent.outcome_steps
            )
            loss = loss + options.outcome_cost * outcome_loss
        (loss + out.compression_loss).backward()  # no weighting: the two losses share no parameter

        norms = [_norm(group, loss) for group in self.groups]
        finite = (loss + out.compression_loss + norms[0] + norms[1]).isfinite()
        for group, norm in zip(self.groups, norms, strict=True):
            clip_grads_with_norm_(group, options.clip, norm)
        if options.optimiser == "adam":
            self.optimiser.found_inf = (~finite).float()  # type: ignore[attr-defined]  # the fused kernel then skips the step
        else:  # RMSProp without momentum: a zero gradient changes no weight
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad = torch.where(finite, parameter.grad, 0)
        if self.device.type != "mps" or finite:  # its fused Adam may ignore found_inf (pytorch/pytorch#186360)
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        foresight, foreseen = correlation(out.values[:, :-1], rollout.choice[:, 1:])
        stats = UpdateStats(
            loss=loss,
            policy_loss=policy_loss,
            baseline_loss=baseline_loss,
            entropy=entropy,
            outcome_loss=outcome_loss,
            compression_loss=out.compression_loss,
            ratio=log_ratios.exp().mean(),
            gradient_norm=norms[0],
            compressor_gradient_norm=norms[1],
            foresight=foresight * foreseen,
            foreseen=foreseen,
            finite=finite,
        )
        return UpdateStats(*(value.detach().float() for value in stats))

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights and the optimiser's state, not copied: to save them, or to load into them."""
        state = self.optimiser.state
        optimiser = {f"{name}.{key}": x for name, p in self.named.items() for key, x in state[p].items()}
        return {"model": {name: p.detach() for name, p in self.named.items()}, "optimiser": optimiser}


def _norm(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients) if gradients else like.new_zeros(())


def _optimiser(parameters: list[nn.Parameter], options: LearnConfig) -> torch.optim.Optimizer:
    """Build the optimiser with its state allocated, so that a checkpoint can be loaded into it."""
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
