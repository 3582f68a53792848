"""A discretised mixture of logistics over ordered codes (Salimans et al. 2017): the head for 16-bit audio.

The code c of V stands for the amplitude (c - V/2) / (V/2) and owns the interval of half a step around it; the two
extreme codes own all that lies beyond them as well. The probability of a code is what the mixture has in its interval,
so all V sum to 1. Everything is computed in the log domain, in float32 at least.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressive.model.attention import upcast

LEAST_LOG_SCALE = -14.0
"""About a thirtieth of a 16-bit step: nothing is gained by a sharper logistic."""
BYTE = 256


class LogisticMixture(nn.Module):
    """Embeds codes of up to 16 bits by their two bytes, and scores them by a mixture of logistics.

    A table of bytes for each half can hold any linear function of the amplitude, which one table of 65,536 rows could
    only learn row by row.
    """

    def __init__(self, vocab_size: int, d_in: int, d_out: int, mixtures: int) -> None:
        super().__init__()
        self.vocab_size, self.mixtures = vocab_size, mixtures
        self.high = nn.Parameter(torch.empty(-(-vocab_size // BYTE), d_in).normal_(std=math.sqrt(0.5)))
        self.low = nn.Parameter(torch.empty(BYTE, d_in).normal_(std=math.sqrt(0.5)))
        self.output = nn.Linear(d_out, 3 * mixtures)
        nn.init.normal_(self.output.weight, std=0.1 * d_out**-0.5)
        with torch.no_grad():  # at first a broad mixture, spread over quiet audio
            self.output.bias.copy_(
                torch.cat([torch.zeros(mixtures), torch.linspace(-0.2, 0.2, mixtures), torch.full((mixtures,), -3.0)])
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed codes of any shape, (...) to (..., d_in)."""
        return F.embedding(tokens // BYTE, self.high) + F.embedding(tokens % BYTE, self.low)

    def logits(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all codes, (..., d_out) to (..., V)."""
        codes = torch.arange(self.vocab_size, device=hidden.device)
        weights, means, log_scales = (x[..., None, :] for x in self._mixture(hidden))
        return self._log_probability(codes, weights, means, log_scales)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return -log p of one code each, (B, T, d_out) and (B, T) to (B, T)."""
        return -self._log_probability(targets, *self._mixture(hidden))

    def _mixture(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-weights, means and log-scales, (..., K) each; never in half precision, whose 8 bits cannot name 16."""
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = upcast(self.output.weight), upcast(self.output.bias)
            weights, means, log_scales = F.linear(upcast(hidden), weight, bias).chunk(3, dim=-1)
        return weights.log_softmax(dim=-1), means, log_scales.clamp(min=LEAST_LOG_SCALE)

    def _log_probability(self, codes: Tensor, weights: Tensor, means: Tensor, log_scales: Tensor) -> Tensor:
        """Log of the mixture's mass in the interval of each code, (...) and (..., K) to (...).

        Between the edges a < b, in units of the scale, a logistic has σ(b) − σ(a) = σ(b) σ(−a) (1 − e^(a − b)), which
        loses nothing where both edges are far out on one side.
        """
        half, inverse = self.vocab_size / 2, torch.exp(-log_scales)
        centre = (codes - half).to(means.dtype)[..., None] / half - means
        upper, lower = (centre + 0.5 / half) * inverse, (centre - 0.5 / half) * inverse
        inside = torch.log(-torch.expm1(-inverse / half))
        is_first, is_last = (codes == 0)[..., None], (codes == self.vocab_size - 1)[..., None]
        log_mass = torch.where(is_last, 0.0, F.logsigmoid(upper)) + torch.where(is_first, 0.0, F.logsigmoid(-lower))
        return torch.logsumexp(weights + log_mass + torch.where(is_first | is_last, 0.0, inside), dim=-1)
