"""Where a step's time goes on a GPU, kernel by kernel: training, or generation.

    python benchmarks/kernels.py --size paper
    python benchmarks/kernels.py --size base --generate --batch 32 --json kernels.json

Times of our model as benchmarks/peers.py measures it, compiled and captured, from the profiler: milliseconds of a step,
or of a token drawn in every lane. What the kernels take together is below what a step takes where the GPU waits.
"""

import argparse
import sys
from pathlib import Path

import torch
from peers import SIZES

from compressive import bench
from compressive.config import RunConfig, TrainConfig
from compressive.runtime import pick_device

DRAWN = 64
"""Tokens that are drawn, beyond the first."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--generate", action="store_true", help="draw tokens; else train")
    parser.add_argument("--batch", type=int, help="lanes, if not the size's own; 1 where tokens are drawn")
    parser.add_argument("--steps", type=int, default=3, help="how many training steps are averaged")
    parser.add_argument("--most", type=int, default=30, help="how many kernels are shown")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = pick_device("auto")
    if device.type != "cuda":
        parser.error("there is no GPU here, and only its kernels can be told apart")
    model, batch = SIZES[options.size]
    batch = options.batch or (1 if options.generate else batch)
    config = RunConfig(model, train=TrainConfig(batch=batch, precision="bf16", compile=not options.generate))
    subject = bench.ours(config, device)
    if options.generate:
        draw = torch.autocast(device.type, torch.bfloat16)(subject.draw)
        whole = bench.kernel_times(lambda: draw(batch, 1 + DRAWN), 1, warm_up=1)
        kernels = per_token(whole, bench.kernel_times(lambda: draw(batch, 1), 1))
    else:
        kernels = bench.kernel_times(subject.step, options.steps, warm_up=8)
    rows = [{"kernel": name, "ms": ms} for name, ms in sorted(kernels.items(), key=lambda kernel: -kernel[1])]
    print(f"{'all':60}  {sum(kernels.values()):9.4f} ms")
    for row in rows[: options.most]:
        print(f"{row['kernel'][:60]:60}  {row['ms']:9.4f} ms")
    if options.json:
        what = f"kernels of {'a token drawn' if options.generate else 'a training step'}, {options.size}, batch {batch}"
        bench.write_results(options.json, what, " ".join(["python", *sys.argv]), rows)


def per_token(whole: dict[str, float], first: dict[str, float]) -> dict[str, float]:
    """What each kernel takes for one token, from drawing DRAWN and one, and drawing one: without the prompt."""
    return {name: max(0.0, ms - first.get(name, 0.0)) / DRAWN for name, ms in whole.items()}


if __name__ == "__main__":
    main()
