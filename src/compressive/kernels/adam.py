"""Clipping and Adam as one Triton kernel, for all parameters at once.

Torch clips in a pass over all gradients, and then has one for Adam that runs below a GPU's bandwidth. Here gradients
are scaled as they are read, and each number comes and goes once.

A kernel that takes hundreds of tensors finds them by their addresses, in a table on the device. In a captured step the
gradients stay where they are, and so the table does.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK = 1024
"""So many numbers are a program's."""
WARPS = 4
WORD = tl.constexpr(16)
"""Bytes that are read at once, and to whose multiples addresses are aligned."""


@triton.jit
def _tensor(address):
    """The numbers at an address."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.float32)), WORD)


@triton.jit
def _update(addresses, shares, norms, factors, good, clip, fading1, fading2, epsilon, BLOCK: tl.constexpr):
    """Clip and update a block of a parameter, unless the step was no good; `fading` is one minus Adam's beta."""
    share = shares + 4 * tl.program_id(0)
    address, start, size = addresses + 4 * tl.load(share), tl.load(share + 1) * BLOCK, tl.load(share + 2)
    shrink = tl.minimum(clip / (tl.load(norms + tl.load(share + 3)) + 1e-6), 1.0)  # as torch clips
    if tl.load(good) != 0:
        at = start + tl.arange(0, BLOCK)
        parameter, gradient, mean, square = (
            _tensor(address) + at, _tensor(address + 1) + at, _tensor(address + 2) + at, _tensor(address + 3) + at
        )  # fmt: skip
        if start + BLOCK <= size:  # without a mask numbers come four at a time
            _update_block(parameter, gradient, mean, square, None, shrink, factors, fading1, fading2, epsilon)
        else:
            _update_block(parameter, gradient, mean, square, at < size, shrink, factors, fading1, fading2, epsilon)


@triton.jit
def _update_block(parameter, gradient, mean, square, there, shrink, factors, fading1, fading2, epsilon):
    g, p = tl.load(gradient, mask=there) * shrink, tl.load(parameter, mask=there)
    m, v = tl.load(mean, mask=there), tl.load(square, mask=there)
    m += (g - m) * fading1
    v += (g * g - v) * fading2
    p -= tl.div_rn(tl.load(factors) * m, tl.div_rn(tl.sqrt_rn(v), tl.load(factors + 1)) + epsilon)
    tl.store(mean, m, mask=there)
    tl.store(square, v, mask=there)
    tl.store(parameter, p, mask=there)


class ClippedAdam:
    """Updates the parameters of an optimiser of torch's, whose settings and state it shares.

    All parameters are float32, and so are their gradients.
    """

    def __init__(self, optimiser: torch.optim.Adam, groups: Sequence[list[nn.Parameter]], clip: float) -> None:
        self.optimiser, self.groups, self.clip = optimiser, groups, clip
        self.shares: dict[tuple[tuple[int, int], ...], Tensor] = {}  # by sizes and groups of what is updated
        self.spare = torch.empty(0)
        self.kept: list[Tensor] = []  # addresses that captured updates read whenever they are replayed

    def __call__(self, norms: Sequence[Tensor], good: Tensor) -> None:
        """Clip each group of gradients by its norm and take a step, all if `good`, and else nothing."""
        (settings,), state = self.optimiser.param_groups, self.optimiser.state
        updated = [
            (p, _aligned(p.grad), group)  # a copy has to live until the kernel is launched
            for group, members in enumerate(self.groups)
            for p in members
            if p.grad is not None
        ]
        addresses = [
            [x.data_ptr() for x in (p, gradient, state[p]["exp_avg"], state[p]["exp_avg_sq"])]
            for p, gradient, _ in updated
        ]
        steps = [state[p]["step"] for p, _, _ in updated]
        torch._foreach_add_(steps, [good.to(steps[0].dtype)] * len(steps))  # one for all would be asked for its value
        (beta1, beta2), taken = settings["betas"], steps[0].double()
        factors = torch.stack([settings["lr"] / (1 - beta1**taken), (1 - beta2**taken).sqrt()]).float()
        shares = self._shares(tuple((p.numel(), group) for p, _, group in updated), good.device)
        _update[(len(shares),)](
            self._on_device(torch.tensor(addresses), good.device), shares, torch.stack(list(norms)), factors, good,
            self.clip, 1 - beta1, 1 - beta2, settings["eps"], BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def _shares(self, sizes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
        """What each program does: which parameter, which of its blocks, its size, and its group."""
        if sizes not in self.shares:
            shares = [
                (index, block, size, group)
                for index, (size, group) in enumerate(sizes)
                for block in range(triton.cdiv(size, BLOCK))
            ]
            self.shares[sizes] = torch.tensor(shares).to(device)
        return self.shares[sizes]

    def _on_device(self, addresses: Tensor, device: torch.device) -> Tensor:
        """Copy without waiting. What is captured is the copy: its source must stay, and be there.

        Memory that a GPU can copy from cannot be had while a step is captured: that of the step before is taken.
        """
        if device.type != "cuda":
            return addresses
        if torch.cuda.is_current_stream_capturing():
            self.kept.append(self.spare.copy_(addresses))
        else:
            self.spare = addresses.pin_memory()
        return self.spare.to(device, non_blocking=True)


def _aligned(x: Tensor) -> Tensor:
    """As it is, where it lies as a parameter lies; else a copy that does."""
    return x if x.is_contiguous() and x.data_ptr() % WORD.value == 0 else x.clone(memory_format=torch.contiguous_format)
