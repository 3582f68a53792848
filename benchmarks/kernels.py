"""Time per GPU kernel of one training step, or of one generated token.

    python benchmarks/kernels.py --size paper
    python benchmarks/kernels.py --size base --generate --results benchmarks/results/step-kernels/DATE-h200.json

Our model as in benchmarks/peers.py, compiled and captured as a CUDA graph. Times come from torch's profiler, in
milliseconds per step or per token of the whole batch. Their sum is less than the time of a step where the GPU idles
between kernels.
"""

import argparse
import sys
from pathlib import Path

import torch
from peers import SIZES

from compressive import bench
from compressive.bench import Row
from compressive.config import RunConfig, TrainConfig
from compressive.runtime import pick_device

TOKENS = 64
"""Tokens to generate, beyond the first."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--generate", action="store_true", help="measure generation instead of training")
    parser.add_argument("--batch", type=int, help="batch size (default: the size's own; with --generate 1)")
    parser.add_argument("--steps", type=int, default=3, help="training steps to average over (default: %(default)s)")
    parser.add_argument("--most", type=int, default=30, help="kernels to print (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    parser.add_argument("--json", type=Path, dest="results", help=argparse.SUPPRESS)  # its old name
    options = parser.parse_args()
    device = pick_device("auto")
    if device.type != "cuda":
        parser.error("this needs a GPU: there is no GPU here")
    model, batch = SIZES[options.size]
    batch = options.batch or (1 if options.generate else batch)
    config = RunConfig(model, train=TrainConfig(batch=batch, precision="bf16", compile=not options.generate))
    subject = bench.ours(config, device)
    if options.generate:
        generate = torch.autocast(device.type, torch.bfloat16)(subject.sample)
        whole = bench.kernel_times(lambda: generate(batch, 1 + TOKENS, lambda: None), 1, warm_up=1)
        kernels = per_token(whole, bench.kernel_times(lambda: generate(batch, 1, lambda: None), 1))
    else:
        assert subject.step is not None
        kernels = bench.kernel_times(subject.step, options.steps, warm_up=8)
    rows: list[Row] = [
        {"kernel": name, "ms": ms} for name, ms in sorted(kernels.items(), key=lambda kernel: -kernel[1])
    ]
    print(f"{'all':60}  {sum(kernels.values()):9.4f} ms")
    for row in rows[: options.most]:
        print(f"{row['kernel'][:60]:60}  {row['ms']:9.4f} ms")
    if options.results:
        measured = "one generated token" if options.generate else "one training step"
        what = f"kernels of {measured}, {options.size}, batch {batch}"
        bench.write_results(options.results, what, " ".join(["python", *sys.argv]), rows)


def per_token(whole: dict[str, float], first: dict[str, float]) -> dict[str, float]:
    """Return each kernel's time per token without the prompt: (1 + TOKENS tokens) less (1 token), over TOKENS."""
    return {name: max(0.0, ms - first.get(name, 0.0)) / TOKENS for name, ms in whole.items()}


if __name__ == "__main__":
    main()
