"""Compressive Transformer, TransformerXL and WaveNet on raw speech, side by side: the paper's speech figure.

    python experiments/speech.py --seconds 400 --results experiments/results/speech.json
    python experiments/speech.py --results experiments/results/speech.json --figure docs/speech.png

The corpus must be in --data-dir already (compressive data prepare speech --source FOLDER): nothing here reads sound.

All three models are of equal size and see equally many samples, in the same order (but for less than a chunk at the end
of a lane), updated after every chunk of 3,840 samples in all lanes. How many samples that are is found out first: each
model trains for a moment, and from the three speeds follows what fits into `--seconds` a model on average; `--updates`
says it outright. The plan is kept in OUT/plan.json. Every evaluation reads the same samples of the validation and of
the test split; what counts in the end is the checkpoint that is best on validation, which is early stopping.

With `--only` it stops after one model's training; without, it goes on from what is there and evaluates.

The command ends by itself after `--sitting` seconds, with exit code 75 and everything saved; given again, it goes on.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressive.architectures import build_model
from compressive.config import RunConfig
from compressive.data.corpus import Corpus
from compressive.data.speech.audio import write_wav
from compressive.data.speech.codes import RATE
from compressive.evaluation.score import score
from compressive.inference.generate import generate
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import describe_environment, pick_device
from compressive.speech.floors import floors
from compressive.training.loop import FINISHED, INTERRUPTED, train

MODELS = {"compressive": "{}", "transformer-xl": "{}-txl", "wavenet": "{}-wavenet"}
"""Name in the results, and preset of a family."""
PLANNED = 24
"""Updates by which a model's speed is measured, the first third not counted."""
SETTINGS = (
    "family", "corpus", "chunk", "batch", "learning_rate", "wavenet_learning_rate", "clip", "dropout", "precision",
    "eager", "attention", "recompute", "seconds", "updates", "points", "curve_samples", "seed",
)  # fmt: skip
"""What a plan is made for, and cannot be changed after."""


def main() -> int:
    """Plan, train or resume, evaluate; write what there is after each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="folder of prepared corpora")
    add("--corpus", default="speech", help="the prepared corpus")
    add("--out", type=Path, default=Path("runs/speech-experiment"), help="folder of the plan, the runs, the sounds")
    add("--results", type=Path, required=True, help="the JSON to write")
    add("--figure", type=Path, help="only draw what the results hold, to this file")
    add("--family", default="speech", help="presets: FAMILY, FAMILY-txl and FAMILY-wavenet")
    add("--only", choices=MODELS, help="train this model alone, such as to compile it beforehand, or beside the others")
    add("--seconds", type=float, default=400, help="training time per model, on average over the three")
    add("--updates", type=int, help="how many updates, in place of seconds; nothing is measured first")
    add("--sitting", type=float, default=540, help="seconds after which the command stops, to be continued")
    add("--chunk", type=int, default=3840, help="samples of every lane between two updates")
    add("--batch", type=int, default=8, help="lanes")
    add("--learning-rate", type=float, default=6e-4, help="highest, of the transformers")
    add("--wavenet-learning-rate", type=float, default=1e-3, help="highest, of WaveNet")
    add("--clip", type=float, default=0.1, help="largest gradient norm")
    add("--dropout", type=float, default=0.0, help="of all three")
    add("--precision", default="bf16", choices=("bf16", "fp32"))
    add("--attention", default="auto", choices=("auto", "readable", "fused"))
    add("--eager", action="store_true", help="do not compile")
    add("--recompute", action="store_true", help="less memory, more time")
    add("--points", type=int, default=12, help="evaluations of each curve")
    add("--curve-samples", type=int, default=10 * RATE, help="samples of each split that each of them reads")
    add("--test-samples", type=int, default=0, help="samples of the final evaluation; 0 for all")
    add("--lanes", type=int, default=32, help="stretches that the final evaluation reads side by side")
    add("--draw", type=float, default=0.0, help="seconds of sound to draw from each model at the end")
    add("--seed", type=int, default=0)
    add("--commit", help="of the code, where git is not there to say so")
    options = parser.parse_args()
    if options.figure is not None:
        draw_figure(json.loads(options.results.read_text("utf-8")), options.figure)
        return FINISHED

    deadline = time.monotonic() + options.sitting
    corpus = Corpus.open(options.data_dir / options.corpus)
    about: dict[str, Any] = {
        "what": "the paper's speech figure: test likelihood of three models of equal size on equally many samples",
        "command": " ".join(["python", *sys.argv]),
        **describe(options),
        "seed": options.seed,
        "corpus": {"name": corpus.name, "sources": corpus.manifest.sources}
        | {split: info.tokens for split, info in corpus.manifest.splits.items()},
        "floors, bits per sample of the test split": floors(corpus, "test", options.test_samples or None),
        "floors of the curves, which read its beginning": floors(corpus, "test", options.curve_samples),
    }
    code, plan = make_plan(options, deadline)
    found: dict[str, Any] = {}
    for name in [options.only] if options.only else MODELS:
        if code == FINISHED:
            run = open_run(options, name, options.out / name, plan["updates"], options.points)
            code = train_until(run, deadline)
            found[name] = report(run)
            write(options.results, about | {"complete": False, "plan": plan, "models": found})
    for name in () if options.only else MODELS:
        if code == FINISHED:
            code, scores = evaluate(options, corpus, name, deadline)
            found[name] |= scores
            write(options.results, about | {"complete": False, "plan": plan, "models": found})
    if code == FINISHED and not options.only:
        speeds = {name: found[name]["samples per second"] for name in found}
        ratios = {name: speed / speeds["wavenet"] for name, speed in speeds.items()}
        whole = {"complete": True, "plan": plan, "training speed as a share of WaveNet's": ratios, "models": found}
        write(options.results, about | whole)
    print("done" if code == FINISHED else "not done yet: give the same command again", flush=True)
    return code


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Commit and hardware."""
    found = describe_environment()
    hardware = {name: found[name] for name in ("gpu", "cuda", "torch", "python", "cpu_cores", "platform")}
    return {"commit": options.commit or found["commit"], "time": found["time"], "hardware": hardware}


def open_run(options: argparse.Namespace, name: str, folder: Path, updates: int, points: int) -> Run:
    """A run of so many updates, cosine decay to its end, whose configuration follows from the options alone."""
    preset = RunConfig.from_preset(MODELS[name].format(options.family))
    window = preset.model.window if name != "wavenet" else options.chunk
    per_update, rest = divmod(options.chunk, window)
    if rest:
        raise SystemExit(f"--chunk {options.chunk}: expected a multiple of the window, {window}")
    model = dataclasses.replace(preset.model, window=window, dropout=options.dropout)
    steps = updates * per_update
    warmup = max(1, updates // 10) * per_update
    each = max(1, updates // points) * per_update
    wavenet = name == "wavenet"
    schedule = dataclasses.replace(
        preset.train,
        steps=steps,
        batch=options.batch,
        update_every=per_update,
        update_every_from=0,
        learning_rate=options.wavenet_learning_rate if wavenet else options.learning_rate,
        warmup_steps=warmup,
        decay_steps=steps - warmup,
        clip=options.clip,
        precision=options.precision,
        attention=options.attention,
        compile=not options.eager,
        recompute=options.recompute,
        seed=options.seed,
        log_every=max(1, updates // (4 * points)) * per_update,
        eval_every=each,
        eval_test=True,
        eval_tokens=options.curve_samples,
        sample_every=0,
        checkpoint_every=each,
    )
    data = dataclasses.replace(preset.data, corpus=options.corpus, data_dir=str(options.data_dir))
    return Run.create(folder, RunConfig(model, data, schedule))


def make_plan(options: argparse.Namespace, deadline: float) -> tuple[int, dict[str, Any]]:
    """Measure the three speeds and say how many updates fit; the plan that is there, if there is one."""
    path = options.out / "plan.json"
    settings = {name: getattr(options, name) for name in SETTINGS}
    if path.exists():
        plan: dict[str, Any] = json.loads(path.read_text("utf-8"))
        changed = [name for name in SETTINGS if plan["settings"][name] != settings[name]]
        if changed:
            raise SystemExit(f"{path} was made with another {', '.join(changed)}: give that, or another --out")
        return FINISHED, plan
    speeds: dict[str, float] = {}
    for name in () if options.updates else MODELS:
        run = open_run(options, name, options.out / f"speed-{name}", PLANNED, 1)
        schedule = dataclasses.replace(
            run.config.train, eval_every=0, log_every=run.config.train.update_every, checkpoint_every=10**9
        )
        run = Run.create(run.folder, dataclasses.replace(run.config, train=schedule))
        if (code := train_until(run, deadline)) != FINISHED:
            return code, {}
        speeds[name] = statistics.median(train_speeds(run)[PLANNED // 3 :])
    per_update = options.chunk * options.batch
    updates = options.updates or options.seconds * len(MODELS) / sum(per_update / x for x in speeds.values())
    plan = {
        "settings": settings,
        "samples per second": speeds,
        "samples per update": per_update,
        "updates": max(options.points, int(updates // options.points * options.points)),
    }
    plan["samples"] = plan["updates"] * per_update
    write(path, plan)
    return FINISHED, plan


def train_until(run: Run, deadline: float) -> int:
    """Train; at the deadline do what a signal does: save, and stop."""
    if (left := deadline - time.monotonic()) <= 0:
        return INTERRUPTED
    gc.collect()  # the model before this one
    torch._dynamo.reset()  # what was compiled for it counts against a limit
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timer = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        return train(run)
    finally:
        timer.cancel()


def lines_of(run: Run, kind: str) -> list[dict[str, Any]]:
    """What a run has recorded so far."""
    lines = (json.loads(line) for line in (run.folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]


def train_speeds(run: Run) -> list[float]:
    """Samples per second of each stretch, evaluation and checkpoints not counted; the first ones compile."""
    return [line["tokens_per_second"] for line in lines_of(run, "train")]


def report(run: Run) -> dict[str, Any]:
    """Curves and counts of a run, whole or not.

    Seconds are those of training alone: samples seen over the run's median speed, so that compiling, evaluating and
    saving, which differ for other reasons, do not count; the wall clock stands beside them.
    """
    if not (speeds := train_speeds(run)):
        return {}
    speed = statistics.median(speeds)
    per_step = run.config.train.batch * run.config.model.window
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(run.config.model).parameters())

    def point(line: dict[str, Any]) -> dict[str, float]:
        samples = line["step"] * per_step
        return {
            "update": line["step"] // run.config.train.update_every,
            "samples": samples,
            "seconds": samples / speed,
            "wall seconds": line["seconds"],
            "bits": line["bits"],
            "nats": line["loss"],
        }

    curves = {split: [point(x) for x in lines_of(run, "eval") if x["split"] == split] for split in ("valid", "test")}
    curves["train"] = [point(line) for line in lines_of(run, "train")]
    done = lines_of(run, "train")[-1]["step"] * per_step
    return {
        "parameters": parameters,
        "config": dataclasses.asdict(run.config),
        "samples seen": done,
        "epochs": done / len(run.corpus().split("train")),
        "samples per second": speed,
        "training seconds": done / speed,
        "peak GiB": lines_of(run, "train")[-1]["peak_gib"],
        "curves": curves,
    }


def evaluate(options: argparse.Namespace, corpus: Corpus, name: str, deadline: float) -> tuple[int, dict[str, Any]]:
    """Score by the checkpoint that is best on validation, and by the last; then draw some sound. Done once.

    Of the train split as much is read as there is of the test split: how far the model has learnt it by heart.
    """
    path = options.out / name / "final.json"
    if path.exists():
        return FINISHED, json.loads(path.read_text("utf-8"))
    if time.monotonic() > deadline:
        return INTERRUPTED, {}
    run, device = Run.open(options.out / name), pick_device("auto")
    size = options.test_samples or len(corpus.split("test"))
    found: dict[str, Any] = {}
    for which in ("best", "last"):
        trained = Trained.load(run, which)
        if which == "last" and trained.step // run.config.train.update_every == found["best"]["update"]:
            found["last"] = found["best"]
            continue
        model = trained.model(trained.config, device)
        found[which] = {"update": trained.step // run.config.train.update_every}
        for split in ("train", "valid", "test"):
            codes, clips = corpus.split(split)[:size], corpus.starts(split)
            nats = score(model, codes, streams=options.lanes, precision=options.precision, clips=clips)
            bits = float(nats.mean()) / math.log(2)
            found[which][split] = {"bits": bits, "nats": float(nats.mean()), "samples": len(nats)}
        if which == "best" and options.draw:
            began = time.monotonic()
            silence = torch.from_numpy(corpus.tokenizer.encode(b"\0\0").astype(np.int64))
            drawn = torch.cat(list(generate(model, silence, round(options.draw * RATE), seed=options.seed)))
            write_wav(options.out / f"{name}.wav", corpus.tokenizer.decode(drawn.cpu().numpy()))
            found["drawn"] = {"seconds": options.draw, "in seconds": time.monotonic() - began}
    write(path, found)
    return FINISHED, found


def draw_figure(results: dict[str, Any], path: Path) -> None:
    """Test bits per sample over updates and over seconds of training, as the paper's figure has them."""
    from compressive.plotting import figure, save, tidy

    colours = {"compressive": "#c8553d", "transformer-xl": "#2f6690", "wavenet": "#8a9ba8"}
    drawn = figure(9, 3.6)
    every = drawn.subplots(1, 2, sharey=True)
    floor = results["floors of the curves, which read its beginning"].get("linear prediction")
    for axes, across in zip(every, ("update", "seconds"), strict=True):
        for name, found in results["models"].items():
            curve = found["curves"]["test"]
            axes.plot(
                [point[across] for point in curve], [point["bits"] for point in curve], color=colours[name], label=name
            )
        if floor is not None:
            axes.axhline(floor, color="#33393f", linewidth=0.8, linestyle=":", label="linear prediction")
        tidy(axes, x="updates" if across == "update" else "seconds of training")
    tidy(every[0], "Speech: test bits per sample", x="updates", y="bits per sample")
    every[1].legend(fontsize=8.5, frameon=False)
    save(drawn, path)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
