"""V-trace: value targets and advantages from actions of an older policy (Espeholt et al. 2018, section 4.1)."""

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """Targets of the value and advantages of the policy, (B, T) each, without gradients."""

    targets: Tensor  # v_s, equation 1
    advantages: Tensor  # rho_s (r_s + gamma v_{s+1} - V(x_s)), section 4.2


@torch.no_grad()
def vtrace(
    log_ratios: Tensor, rewards: Tensor, discounts: Tensor, values: Tensor, rho_bar: float = 1.0, c_bar: float = 1.0
) -> VTrace:
    """Compute V-trace over rollouts of T steps in B environments.

    log_ratios (B, T): log of the actions' probability under the target policy over that under the behaviour policy.
    rewards (B, T). discounts (B, T): gamma, or 0 where the step ended an episode. values (B, T + 1): the last one is
    that of the state after the rollout.
    """
    ratios = log_ratios.exp()
    rho, c = ratios.clamp(max=rho_bar), ratios.clamp(max=c_bar)
    now, after = values[:, :-1], values[:, 1:]
    errors = rho * (rewards + discounts * after - now)  # delta_s V
    corrections, total = [], torch.zeros_like(now[:, 0])
    for t in reversed(range(rewards.shape[1])):  # v_s - V(x_s), by its recursion (remark 1)
        total = errors[:, t] + discounts[:, t] * c[:, t] * total
        corrections.append(total)
    targets = now + torch.stack(corrections[::-1], dim=1)
    targets_after = torch.cat([targets[:, 1:], values[:, -1:]], dim=1)
    return VTrace(targets, rho * (rewards + discounts * targets_after - now))
