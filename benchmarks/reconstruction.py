"""The attention-reconstruction loss of one layer: one kernel against torch's attention, called twice.

    python benchmarks/reconstruction.py --size base --results reconstruction.json
    TRITON_INTERPRET=1 python benchmarks/reconstruction.py --size tiny     # checks that it runs, not how fast

Reports times of the forward pass and of forward and backward, as attention.py does, and errors against torch in
float32. The least work is four products forward, and four backward with the new slots only.
"""

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import torch
from attention import timed
from torch import Tensor

from compressive.kernels import reconstruction as kernels
from compressive.model.reconstruction import attention_reconstruction

reference_loss = inspect.unwrap(attention_reconstruction)  # without the dispatcher, which would choose the kernels

SIZES = {  # B, H, T, n, rate, K: batch, heads, window, evicted slots, compression rate, head width
    "tiny": (2, 2, 32, 32, 2, 16),
    "base": (16, 8, 512, 512, 4, 64),
    "paper": (8, 8, 768, 768, 3, 128),
}


class Case:
    """Random queries and slots of one layer."""

    def __init__(self, B: int, H: int, T: int, n: int, rate: int, K: int, device: torch.device, dtype: torch.dtype):
        torch.manual_seed(0)
        self.q = torch.randn(B, T, H, K, device=device, dtype=dtype).transpose(1, 2)
        all_slots = torch.randn(B, 2 * n + T, 2, H, K, device=device, dtype=dtype)
        self.old = all_slots[:, n : 2 * n]  # a slice, as evicted slots are
        self.new = torch.randn(B, n // rate, 2, H, K, device=device, dtype=dtype).requires_grad_()
        self.valid = [torch.ones(B, count, dtype=torch.bool, device=device) for count in (n, n // rate)]

    def torch(self, dtype: torch.dtype | None = None) -> Tensor:
        """Torch's attention, twice."""
        operands = (x if dtype is None else x.to(dtype) for x in (self.q, self.old, self.new))
        loss: Tensor = reference_loss(*operands, *self.valid).mean()
        return loss

    def kernels(self) -> Tensor:
        """Both attentions in one kernel."""
        return kernels.attention_reconstruction(self.q, self.old, self.new, *self.valid).mean()

    def errors(self) -> dict[str, float]:
        """Relative errors of the kernels' loss and gradient."""
        exact, found = self.torch(torch.float32), self.kernels()
        want, have = (torch.autograd.grad(loss, self.new)[0].float() for loss in (exact, found))
        return {"loss": (found / exact - 1).abs().item(), "gradient": ((have - want).norm() / want.norm()).item()}


def main() -> None:
    """Measure, print, and write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--results", type=Path, help="results file to write")
    parser.add_argument("--json", type=Path, dest="results", help=argparse.SUPPRESS)  # its old name
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = Case(*SIZES[options.size], device=device, dtype=dtype)
    results: dict[str, object] = {
        "size": options.size, "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__, "errors": case.errors(),
    }  # fmt: skip
    forms: dict[str, Callable[[], Tensor]] = {"torch": case.torch}  # by key in result files
    if device.type == "cuda":
        forms["torch_compiled"] = torch.compile(case.torch)
    forms["fused"] = case.kernels
    for name, form in forms.items():
        results[name] = timed(form, [case.new], options.repeats, device)
    for name, value in results.items():
        print(name, value)
    if options.results:
        options.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
