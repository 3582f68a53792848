"""What a training step costs with an adaptive softmax, by how the losses of its bands are computed.

    python benchmarks/words.py --results benchmarks/results/words/DATE-DEVICE.json      # a GPU: wikitext103, batch 16
    OMP_NUM_THREADS=1 python benchmarks/words.py --preset wikitext2 --batch 32          # a CPU

`looked-up` finds the tokens of a band by `nonzero`. That is a device sync, so its step is not captured. `kernel` packs
them on the GPU; its step is measured uncaptured and captured. `masked` computes every band for all tokens, captured.
Words follow Zipf's law. Times are means over steps, on a CPU of CPU time; the kernel does not run there.
The losses of the first step must agree to rounding. Results are written after each row; one that fails holds its error.
"""

import argparse
import dataclasses
import functools
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from compressive import bench
from compressive.architectures import build_model
from compressive.bench import Row, random_tokens
from compressive.config import RunConfig
from compressive.distributed import World
from compressive.model import embedding
from compressive.runtime import peak_gib, pick_device, synchronise
from compressive.training.step import WARM_UP, Step, Windows


def masked(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """The loss of a band, computed for all rows: no shape depends on data, and most of the arithmetic is wasted."""
    return embedding.linear_nll(hidden, weight, bias, target.clamp(min=0)).masked_fill(target < 0, 0)


def looked_up(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """The reference form of the operation."""
    return embedding.linear_nll(hidden, weight, bias, target, some=True)


FORMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], bool]] = {
    "looked-up": (looked_up, False),
    "masked": (masked, True),
    "kernel": (embedding.band_nll, False),
    "kernel-captured": (embedding.band_nll, True),
}
"""Each form of a band's loss, and whether its step is captured on a GPU."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wikitext103")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--steps", type=int, default=10, help="steps to time (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS), help="forms to measure (default: all)")
    parser.add_argument("--results", type=Path, help="results file to write")
    options = parser.parse_args()
    device = pick_device("auto")
    config = RunConfig.from_preset(options.preset)
    train = dataclasses.replace(
        config.train, batch=options.batch, micro_batch=0, compile=options.compile,
        precision=options.precision or ("bf16" if device.type == "cuda" else "fp32"),
    )  # fmt: skip
    config = dataclasses.replace(config, train=train)
    forms = [name for name in options.only if device.type == "cuda" or "kernel" not in name]
    what = f"training steps of {options.preset}, batch {train.batch}, {train.precision}, by form of the bands' loss"
    rows: list[Row] = []
    for name in forms:
        row = bench.row_or_error(functools.partial(measure, name, config, device, options.steps))
        rows.append({"form": name} | row)
        print(f"{name:18} {described(row)}", flush=True)
        if options.results:
            bench.write_results(options.results, what, " ".join(["python", *sys.argv]), rows)


def measure(name: str, config: RunConfig, device: torch.device, steps: int) -> Row:
    """Milliseconds of a step with one form, peak memory, and the loss of the first step."""
    form, captured = FORMS[name]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    with torch.device(device):
        model = build_model(config.model).train()
    step_fn = Step(model, config.train, World(device=device), config.train.batch)
    step_fn.captures = captured and device.type == "cuda"
    windows = Windows(random_tokens(config, device)[None], random_tokens(config, device)[None], None)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    with mock.patch.object(embedding, "band_nll", form):
        loss = float(step_fn(windows, 0).loss)
        for _ in range(2 * WARM_UP):
            step_fn(windows, 0)
        synchronise(device)
        began = clock()
        for _ in range(steps):
            step_fn(windows, 0)
        synchronise(device)
    seconds, tokens = (clock() - began) / steps, config.train.batch * config.model.window
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_second": tokens / seconds,
        "peak_gib": peak_gib(device),
        "first_loss": loss,
    }


def described(row: Row) -> str:
    """A row as text."""
    if "error" in row:
        return str(row["error"])
    return (
        f"{row['step_ms']:9.1f} ms {row['tokens_per_second']:9,.0f} tokens/s {row['peak_gib']:7.1f} GiB, "
        f"first loss {row['first_loss']:.5f}"
    )


if __name__ == "__main__":
    main()
