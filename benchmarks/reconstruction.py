"""The attention-reconstruction loss alone: torch's attention, twice, against the kernels that have both in one.

    python benchmarks/reconstruction.py --size base --json reconstruction.json
    TRITON_INTERPRET=1 python benchmarks/reconstruction.py --size tiny     # that it runs, not how fast

Times of forward, and of forward and backward, of one layer, as in attention.py; errors against torch in float32. Least
work: four products forward, four backwards with new slots alone.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from attention import timed
from torch import Tensor

from compressive.kernels import reconstruction as kernels
from compressive.model.reconstruction import attention_reconstruction

SIZES = {  # lanes, heads, window, evicted, rate, width of a head
    "tiny": (2, 2, 32, 32, 2, 16),
    "base": (16, 8, 512, 512, 4, 64),
    "paper": (8, 8, 768, 768, 3, 128),
}


class Case:
    """Random queries and slots of one layer."""

    def __init__(self, B: int, H: int, T: int, n: int, rate: int, K: int, device: torch.device, dtype: torch.dtype):
        torch.manual_seed(0)
        self.query = torch.randn(B, T, H, K, device=device, dtype=dtype).transpose(1, 2)
        everything = torch.randn(B, 2 * n + T, 2, H, K, device=device, dtype=dtype)
        self.old = everything[:, n : 2 * n]  # evicted slots lie among others
        self.new = torch.randn(B, n // rate, 2, H, K, device=device, dtype=dtype).requires_grad_()
        self.valid = [torch.ones(B, count, dtype=torch.bool, device=device) for count in (n, n // rate)]
        self.counts = torch.ones(B, dtype=torch.bool, device=device)

    def torch(self, dtype: torch.dtype | None = None) -> Tensor:
        """Torch's attention, twice."""
        query, old, new = (x if dtype is None else x.to(dtype) for x in (self.query, self.old, self.new))
        return attention_reconstruction(query, old, new, *self.valid, self.counts)

    def fused(self) -> Tensor:
        """Both in one kernel."""
        return kernels.attention_reconstruction(self.query, self.old, self.new, *self.valid).mean()

    def errors(self) -> dict[str, float]:
        """Relative errors of the loss and of its gradient."""
        exact, found = self.torch(torch.float32), self.fused()
        want, have = (torch.autograd.grad(loss, self.new)[0].float() for loss in (exact, found))
        return {"loss": (found / exact - 1).abs().item(), "gradient": ((have - want).norm() / want.norm()).item()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = Case(*SIZES[options.size], device=device, dtype=dtype)
    found: dict[str, object] = {
        "size": options.size, "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__, "errors": case.errors(),
    }  # fmt: skip
    ways: dict[str, Callable[[], Tensor]] = {"torch": case.torch, "torch, compiled": torch.compile(case.torch)}
    if device.type == "cpu":
        del ways["torch, compiled"]
    for name, way in (ways | {"fused": case.fused}).items():
        found[name] = timed(way, [case.new], options.repeats, device)
    for name, value in found.items():
        print(name, value)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
