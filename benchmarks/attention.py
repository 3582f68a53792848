"""Relative attention of one layer: the kernels against plain torch, and against flash attention without positions.

    python benchmarks/attention.py --size base --results attention.json
    python benchmarks/attention.py --size paper --tune              # also times other tile sizes
    python benchmarks/attention.py --size paper --dropout 0.15      # with dropout of the attention weights
    TRITON_INTERPRET=1 python benchmarks/attention.py --size tiny   # checks that it runs, not how fast

Reports times of the forward pass and of forward and backward, and errors against plain torch in float32, which dropout
has none of: masks differ. On a GPU
times are sums of kernel times from the profiler: launched one by one, kernels this short would measure the host.
Results are written after each form and each tile; one that fails holds its error.
"""

import argparse
import inspect
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from compressive.bench import Row, kernel_times, median_seconds, row_or_error
from compressive.kernels import relative_attention as kernels
from compressive.model.attention import heads_of, relative_attention
from compressive.runtime import write_atomically

reference_attention = inspect.unwrap(relative_attention)  # without the dispatcher, which would choose the kernels

Times = dict[str, "float | dict[str, float]"]

SIZES = {  # B, H, T, C, M, K: batch, heads, window, compressed, recent, head width
    "tiny": (2, 2, 32, 16, 32, 16),
    "base": (16, 8, 512, 512, 512, 64),
    "paper": (8, 8, 768, 1152, 768, 128),
}


def main() -> None:
    """Measure, print, and write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dropout", type=float, default=0.0, help="rate of dropout (default: none)")
    parser.add_argument("--tune", action="store_true", help="time the kernels with other tiles, one at a time")
    parser.add_argument("--jobs", type=int, default=12, help="with --tune, how many processes compile at once")
    parser.add_argument("--results", type=Path, help="results file to write")
    parser.add_argument("--json", type=Path, dest="results", help=argparse.SUPPRESS)  # its old name
    options = parser.parse_args()
    case = make_case(options.size, options.dropout)
    device = case.valid.device
    results: dict[str, object] = {
        "size": options.size, "dropout": options.dropout,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__, "product_gigaflops": case.flops / 1e9,
    }  # fmt: skip
    forms: dict[str, Callable[[], Tensor]] = {  # by key in result files
        "fused": case.kernels, "reference": case.reference, "flash": case.flash
    }  # fmt: skip
    if device.type == "cuda":
        forms["reference_compiled"] = torch.compile(case.reference)

    def keep(**found: object) -> None:
        results.update(found)
        if options.results:
            write_atomically(options.results, json.dumps(results, indent=1) + "\n")

    for name, form in forms.items():
        keep(**{name: timed(form, case.leaves, options.repeats, device)})
        print(name, results[name], flush=True)
    if not options.dropout:
        keep(fused_errors=row_or_error(case.errors))
        print("errors of fused", results["fused_errors"], flush=True)
    if options.tune:
        rows: list[dict[str, object]] = []
        for row in tune(options.size, options.dropout, case, options.repeats, options.jobs):
            rows.append(row)
            keep(tiles=rows)


TILES: dict[str, list[kernels.Tile]] = {  # tried by --tune
    "position_scores": [(64, 128, 8, 3), (64, 128, 8, 2), (64, 128, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3)],
    "forward": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 2), (128, 64, 8, 3), (128, 32, 4, 3)],
    "backward_kv": [
        (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3),
        (32, 128, 8, 2), (64, 128, 8, 2), (64, 128, 8, 3),
    ],
    "backward_q_content": [(64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (128, 64, 8, 4)],
    "backward_q_position": [(64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (64, 128, 4, 2), (128, 64, 8, 4)],
    "backward_r": [
        (64, 64, 4, 3), (32, 128, 4, 4), (32, 128, 4, 3), (64, 128, 8, 3), (64, 128, 4, 3), (32, 256, 8, 3)
    ],
}  # fmt: skip


def tune(size: str, dropout: float, case: "Case", repeats: int, jobs: int) -> Iterator[dict[str, object]]:
    """Yield times with each other tile of each kernel, all other kernels with their own."""
    tries = [(kernel, tile) for kernel, tiles in TILES.items() for tile in tiles]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:  # fills the cache of compiled kernels
        list(pool.map(compile_with_tile, repeat(size), repeat(dropout), *zip(*tries, strict=True)))
    for kernel, tile in tries:
        row: dict[str, object] = {"kernel": kernel, "tile": tile, "times": timed_with_tile(case, kernel, tile, repeats)}
        print(*row.values(), flush=True)
        yield row


def compile_with_tile(size: str, dropout: float, kernel: str, tile: kernels.Tile) -> None:
    """Compile the kernels with another tile."""
    timed_with_tile(make_case(size, dropout), kernel, tile, 1)


def timed_with_tile(case: "Case", kernel: str, tile: kernels.Tile, repeats: int) -> Times | str:
    """Times with another tile of one kernel."""
    usual = kernels.TILES[kernel]
    kernels.TILES[kernel] = {max(usual): tile}
    try:
        return timed(case.kernels, case.leaves, repeats, case.valid.device)
    finally:
        kernels.TILES[kernel] = usual


class Case:
    """Random operands of one layer's attention: q (B, T, H, K), kv (B, N, 2, H, K), r (N + T, H, K), u and v (H, K)."""

    def __init__(
        self, B: int, H: int, T: int, C: int, M: int, K: int, dropout: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        N = C + M + T
        self.C, self.dropout, self.flops = C, dropout, 2 * B * H * T * N * K
        torch.manual_seed(0)
        shapes = {"query": (B, T, H, K), "keys": (B, N, 2, H, K), "table": (N + T, H, K), "u": (H, K), "v": (H, K)}
        self.tensors = {  # by key in result files; biases are float32, as parameters are
            name: torch.randn(shape, device=device, dtype=torch.float32 if len(shape) == 2 else dtype).requires_grad_()
            for name, shape in shapes.items()
        }
        self.leaves = list(self.tensors.values())
        self.valid = torch.ones(B, C + M, dtype=torch.bool, device=device)

    def operands(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The operands of `relative_attention`, in a type or as they are."""
        q, kv, r, u, v = (x if dtype is None else x.to(dtype) for x in self.leaves)
        return q.transpose(1, 2), kv, r.transpose(0, 1), u, v, self.valid

    def kernels(self) -> Tensor:
        """The Triton kernels."""
        return kernels.relative_attention(*self.operands(), n_compressed=self.C, dropout=self.dropout)[0]

    def reference(self, dtype: torch.dtype | None = None) -> Tensor:
        """Plain torch, in a type, or under autocast as in training."""
        device = self.valid.device.type
        with torch.autocast(device, torch.bfloat16, enabled=dtype is None and device == "cuda"):
            out: Tensor = reference_attention(*self.operands(dtype), n_compressed=self.C, dropout=self.dropout)[0]
            return out

    def flash(self) -> Tensor:
        """Torch's attention without positions and masks."""
        q, kv, *_ = self.operands()
        return F.scaled_dot_product_attention(q, *heads_of(kv), dropout_p=self.dropout)

    def errors(self) -> Row:
        """Largest error of the kernels against float32, relative to the largest value, of the output and gradients."""
        d_out = torch.randn_like(self.flash())
        exact = self.reference(torch.float32)
        want = [exact, *torch.autograd.grad(exact, self.leaves, d_out.float())]
        out = self.kernels()
        found = [out, *torch.autograd.grad(out, self.leaves, d_out)]
        pairs = zip(("out", *self.tensors), found, want, strict=True)
        return {name: ((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for name, a, b in pairs}


def make_case(size: str, dropout: float = 0.0) -> Case:
    """A case on the GPU in bf16, or without one on the CPU in float32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Case(
        *SIZES[size], dropout=dropout, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
    )


def timed(form: Callable[[], Tensor], leaves: list[Tensor], repeats: int, device: torch.device) -> Times | str:
    """Milliseconds of the forward pass, of forward and backward, and on a GPU of each kernel; or the error."""
    try:
        d_out = torch.randn_like(form())
    except Exception as error:  # reported in place of the times
        return f"{type(error).__name__}: {str(error)[:200]}"

    def both() -> None:
        torch.autograd.grad(form(), leaves, d_out, allow_unused=True)

    result: Times = {}
    for name, run in (("forward_ms", form), ("forward_backward_ms", both)):
        for _ in range(3):
            run()
        if device.type == "cuda":
            times = kernel_times(run, repeats)
            result[name] = sum(times.values())
            if name == "forward_backward_ms":
                result["kernels"] = {key_of(kernel): ms for kernel, ms in times.items() if ms > 0.005}
        else:
            result[name] = 1000 * median_seconds(run, device, repeats)
    return result


def key_of(kernel: str) -> str:
    """Return the beginning of a kernel's name without spaces, as a key of results files."""
    return kernel.removeprefix("void ").replace(" ", "")[:60]


if __name__ == "__main__":
    main()
