"""Compressive Transformer, TransformerXL and WaveNet on raw speech, side by side: the paper's speech figure.

    python experiments/speech.py --seconds 400 --results experiments/results/speech/DATE-h200.json
    python experiments/speech.py --results experiments/results/speech/DATE-h200.json --figure docs/speech.png

The corpus must be in --data-dir already (compressive data prepare speech --source FOLDER): no audio file is read here.

All three models have the same size and are trained on the same number of samples, in the same order (except for less
than a chunk at the end of a stream), with one update per chunk of 3,840 samples of each stream. `--updates` sets the
number of updates. Without it, each model trains briefly first, and the number follows from the three speeds and
`--seconds`, the average training time per model. The plan is kept in OUT/plan.json. All evaluations read the same
samples of the validation and of the test split. The final score is that of the checkpoint that is best on validation
(early stopping).

With `--only` the command stops after training that one model. Without it, it resumes what is there and evaluates.

The command stops after `--sitting` seconds with exit code 75 and everything saved; the same command resumes.
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
"""Names in the results, and the preset of each, given the family."""
PLANNED = 24
"""Updates to measure a model's speed by; the first third is not counted."""
SETTINGS = (
    "family", "corpus", "chunk", "batch", "learning_rate", "wavenet_learning_rate", "clip", "dropout", "precision",
    "eager", "attention", "recompute", "seconds", "updates", "points", "curve_samples", "seed",
)  # fmt: skip
"""Options that a plan depends on; they cannot change once it is made."""


def main() -> int:
    """Plan, train or resume, evaluate; write the results so far after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="folder of prepared corpora")
    add("--corpus", default="speech", help="name of the prepared corpus")
    add("--out", type=Path, default=Path("runs/speech-experiment"), help="folder of the plan, the runs and the audio")
    add("--results", type=Path, required=True, help="results file to write, or with --figure to read")
    add("--figure", type=Path, help="plot the results file to this PNG, and do nothing else")
    add("--family", default="speech", help="presets: FAMILY, FAMILY-txl and FAMILY-wavenet")
    add("--only", choices=MODELS, help="train this model only, e.g. to compile it beforehand")
    add("--seconds", type=float, default=400, help="training time per model, averaged over the three")
    add("--updates", type=int, help="number of updates, in place of --seconds")
    add("--sitting", type=float, default=540, help="seconds after which the command stops; it can be resumed")
    add("--chunk", type=int, default=3840, help="samples of each stream per update")
    add("--batch", type=int, default=8, help="batch size, that is parallel streams")
    add("--learning-rate", type=float, default=6e-4, help="peak, of the transformers")
    add("--wavenet-learning-rate", type=float, default=1e-3, help="peak, of WaveNet")
    add("--clip", type=float, default=0.1, help="largest gradient norm")
    add("--dropout", type=float, default=0.0, help="of all three models")
    add("--precision", default="bf16", choices=("bf16", "fp32"))
    add("--attention", type=attention, default="auto", choices=("auto", "reference", "fused"))
    add("--eager", action="store_true", help="do not compile")
    add("--recompute", action="store_true", help="recompute activations: less memory, more time")
    add("--points", type=int, default=12, help="evaluations per curve")
    add("--curve-samples", type=int, default=10 * RATE, help="samples of each split that each evaluation reads")
    add("--test-samples", type=int, default=0, help="samples of the final evaluation; 0 for all")
    add("--streams", type=int, default=32, help="parallel streams of the final evaluation")
    add("--lanes", type=int, dest="streams", help=argparse.SUPPRESS)  # old name
    add("--sample", type=float, default=0.0, help="seconds of audio to sample from each model at the end")
    add("--draw", type=float, dest="sample", help=argparse.SUPPRESS)  # old name
    add("--seed", type=int, default=0)
    add("--commit", help="commit of the code, where git cannot tell")
    options = parser.parse_args()
    if options.figure is not None:
        plot(json.loads(options.results.read_text("utf-8")), options.figure)
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
        "floors_test_bits_per_sample": floors(corpus, "test", options.test_samples or None),
        "floors_curve_bits_per_sample": floors(corpus, "test", options.curve_samples),
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
        speeds = {name: found[name]["samples_per_second"] for name in found}
        ratios = {name: speed / speeds["wavenet"] for name, speed in speeds.items()}
        whole = {"complete": True, "plan": plan, "training_speed_to_wavenet": ratios, "models": found}
        write(options.results, about | whole)
    print("done" if code == FINISHED else "not done yet: give the same command again", flush=True)
    return code


def attention(name: str) -> str:
    """Return the form of attention; "readable" is the old name of "reference"."""
    return "reference" if name == "readable" else name


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return commit, time and hardware."""
    found = describe_environment()
    hardware = {name: found[name] for name in ("gpu", "cuda", "torch", "python", "cpu_cores", "platform")}
    return {"commit": options.commit or found["commit"], "time": found["time"], "hardware": hardware}


def open_run(options: argparse.Namespace, name: str, folder: Path, updates: int, points: int) -> Run:
    """Return a run of `updates` updates with cosine decay to the end; the options determine its configuration."""
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
    """Return the plan in OUT if there is one; else measure the three speeds and compute how many updates fit."""
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
        "samples_per_second": speeds,
        "samples_per_update": per_update,
        "updates": max(options.points, int(updates // options.points * options.points)),
    }
    plan["samples"] = plan["updates"] * per_update
    write(path, plan)
    return FINISHED, plan


def train_until(run: Run, deadline: float) -> int:
    """Train until the end, or until the deadline: then SIGTERM makes training save and stop."""
    if (left := deadline - time.monotonic()) <= 0:
        return INTERRUPTED
    gc.collect()  # free the previous model
    torch._dynamo.reset()  # its graphs count against the recompile limit
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timer = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, _stop)  # while training does not handle it: nothing is to be saved then
    timer.start()
    try:
        return train(run)
    except Stopped:
        return INTERRUPTED
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


class Stopped(BaseException):
    """SIGTERM came before training handled it; no Exception, which code on the way may turn into another."""


def _stop(number: int, frame: object) -> None:
    raise Stopped


def lines_of(run: Run, kind: str) -> list[dict[str, Any]]:
    """Return the metrics of one kind that a run has recorded so far."""
    path = run.folder / "metrics.jsonl"
    if not path.exists():  # stopped before its first step
        return []
    lines = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]


def train_speeds(run: Run) -> list[float]:
    """Return samples per second of each logging interval, without evaluation and checkpoints; the first compile."""
    return [line["tokens_per_second"] for line in lines_of(run, "train")]


def report(run: Run) -> dict[str, Any]:
    """Return curves and counts of a run, finished or not.

    `seconds` is training time alone: samples seen divided by the run's median speed. Compilation, evaluation and
    checkpoints do not count. Wall-clock seconds are given beside it.
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
            "wall_seconds": line["seconds"],
            "bits": line["bits"],
            "nats": line["loss"],
        }

    curves = {split: [point(x) for x in lines_of(run, "eval") if x["split"] == split] for split in ("valid", "test")}
    curves["train"] = [point(line) for line in lines_of(run, "train")]
    done = lines_of(run, "train")[-1]["step"] * per_step
    return {
        "parameters": parameters,
        "config": dataclasses.asdict(run.config),
        "samples_seen": done,
        "epochs": done / len(run.corpus().split("train")),
        "samples_per_second": speed,
        "training_seconds": done / speed,
        "peak_gib": lines_of(run, "train")[-1]["peak_gib"],
        "curves": curves,
    }


def evaluate(options: argparse.Namespace, corpus: Corpus, name: str, deadline: float) -> tuple[int, dict[str, Any]]:
    """Score the checkpoint that is best on validation, and the last one; then sample audio. Done once.

    As many samples of the train split are read as of the test split, to show overfitting.
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
            nats = score(model, codes, streams=options.streams, precision=options.precision, clips=clips)
            bits = float(nats.mean()) / math.log(2)
            found[which][split] = {"bits": bits, "nats": float(nats.mean()), "samples": len(nats)}
        if which == "best" and options.sample:
            began = time.monotonic()
            silence = torch.from_numpy(corpus.tokenizer.encode(b"\0\0").astype(np.int64))
            sampled = torch.cat(list(generate(model, silence, round(options.sample * RATE), seed=options.seed)))
            write_wav(options.out / f"{name}.wav", corpus.tokenizer.decode(sampled.cpu().numpy()))
            found["sampled"] = {"audio_seconds": options.sample, "seconds": time.monotonic() - began}
    write(path, found)
    return FINISHED, found


NAMES = {"compressive": "Compressive Transformer", "transformer-xl": "TransformerXL", "wavenet": "WaveNet"}
COLOURS = {"compressive": "#c8553d", "transformer-xl": "#2f6690", "wavenet": "#8a9ba8"}


def plot(results: dict[str, Any], path: Path) -> None:
    """Plot test bits per sample over updates and over seconds of training, as in the paper's figure."""
    from compressive.plotting import bound, figure, headline, label_ends, save, tidy

    fig = figure(10.5, 4)
    by_update, by_time = fig.subplots(1, 2, sharey=True)
    floor = results["floors_curve_bits_per_sample"].get("linear_prediction")
    ends = {name: found["curves"]["test"][-1] for name, found in results["models"].items()}
    for axes, across in ((by_update, "update"), (by_time, "seconds")):
        for name, found in results["models"].items():
            curve = found["curves"]["test"]
            axes.plot([point[across] for point in curve], [point["bits"] for point in curve], color=COLOURS[name])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        if floor is not None:
            bound(axes, floor, "linear prediction")
    tidy(by_update, "by updates", x="updates", y="test bits per sample")
    tidy(by_time, "by training time", x="seconds of training")
    label_ends(by_update, [(end["bits"], NAMES[name], COLOURS[name]) for name, end in ends.items()])
    order = sorted(ends, key=lambda name: ends[name]["bits"])
    scores = ", ".join(f"{NAMES[name]} {ends[name]['bits']:.2f}" for name in order)
    detail = "Models of equal size on equally many samples. Bits of the test curve at the last update; lower is better."
    headline(fig, f"Speech, bits per sample: {scores}", detail)
    save(fig, path)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
