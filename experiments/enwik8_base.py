"""Train the `enwik8-base` preset on one GPU for some minutes, evaluate it, and write its curve.

    python experiments/enwik8_base.py --source enwik8.xz --out runs/enwik8-base --steps 15000
    python experiments/enwik8_base.py --out runs/enwik8-base --steps 15000     # resumes
    python experiments/enwik8_base.py --out runs/enwik8-base --results experiments/results/enwik8-base/DATE-h200.json

The schedule is shortened to `--steps`: 2,000 warm-up steps, then cosine decay to the end.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressive.analysis.attention import measure_attention
from compressive.analysis.layers import measurable, measure_layers
from compressive.analysis.memory import measure_memory
from compressive.config import ModelConfig, RunConfig
from compressive.data.corpus import Streams
from compressive.data.prepare import prepare
from compressive.evaluation.score import score
from compressive.inference.generate import generate
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import describe_environment
from compressive.training.loop import train


def main() -> int:
    """Prepare the corpus, train or resume, and evaluate when training has finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="enwik8, plain or compressed; only needed once")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/enwik8-base"))
    parser.add_argument("--preset", default="enwik8-base")
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--warmup", type=int, default=2_000)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--results", type=Path, help="evaluate, and write the results file here")
    options = parser.parse_args()

    if not (options.data_dir / "enwik8" / "manifest.json").exists():
        prepare("enwik8", (), options.source, options.data_dir, "bytes", None, None, (0.9, 0.05, 0.05))
    preset = RunConfig.from_preset(options.preset)
    schedule = dataclasses.replace(
        preset.train,
        steps=options.steps,
        warmup_steps=options.warmup,
        decay_steps=options.steps - options.warmup,
        batch=options.batch or preset.train.batch,
        precision="bf16",
        compile=not options.eager,
        update_every=1,
        log_every=100,
        eval_every=1000,
        eval_tokens=250_000,
        sample_every=0,
        checkpoint_every=1000,
    )
    data = dataclasses.replace(preset.data, data_dir=str(options.data_dir))
    run = Run.create(options.out, RunConfig(preset.model, data, schedule))
    code = train(run)
    if code == 0 and options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(report(run), indent=1) + "\n")
    return code


def report(run: Run) -> dict[str, object]:
    """Return test bits per character at trained and enlarged memory, memory analyses, a sample, and the curve."""
    tokens = run.corpus().split("test")
    gradients = compare_gradients(run)
    trained, test = Trained.load(run), {}
    sizes: dict[str, tuple[dict[str, Any], int | None]] = {
        "as_trained": ({}, None),
        "first_1_mb_as_trained": ({}, 1_000_000),
        "first_1_mb_compressed_1024_empty_masked": (
            {"compressed_size": 1024, "empty_memory": "masked"}, 1_000_000),
        "first_1_mb_compressed_1024_empty_zeros": (
            {"compressed_size": 1024, "empty_memory": "zeros"}, 1_000_000),
    }  # fmt: skip
    for name, (changes, limit) in sizes.items():
        model = trained.model(trained.eval_config(**changes).model, "cuda")
        began = time.monotonic()
        nats = score(model, tokens, streams=64, precision="bf16", limit=limit)
        test[name] = {
            "bits_per_character": float(nats.mean()) / math.log(2),
            "tokens": len(nats),
            "seconds": time.monotonic() - began,
        }
    assert isinstance(trained.config, ModelConfig)
    valid, model = run.corpus().split("valid"), trained.model(trained.config, "cuda")
    analysis = {
        "memory": measure_memory(model, valid).as_dict(),
        "attention": dataclasses.asdict(measure_attention(model, valid)),
        "layers": dataclasses.asdict(measure_layers(trained.model(measurable(trained.config), "cuda"), valid)),
    }
    prompt = torch.from_numpy(np.array(tokens[:2048], dtype=np.int64)).cuda()
    began = time.monotonic()
    sample = bytes(int(token) for token in generate(model, prompt, 600, seed=0))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "config": dataclasses.asdict(run.config),
        "environment": describe_environment(),
        "gradients": gradients,
        "test": test,
        "analysis_valid": analysis,
        "sample": {"text": sample.decode("utf-8", "replace"), "seconds": time.monotonic() - began},
        "curve": lines,
    }


def compare_gradients(run: Run) -> dict[str, float]:
    """Return relative errors of bf16 gradients, eager and compiled, against float32, at the trained weights."""
    trained = Trained.load(run)
    model = trained.model(trained.config, "cuda").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    streams, window = Streams(run.corpus().split("train"), 16), model.config.window
    memory = model.initial_memory(16)
    for i in range(8):
        x, y = (torch.from_numpy(np.array(view)).cuda().long() for view in streams.window(i * window, window))
        with torch.no_grad():
            before, memory = memory, model(x, memory).memory
    named = [(name, p) for name, p in model.named_parameters() if "compress" not in name]
    found = {}
    compiled = torch.compile(model, fullgraph=True)
    for kind, forward, half in (("float32", model, False), ("eager", model, True), ("compiled", compiled, True)):
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = forward(x, before, targets=y).nll.mean()
        found[kind] = [g.double() for g in torch.autograd.grad(loss, [p for _, p in named])]

    def error(kind: str, which: slice) -> float:
        pairs = list(zip(found[kind][which], found["float32"][which], strict=True))
        return math.sqrt(sum((a - b).square().sum().item() for a, b in pairs)) / math.sqrt(
            sum(b.square().sum().item() for _, b in pairs)
        )

    result: dict[str, float] = {}
    for kind in ("eager", "compiled"):
        worst = max(range(len(named)), key=lambda i: error(kind, slice(i, i + 1)))
        result |= {
            f"{kind}_all_parameters": error(kind, slice(None)),
            f"{kind}_worst_{named[worst][0]}": error(kind, slice(worst, worst + 1)),
        }
    return result


if __name__ == "__main__":
    sys.exit(main())
