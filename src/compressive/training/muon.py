"""Muon (Jordan et al. 2024) for the matrices of the layers: momentum whose singular values are made about equal.

Adam updates everything else: embeddings, norms, biases, convolutions and recurrent compressors. Not in the paper.

`torch.optim.Muon` reads its learning rate on the host, which a captured step cannot, and takes one matrix at a time.
Here matrices of equal shape are updated together, in batched products, and the device decides whether anything is.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compressive.model.language_model import LanguageModel

MOMENTUM = 0.95
STEPS = 5
"""Newton-Schulz iterations."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the iteration x ← a·x + b·x³ + c·x⁵ on singular values: steep at 0, within 0.7 to 1.2 after five."""
EPS = 1e-7
ADAM_RMS = 0.2
"""Root mean square of an update at rate 1, that of a typical update by Adam (Liu et al. 2025)."""


def layer_matrices(model: LanguageModel) -> dict[str, int]:
    """The parameters that Muon updates, by name, and of how many matrices each consists.

    They are the weights of all linear maps of the layers, compressors among them. Keys and values share a weight, and
    are two matrices: their gradients differ in size. All heads of a map are one matrix.
    """
    names = [
        f"trunk.layers.{index}.{name}.weight"
        for index, layer in enumerate(model.trunk.layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    return {name: 2 if name.endswith("key_value.weight") else 1 for name in names}


class Muon:
    """Clips gradients and updates matrices; its state is there from the beginning, so that it can be read into.

    Args:
        matrices: parameters (rows, columns), and of how many matrices, one below the other, each consists.
        scale: multiplies the learning rate.
        clip: the largest gradient norm.
        weight_decay: share of a parameter that a step at rate 1 takes away, apart from the update (decoupled).

    Attributes:
        state: `momentum` of each parameter, in its shape.

    """

    def __init__(
        self, matrices: Mapping[nn.Parameter, int], scale: float, clip: float, weight_decay: float = 0.0
    ) -> None:
        self.scale, self.clip, self.weight_decay = scale, clip, weight_decay
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.batches: list[
            tuple[list[nn.Parameter], Tensor]
        ] = []  # equal shapes, and their momentum (n, rows, columns)
        shapes = {parameter: (len(parameter) // parts, parameter.shape[1]) for parameter, parts in matrices.items()}
        for shape in sorted(set(shapes.values())):
            members = [parameter for parameter in matrices if shapes[parameter] == shape]
            counts = [matrices[parameter] for parameter in members]
            momentum = members[0].new_zeros(sum(counts), *shape).detach()
            self.batches.append((members, momentum))
            for parameter, part in zip(members, momentum.split(counts), strict=True):
                self.state[parameter] = {"momentum": part.view(parameter.shape)}

    @torch.no_grad()
    def __call__(self, rate: float | Tensor, norm: Tensor, good: Tensor) -> None:
        """Take a step, after gradients are clipped by their norm, a 0-d tensor; nothing changes unless `good`.

        The norm may be that of more parameters. There is no device sync.
        """
        clip = (self.clip / (norm + 1e-6)).clamp(max=1.0)  # as torch clips
        for members, momentum in self.batches:
            gradients = (
                torch.cat([_gradient(parameter).reshape(-1, *momentum.shape[1:]) for parameter in members]) * clip
            )
            ahead = torch.where(good, momentum.lerp(gradients, 1 - MOMENTUM), momentum)
            momentum.copy_(ahead)
            update = orthogonal(gradients.lerp(ahead, MOMENTUM))  # Nesterov's look ahead
            size = rate * (self.scale * ADAM_RMS * math.sqrt(max(momentum.shape[1:])))
            change = torch.where(good, update.to(momentum.dtype) * -size, 0)
            changes = change.split([parameter.numel() // momentum[0].numel() for parameter in members])
            shaped = [part.view(parameter.shape) for part, parameter in zip(changes, members, strict=True)]
            if self.weight_decay:
                kept = torch.where(good, 1 - rate * (self.scale * self.weight_decay), 1)
                torch._foreach_mul_(list[Tensor](members), kept)
            torch._foreach_add_(list[Tensor](members), shaped)


def orthogonal(x: Tensor) -> Tensor:
    """Each matrix of x (n, rows, columns) with its singular values brought close to 1, by Newton-Schulz iterations.

    On a GPU in bf16, which is precise enough: they need not be exactly 1.
    """
    if x.is_cuda:
        x = x.bfloat16()
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient; zeros where it took no part."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
