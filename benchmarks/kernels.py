"""Time per GPU kernel of one training step, or of one generated token.

    python benchmarks/kernels.py --size paper
    python benchmarks/kernels.py --size base --generate --results benchmarks/results/step-kernels/DATE-h200.json
    python benchmarks/kernels.py --variants --results benchmarks/results/step-variants/DATE-h200.json

Our model as in benchmarks/peers.py, compiled and captured as a CUDA graph. Times come from torch's profiler, in
milliseconds per step or per token of the whole batch. Their sum is less than the time of a step where the GPU idles
between kernels, and more than it where kernels overlap, as those of a token do.

`--variants` generates with other constants of `kernels/relative_attention_step.py`: kernels that spill registers as
they are (`machine_code.py steps`) against the same without. Each size, batch and variant is a row, with tokens per
second and the time of each kernel. Variants take turns for `--rounds` rounds; figures are medians. Results are written
after each measurement. A row that fails holds its error.
"""

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch
from peers import SIZES

from compressive import bench
from compressive.bench import Row, Subject
from compressive.config import RunConfig, TrainConfig
from compressive.runtime import autocast, pick_device

TOKENS = 64
"""Tokens to generate, beyond the first."""
VARIANTS: Mapping[str, Mapping[str, int]] = {
    "as it is": {},
    "256 input columns": {"LINEAR_BLOCK_K": 256},
    "two warps": {"SPLIT_WARPS": 2},
}
"""Constants of `kernels/relative_attention_step.py` that differ in a variant."""
SETTLING, TIMED = 16, 256
"""Tokens before the clock starts, in which steps are captured, and tokens that are timed: less than a window in all."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="default: base; with --variants base and paper")
    parser.add_argument("--generate", action="store_true", help="measure generation instead of training")
    parser.add_argument("--variants", action="store_true", help="measure variants of generation's kernels")
    parser.add_argument("--batch", type=int, help="batch size (default: the size's own; of generation 1, or 1 and 32)")
    parser.add_argument("--steps", type=int, default=3, help="training steps to average over (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="with --variants, rounds (default: %(default)s)")
    parser.add_argument("--most", type=int, default=30, help="kernels to print (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    parser.add_argument("--json", type=Path, dest="results", help=argparse.SUPPRESS)  # its old name
    options = parser.parse_args()
    device = pick_device("auto")
    if device.type != "cuda":
        parser.error("this needs a GPU: there is no GPU here")
    if options.variants:
        variants(options, device)
    else:
        kernels(options, device)


def kernels(options: argparse.Namespace, device: torch.device) -> None:
    """Time each kernel of a training step or of a token."""
    size = options.size or "base"
    batch = options.batch or (1 if options.generate else SIZES[size][1])
    subject = ours(size, batch, device, compiled=not options.generate)
    if options.generate:
        found = token_kernels(subject, batch, device)
    else:
        assert subject.step is not None
        found = bench.kernel_times(subject.step, options.steps, warm_up=8)
    rows: list[Row] = [{"kernel": name, "ms": ms} for name, ms in sorted(found.items(), key=lambda kernel: -kernel[1])]
    print(f"{'all':60}  {sum(found.values()):9.4f} ms")
    for row in rows[: options.most]:
        print(f"{row['kernel'][:60]:60}  {row['ms']:9.4f} ms")
    if options.results:
        measured = "one generated token" if options.generate else "one training step"
        what = f"kernels of {measured}, {size}, batch {batch}"
        bench.write_results(options.results, what, " ".join(["python", *sys.argv]), rows)


def variants(options: argparse.Namespace, device: torch.device) -> None:
    """Time generation of each size and batch with each variant of the kernels."""
    rows: list[Row] = []
    for size in [options.size] if options.size else ["base", "paper"]:
        subject = ours(size, 1, device, compiled=False)
        for batch in [options.batch] if options.batch else bench.BATCHES:
            rounds: dict[str, list[Row]] = {}
            for _, name in itertools.product(range(options.rounds), VARIANTS):
                measured = functools.partial(variant, name, subject, batch, device)
                rounds.setdefault(name, []).append(bench.row_or_error(measured))
                found = [
                    {"size": size, "batch": batch, "variant": name, "constants": VARIANTS[name]} | merged(parts)
                    for name, parts in rounds.items()
                ]
                if options.results:
                    what = "generation with variants of the decoding kernels"
                    bench.write_results(options.results, what, " ".join(["python", *sys.argv]), rows + found)
            rows += found
            for row in found:
                figure = row.get("error") or f"{row['tokens_per_second']:10,.0f} tokens/s {row['kernels_ms']:9.4f} ms"
                print(f"{size:6} batch {batch:3}  {row['variant']:20} {figure}", flush=True)


def variant(name: str, subject: Subject, batch: int, device: torch.device) -> Row:
    """Tokens per second with one variant, and milliseconds of a token by kernel."""
    from compressive.kernels import relative_attention_step

    with mock.patch.dict(vars(relative_attention_step), VARIANTS[name]):
        speed = bench.measure_generation(sampler(subject, device), batch, TIMED, device, SETTLING)
        found = token_kernels(subject, batch, device)
    return {"tokens_per_second": speed, "kernels_ms": sum(found.values()), "kernels": found}


def merged(rounds: list[Row]) -> Row:
    """The median of each figure over the rounds, and of each kernel, or the first error."""
    for row in rounds:
        if "error" in row:
            return row
    names = dict.fromkeys(name for row in rounds for name in row["kernels"])
    return {key: statistics.median(row[key] for row in rounds) for key in ("tokens_per_second", "kernels_ms")} | {
        "kernels": {name: statistics.median(row["kernels"].get(name, 0.0) for row in rounds) for name in names}
    }


def ours(size: str, batch: int, device: torch.device, compiled: bool) -> Subject:
    """Our model of a size, in bf16."""
    train = TrainConfig(batch=batch, precision="bf16", compile=compiled)
    return bench.ours(RunConfig(SIZES[size][0], train=train), device)


def sampler(subject: Subject, device: torch.device) -> Callable[[int, int, Callable[[], object]], object]:
    """What samples from a model, in bf16."""
    assert subject.sample is not None
    sample: Callable[[int, int, Callable[[], object]], object] = autocast(device, "bf16")(subject.sample)
    return sample


def token_kernels(subject: Subject, batch: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a generated token, by kernel."""
    generate = sampler(subject, device)
    whole = bench.kernel_times(lambda: generate(batch, 1 + TOKENS, lambda: None), 1, warm_up=1)
    return per_token(whole, bench.kernel_times(lambda: generate(batch, 1, lambda: None), 1))


def per_token(whole: dict[str, float], first: dict[str, float]) -> dict[str, float]:
    """Return each kernel's time per token without the prompt: (1 + TOKENS tokens) less (1 token), over TOKENS."""
    return {name: max(0.0, ms - first.get(name, 0.0)) / TOKENS for name, ms in whole.items()}


if __name__ == "__main__":
    main()
