"""Compare training with the fused kernels to training with reference attention: the same run both ways.

    python experiments/fused_training.py --source enwik8.xz --out runs/fused --steps 2000 --batch 4 \
        --results experiments/results/fused-training/DATE-h200.json

One run uses reference attention, eager; the other the fused kernels, compiled. Seed, streams and schedule are the same,
and dropout is off. At the last weights of the fused run, bf16 gradients of one batch, fused and reference, eager and
compiled, are compared with reference gradients in float32.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch

from compressive.config import Attention, RunConfig
from compressive.data.corpus import Streams
from compressive.data.prepare import prepare
from compressive.kernels import dispatch
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import describe_environment, pick_device
from compressive.training.loop import train

WAYS: dict[str, tuple[Attention, bool]] = {"reference_eager": ("reference", False), "fused_compiled": ("fused", True)}
"""Keys of results, each with the form of attention and whether the model is compiled."""


def main() -> None:
    """Prepare the corpus, train both ways, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="enwik8, plain or compressed; only needed once")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/fused"))
    parser.add_argument("--preset", default="enwik8-base")
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--warmup", type=int, default=1_000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    if not (options.data_dir / "enwik8" / "manifest.json").exists():
        prepare("enwik8", (), options.source, options.data_dir, "bytes", None, None, (0.9, 0.05, 0.05))
    preset = RunConfig.from_preset(options.preset)
    data = dataclasses.replace(preset.data, corpus="enwik8", data_dir=str(options.data_dir))
    model = dataclasses.replace(preset.model, dropout=0.0)  # the compiler samples other dropout masks than eager torch
    curves = {}
    for name, (attention, compiled) in WAYS.items():
        schedule = dataclasses.replace(
            preset.train, steps=options.steps, warmup_steps=options.warmup,
            decay_steps=max(1, options.steps - options.warmup), batch=options.batch, precision=options.precision,
            attention=attention, compile=compiled, update_every=1, log_every=max(1, options.steps // 40),
            eval_every=0, sample_every=0, checkpoint_every=options.steps,
        )  # fmt: skip
        run = Run.create(options.out / name.replace("_", "-"), RunConfig(model, data, schedule))
        train(run)
        curves[name] = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    found = {
        "what": "the same run with reference attention, eager, and with fused attention, compiled and captured",
        "command": " ".join(["python", *sys.argv]),
        "config": dataclasses.asdict(run.config),
        "environment": describe_environment(),
        "gradient_error_vs_float32": gradients(run),
        "max_curve_difference_bits": difference(curves),
        "curves": curves,
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key not in ("curves", "config")}, indent=1))


def difference(curves: dict[str, list[dict[str, float]]]) -> float:
    """Return the largest difference of training losses at the same step, in bits."""
    bits = [[row["bits"] for row in rows if row.get("bits") is not None] for rows in curves.values()]
    return float(max(abs(a - b) for a, b in zip(*bits, strict=True)))


def gradients(run: Run) -> dict[str, dict[str, float]]:
    """Return relative errors of the gradients of one batch: over all parameters, and of the worst parameter."""
    trained, device = Trained.load(run), pick_device(run.config.train.device)
    model = trained.model(trained.config, str(device)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch, window = run.config.train.batch, model.config.window
    streams, memory = Streams(run.corpus().split("train"), batch), model.initial_memory(batch)
    for i in range(8):
        x, y = (torch.from_numpy(np.array(view)).to(device).long() for view in streams.window(i * window, window))
        with torch.no_grad(), dispatch.using("reference"):
            before, memory = memory, model(x, memory).memory
    names = [name for name, _ in model.named_parameters()]

    def measure(attention: Attention, compiled: bool, half: bool) -> list[torch.Tensor]:
        forward = torch.compile(model, fullgraph=True) if compiled else model
        with dispatch.using(attention), torch.autocast(device.type, torch.bfloat16, enabled=half):
            out = forward(x, before, targets=y)
        found = torch.autograd.grad(out.nll.mean() + out.compression_loss, list(model.parameters()), allow_unused=True)
        return [torch.zeros(()) if g is None else g.double().cpu() for g in found]

    exact = measure("reference", False, False)
    result = {}
    fused_eager: dict[str, tuple[Attention, bool]] = {"fused_eager": ("fused", False)}
    for name, (attention, compiled) in (WAYS | fused_eager).items():
        found = measure(attention, compiled, True)
        errors = [float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(found, exact, strict=True)]
        worst = max(range(len(errors)), key=errors.__getitem__)
        total = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)))
        whole = math.sqrt(sum(float(b.square().sum()) for b in exact))
        result[name] = {"all_parameters": total / whole, f"worst_{names[worst]}": errors[worst]}
    return result


if __name__ == "__main__":
    main()
