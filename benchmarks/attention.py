"""Attention alone: the fused kernels against plain torch, and flash attention without positions.

    python benchmarks/attention.py --size base --json attention.json
    python benchmarks/attention.py --size paper --tune              # other sizes of tiles too
    TRITON_INTERPRET=1 python benchmarks/attention.py --size tiny   # that it runs, not how fast

Times of forward, and of forward and backward, of one layer; errors against plain torch in float32. On a GPU times are
those of its kernels, from the profiler: launched one by one, kernels this short would measure the host.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from compressive.bench import kernel_times, median_seconds
from compressive.kernels import relative_attention as fused
from compressive.model.attention import Biases, Positions, Projected, heads_of, relative_attention

Times = dict[str, "float | dict[str, float]"]

SIZES = {  # lanes, heads, window, compressed, recent, width of a head
    "tiny": (2, 2, 32, 16, 32, 16),
    "base": (16, 8, 512, 512, 512, 64),
    "paper": (8, 8, 768, 1152, 768, 128),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="time the kernels with other tiles, one at a time")
    parser.add_argument("--jobs", type=int, default=12, help="with --tune, how many processes compile at once")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = Case(*SIZES[options.size], device=device, dtype=dtype)
    found: dict[str, object] = {
        "size": options.size, "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__, "gigaflops of one product of all queries and slots": case.flops / 1e9,
    }  # fmt: skip
    ways: dict[str, Callable[[], Tensor]] = {
        "fused": case.fused, "readable": case.readable, "flash": case.flash
    }  # fmt: skip
    if device.type == "cuda":
        ways["readable, compiled"] = torch.compile(case.readable)
    for name, way in ways.items():
        found[name] = timed(way, case.leaves, options.repeats, device)
        print(name, found[name], flush=True)
    found["errors of fused"] = case.errors(case.fused)
    print("errors of fused", found["errors of fused"], flush=True)
    if options.tune:
        found["tiles"] = tuned(options.size, case, options.repeats, options.jobs)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


TILES: dict[str, list[fused.Tile]] = {  # what --tune tries
    "scoring": [(64, 128, 8, 3), (64, 128, 8, 2), (64, 128, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3)],
    "forward": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 2), (128, 64, 8, 3), (128, 32, 4, 3)],
    "slots": [
        (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3),
        (32, 128, 8, 2), (64, 128, 8, 2), (64, 128, 8, 3),
    ],
    "content": [(64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (128, 64, 8, 4)],
    "positions": [(64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (64, 128, 4, 2), (128, 64, 8, 4)],
    "table": [(64, 64, 4, 3), (32, 128, 4, 4), (32, 128, 4, 3), (64, 128, 8, 3), (64, 128, 4, 3), (32, 256, 8, 3)],
}  # fmt: skip


def tuned(size: str, case: "Case", repeats: int, jobs: int) -> list[dict[str, object]]:
    """Times with each kernel's other tiles, the rest as they are."""
    tries = [(kernel, tile) for kernel, tiles in TILES.items() for tile in tiles]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:  # into the cache of compiled kernels
        list(pool.map(compiled, repeat(size), *zip(*tries, strict=True)))
    rows = []
    for kernel, tile in tries:
        row: dict[str, object] = {"kernel": kernel, "tile": tile, "times": with_tile(case, kernel, tile, repeats)}
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


def compiled(size: str, kernel: str, tile: fused.Tile) -> None:
    """Compile the kernels with another tile."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with_tile(Case(*SIZES[size], device=device, dtype=dtype), kernel, tile, 1)


def with_tile(case: "Case", kernel: str, tile: fused.Tile, repeats: int) -> Times | str:
    """Times with another tile."""
    usual = fused.TILES[kernel]
    fused.TILES[kernel] = {max(usual): tile}
    try:
        return timed(case.fused, case.leaves, repeats, case.valid.device)
    finally:
        fused.TILES[kernel] = usual


class Case:
    """Random queries, keys, values and tables of one layer."""

    def __init__(
        self, B: int, H: int, T: int, C: int, M: int, K: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        N = C + M + T
        self.C, self.flops = C, 2 * B * H * T * N * K
        torch.manual_seed(0)
        shapes = {"query": (B, T, H, K), "keys": (B, N, 2, H, K), "table": (N + T, H, K), "u": (H, K), "v": (H, K)}
        self.tensors = {
            name: torch.randn(shape, device=device, dtype=torch.float32 if len(shape) == 2 else dtype).requires_grad_()
            for name, shape in shapes.items()
        }
        self.leaves = list(self.tensors.values())
        self.valid = torch.ones(B, C + M, dtype=torch.bool, device=device)

    def inputs(self, dtype: torch.dtype | None = None) -> tuple[Projected, Biases, Positions]:
        """What both backends take."""
        query, keys, table, u, v = (x if dtype is None else x.to(dtype) for x in self.leaves)
        positions = table.transpose(0, 1)
        return (
            Projected(query.transpose(1, 2), keys),
            Biases(u, v, v),
            Positions(positions, positions),
        )

    def fused(self) -> Tensor:
        """The kernels."""
        query, keys, table, u, v = self.leaves
        return fused.relative_attention(
            query.transpose(1, 2), keys, table.transpose(0, 1), u, v, self.valid, n_compressed=self.C
        )[0]

    def readable(self, dtype: torch.dtype | None = None) -> Tensor:
        """Plain torch, under autocast as in training."""
        device = self.valid.device.type
        with torch.autocast(device, torch.bfloat16, enabled=dtype is None and device == "cuda"):
            return relative_attention(*self.inputs(dtype), self.valid, None, self.C)[0]

    def flash(self) -> Tensor:
        """Attention without positions or masks: what a fused kernel takes at least."""
        projected = self.inputs()[0]
        return F.scaled_dot_product_attention(projected.query, *heads_of(projected.key_value))

    def errors(self, way: Callable[[], Tensor]) -> dict[str, float]:
        """Largest difference from float32, as a share of the largest value, of the output and of each gradient."""
        gradient = torch.randn_like(self.flash())
        exact = self.readable(torch.float32)
        want = [exact, *torch.autograd.grad(exact, self.leaves, gradient.float())]
        got = way()
        have = [got, *torch.autograd.grad(got, self.leaves, gradient)]
        pairs = zip(("out", *self.tensors), have, want, strict=True)
        return {name: ((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for name, a, b in pairs}


def timed(way: Callable[[], Tensor], leaves: list[Tensor], repeats: int, device: torch.device) -> Times | str:
    """Milliseconds of the forward pass, and of both, and on a GPU of each kernel of both."""
    try:
        gradient = torch.randn_like(way())
    except Exception as error:  # a row that fails is a row
        return f"{type(error).__name__}: {str(error)[:200]}"

    def both() -> None:
        torch.autograd.grad(way(), leaves, gradient, allow_unused=True)

    result: Times = {}
    for name, act in (("forward ms", way), ("both ms", both)):
        for _ in range(3):
            act()
        if device.type == "cuda":
            kernels = kernel_times(act, repeats)
            result[name] = sum(kernels.values())
            if name == "both ms":
                result["kernels"] = {kernel[:60]: ms for kernel, ms in kernels.items() if ms > 0.005}
        else:
            result[name] = 1000 * median_seconds(act, device, repeats)
    return result


if __name__ == "__main__":
    main()
