"""Linear maps as the model calls them."""

from torch import Tensor, nn
from torch.nn import functional as F

from compressive.kernels.dispatch import operation


@operation("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False, n_frozen: int = 0) -> Tensor:
    """Map x (..., D) by weight (E, D) and bias (E,) to (..., E), followed by a ReLU if asked.

    The first `n_frozen` rows of x (B, N, D) are detached, so their gradient may be left out.
    """
    out = F.linear(x, weight, bias)
    return F.relu(out) if relu else out


class Linear(nn.Linear):
    """`nn.Linear`, by way of the operation."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., D)."""
        return linear(x, self.weight, self.bias)
