"""Tokens per second and memory of training on one device, for a preset and several batch sizes.

    python benchmarks/training_rate.py --preset pg19 --batch 8 16 32 --recompute --json rate.json

Whole steps as in the real loop: forward, backward, clipping, Adam; bf16, on random tokens, memory carried.
docs/scaling.md is computed from what this prints.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from compressive.config import RunConfig
from compressive.model.language_model import CompressiveLM
from compressive.parallel import World
from compressive.run import pick_device
from compressive.training.flops import peak_flops, training_flops_per_token


def main() -> None:
    """Measure every batch size that fits, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="pg19")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rows = pick_device("auto"), []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    preset = RunConfig.from_preset(options.preset)
    train = dataclasses.replace(preset.train, recompute=options.recompute, compile=not options.eager, precision="bf16")
    for batch in options.batch:
        try:
            rows.append(
                {"batch": batch, **measure(dataclasses.replace(preset, train=train), batch, device, options.steps)}
            )
        except torch.cuda.OutOfMemoryError:
            rows.append({"batch": batch, "out of memory": True})
        print(json.dumps(rows[-1]), flush=True)
    about = {"preset": options.preset, "device": name, "torch": torch.__version__, "recompute": options.recompute,
             "compile": not options.eager}  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def measure(config: RunConfig, batch: int, device: torch.device, steps: int) -> dict[str, float]:
    """Time some steps after some more to warm up."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device(device):
        model = CompressiveLM(config.model).train()
    forward = World(device=device).wrap(model, config.train)
    groups = model.task_parameters(), model.compressor_parameters()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    x = torch.randint(config.model.vocab_size, (batch, config.model.window), device=device)
    memory = model.initial_memory(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for i in range(steps + 4):
        if i == 4:
            _wait(device)
            began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            out = forward(x, memory, targets=x)
        (out.nll.mean() + out.compression_loss).backward()
        memory = out.memory.detach()
        for group in groups:
            clip_grad_norm_(group, 0.1)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    _wait(device)
    rate = steps * x.numel() / (time.perf_counter() - began)
    found = {"tokens per second": rate, "parameters": float(sum(p.numel() for p in model.parameters()))}
    if device.type == "cuda":
        found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        if (peak := peak_flops(torch.cuda.get_device_name(device))) is not None:
            found["utilisation"] = rate * training_flops_per_token(config.model) / peak
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
