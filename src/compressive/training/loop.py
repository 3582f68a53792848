"""Training: one straight loop. `step.py` has what happens in a step, `loss.backward()` and clipping among it.

compressive train enwik8-base --train.steps 1000
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressive.architectures import build_model
from compressive.config import RunConfig, TrainConfig
from compressive.console import note, warn
from compressive.data.corpus import Corpus, Streams
from compressive.distributed import World
from compressive.evaluation.score import score
from compressive.inference.generate import generate
from compressive.kernels.dispatch import describe, explain, using
from compressive.model.language_model import LanguageModel
from compressive.runs import checkpoint
from compressive.runs.origin import Origin
from compressive.runs.run import Run
from compressive.runtime import Stopwatch, noted_signals, peak_gib, pick_device
from compressive.training import preflight
from compressive.training.flops import peak_flops, training_flops_per_token
from compressive.training.recorder import Recorder, clock
from compressive.training.schedule import learning_rate
from compressive.training.step import Step, StepRecord, Windows

FINISHED, INTERRUPTED = 0, 75
"""Exit codes: trained to the end; saved after a signal, to be resumed."""
PATIENCE = 3
"""Non-finite steps in a row after which training stops."""


class DivergedError(RuntimeError):
    """Loss or gradients stayed non-finite."""


def train(run: Run, world: World | None = None) -> int:
    """Train a run from its newest checkpoint, or from the beginning where it has none, to its last step.

    All processes of a world call this together, and decide everything alike. Returns an exit code.
    """
    config, options = run.config, run.config.train
    world = world or World(device=pick_device(options.device))
    device, corpus = world.device, run.corpus()
    preflight.check_vocabulary(config.model, corpus)
    streams = Streams(corpus.split("train"), options.batch, *world.streams(options.batch), corpus.starts("train"))
    stride = config.model.window * options.unroll
    if streams.length < stride:
        raise ValueError(
            f"batch={options.batch}: a stream of {corpus.name} has {streams.length} tokens, a step needs {stride}; "
            "give a smaller batch or window"
        )

    world.first(lambda: run.keep_corpus(corpus))
    rows = preflight.micro_batch(config, world, streams.count)
    world.first(lambda: preflight.report(config, world, streams.count, rows))
    saved = world.first(lambda: checkpoint.latest(run.checkpoints))
    origin = Origin.read(run.folder)
    torch.manual_seed(options.seed)
    model = build_model(config.model).to(device).train()
    if origin is not None and saved is None and origin.load().copy_into(model):
        note(f"compressors start from random weights: {origin.source} has none")
    step_fn = Step(model, options, world, streams.count)
    step_fn.micro_batch = rows
    torch.manual_seed(options.seed + world.rank)  # from here on random numbers are dropout's
    step, position, tokens_read, best, seconds = 0, 0, 0, math.inf, 0.0
    if saved is not None:
        step, position, tokens_read, best, seconds = (
            saved.state[name] for name in ("step", "position", "tokens", "best", "seconds")
        )
        step_fn.accumulating = saved.state["accumulating"]
        step_fn.totals = [torch.zeros_like(parameter) for parameter in step_fn.named.values()] * step_fn.accumulating
        same = (saved.state["processes"], saved.state["device"]) == (world.size, device.type)
        parts = step_fn.state() | {"rng": _rng_state(world) if same else {}}
        saved.fill(parts, world)
        _set_rng_state(parts["rng"]) if same else torch.manual_seed(hash((options.seed, step, world.rank)))

    readback, stats = AsyncReadback(device), StepStats(config, world, step)
    unit, stopping = {"bytes": "bpc", "mulaw": "bits", "pcm16": "bits"}.get(corpus.tokenizer.kind, "ppl"), False

    def save(best_value: float | None = None) -> None:
        state: dict[str, Any] = {"step": step, "position": position, "tokens": tokens_read, "best": best}
        state |= {"seconds": recorder.seconds, "accumulating": step_fn.accumulating}
        state |= {"processes": world.size, "device": device.type}
        saver.save(step, step_fn.state() | {"rng": _rng_state(world)}, state, best_value)

    with (
        using(options.attention),
        Recorder(run.folder, config, step, seconds, unit, world.is_first) as recorder,
        checkpoint.Saver(run.checkpoints, world) as saver,
        noted_signals() as signals,
    ):
        where = f"from step {step}" if step else f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
        if origin is not None and not step:
            where += f", starting from {origin.source} at step {origin.step}"
        together = f" × {world.size} ({options.parallel})" if world.size > 1 else ""
        if options.micro_batch == "auto" and device.type == "cuda" and world.size == 1 and step < options.steps:
            step_fn.fit_micro_batch(_read(streams, position, step, config, device))
        how = f"{device}{together}, {options.precision}"
        if step_fn.micro_batch < streams.count:
            how += f", micro-batches of {step_fn.micro_batch} rows"
        how += ", compiled" * options.compile + ", captured" * step_fn.captures
        recorder.say(f"training {run.folder} on {corpus.name}, {how}, {where}")
        forms = explain(config.model, device=device.type, precision=options.precision, parallel=options.parallel)
        for line in describe(forms):
            recorder.say(line)
        while step < options.steps and not stopping:
            windows = _read(streams, position, step, config, device)
            record = step_fn(windows, step, bool(signals))
            step += 1
            tokens_read += options.batch * stride
            position = position + stride if position + 2 * stride <= streams.length else 0
            stopping = stats.add(step, readback.exchange(torch.stack(record)))

            if step % options.log_every == 0 or step == options.steps:
                stopping |= stats.add(step, readback.flush())
                recorder.train(step, stats.summary(step, learning_rate(step - 1, options), tokens_read))
            improved = False
            if options.eval_every and (step % options.eval_every == 0 or step == options.steps):
                with stats.paused(), step_fn.averaged():
                    loss = _evaluate(model, corpus, "valid", config, world)
                    test = _evaluate(model, corpus, "test", config, world) if options.eval_test else None
                improved, best = loss < best, min(loss, best)
                recorder.evaluation(step, "valid", figures(loss), improved)
                if test is not None:
                    recorder.evaluation(step, "test", figures(test))
            if options.sample_every and (step % options.sample_every == 0 or step == options.steps):
                with stats.paused(), step_fn.averaged():
                    _sample(model, corpus, run.folder, step, options, world)
            if improved or step % options.checkpoint_every == 0 or step == options.steps or stopping:
                stopping |= stats.add(step, readback.flush())
                with stats.paused():
                    with tolerate_failed_checkpoint(recorder):
                        saver.wait()
                    save(best if improved else None)
        saver.wait()  # a failure of the last checkpoint is an error
        if stopping and step < options.steps:
            cause = signals[0].name if signals else "a signal to another process"
            recorder.say(f"saved step {step} after {cause}; continue with: compressive train --resume {run.folder}")
            return INTERRUPTED
        recorder.say(
            f"done: {step} step{'s' * (step != 1)} in {clock(recorder.seconds)}; "
            f"evaluate with: compressive evaluate {run.folder}"
        )
    return FINISHED


class AsyncReadback:
    """Copies numbers from the device to the host one step late, so that no step waits for its own."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.pending: Tensor | None = None
        self.event = torch.cuda.Event() if self.cuda else None

    def exchange(self, values: Tensor) -> list[float] | None:
        """Start to copy this step's numbers, return the last one's."""
        before = self.flush()
        if self.event is not None:
            self.pending = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.pending.copy_(values, non_blocking=True)
            self.event.record()
        else:
            self.pending = values
        return before

    def flush(self) -> list[float] | None:
        """Return what is still pending."""
        values, self.pending = self.pending, None
        if values is None:
            return None
        if self.event is not None:
            self.event.synchronize()
        numbers: list[float] = values.tolist()
        return numbers


class StepStats(Stopwatch):
    """Averages step records, detects divergence, measures speed."""

    def __init__(self, config: RunConfig, world: World, step: int) -> None:
        super().__init__(world.device)
        self.speaks = world.is_first
        self.tokens_per_step = config.train.batch * config.train.unroll * config.model.window
        self.flops = training_flops_per_token(config.model)
        peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
        self.peak = None if peak is None else peak * world.size
        self.records: list[StepRecord] = []
        self.in_a_row = 0
        self.steps = step

    def add(self, step: int, numbers: list[float] | None) -> bool:
        """Add the numbers of a `StepRecord`, if there are any; return whether a process was asked to stop."""
        if numbers is None:
            return False
        record = StepRecord(*numbers)
        if record.finite:
            self.records.append(record)
            self.in_a_row = 0
            return bool(record.stop)
        self.in_a_row += 1
        if self.speaks:
            warn(
                f"loss {record.loss:.3g}, gradient norm {record.gradient_norm:.3g} about step {step - 1}: "
                "update and memory skipped"
            )
        if self.in_a_row >= PATIENCE:
            raise DivergedError(
                f"no finite loss or gradient for {PATIENCE} steps in a row, about step {step - 1}; the last checkpoint "
                "is good: lower train.learning-rate, lengthen train.warmup-steps, or try train.precision fp32"
            )
        return bool(record.stop)

    def summary(self, step: int, rate: float, tokens: int) -> dict[str, float | None]:
        """Return the averages since the last time."""
        records, self.records = self.records or [StepRecord(*[math.nan] * len(StepRecord._fields))], []
        mean = StepRecord(*np.array(records).mean(axis=0).tolist())
        steps, self.steps = step - self.steps, step
        speed = steps * self.tokens_per_step / self.lap()
        return {
            "tokens": tokens,
            **figures(mean.loss),
            "compression_loss": _number(mean.compression_loss),
            "learning_rate": rate,
            "gradient_norm": _number(mean.gradient_norm),
            "compressor_gradient_norm": _number(mean.compressor_gradient_norm),
            "tokens_per_second": speed,
            "utilisation": None if self.peak is None else speed * self.flops / self.peak,
            "peak_gib": peak_gib(self.device),
        }


def figures(loss: float) -> dict[str, float | None]:
    """A loss in nats per token, also as bits and perplexity."""
    return {
        "loss": _number(loss),
        "bits": _number(loss / math.log(2)),
        "perplexity": _number(math.exp(min(loss, 700.0))) if math.isfinite(loss) else None,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read(streams: Streams, position: int, step: int, config: RunConfig, device: torch.device) -> Windows:
    """Copy a step's windows to the device, asynchronously: tokens, where clips begin, and which rows are reset."""
    window, count, chance = config.model.window, config.train.unroll, config.train.reset_probability

    def move(views: Iterable[np.ndarray[Any, Any]]) -> Tensor:
        view = np.stack(list(views))
        tokens = torch.from_numpy(view.astype(np.int64) if view.dtype == np.uint32 else view)
        if device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(device, non_blocking=device.type == "cuda")  # MPS may read what is not there yet

    places = [position + i * window for i in range(count)]
    x, y = zip(*(streams.window(place, window) for place in places), strict=True)
    starts = [streams.starts(place, window) for place in places]
    clips = None if starts[0] is None else move(view for view in starts if view is not None)
    resets = move(_resets(streams, step, config.train)) if chance else None
    return Windows(move(x).long(), move(y).long(), clips, resets)


def _resets(streams: Streams, step: int, options: TrainConfig) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of the process's rows start from an empty memory, bool (unroll, streams).

    It depends on seed and step alone, so it is the same after a resume and for any number of processes.
    """
    chances = np.random.default_rng((options.seed, step)).random((options.unroll, options.batch))
    return chances[:, streams.first : streams.first + streams.count] < options.reset_probability


def _rng_state(world: World) -> dict[str, Tensor]:
    """This process's random state, by device."""
    state = {f"cpu.{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        state[f"cuda.{world.rank}"] = torch.cuda.get_rng_state()
    if world.device.type == "mps":
        state[f"mps.{world.rank}"] = torch.mps.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    setters = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state, "mps": torch.mps.set_rng_state}
    for name, tensor in state.items():
        setters[name.split(".")[0]](tensor)


def _evaluate(model: LanguageModel, corpus: Corpus, split: str, config: RunConfig, world: World) -> float:
    """Mean loss on the beginning of a split."""
    options = config.train
    tokens = corpus.split(split)[: options.eval_tokens]
    streams = max(1, min(options.batch, len(tokens) // config.model.window))
    nats = score(model, tokens, streams=streams, precision=options.precision, world=world, clips=corpus.starts(split))
    return float(nats.mean())


def _sample(model: LanguageModel, corpus: Corpus, folder: Path, step: int, options: TrainConfig, world: World) -> None:
    """Continue the beginning of the validation split, and write the sample to the run's folder."""
    if not world.is_first and options.parallel != "fsdp":  # with FSDP every process takes part
        return
    prompt = np.array(corpus.split("valid")[:256], dtype=np.int64)
    sampled = generate(model, torch.from_numpy(prompt).to(world.device), options.sample_tokens, seed=step)
    tokens = [int(token) for token in sampled]
    if not world.is_first:
        return
    folder = folder / "samples"
    folder.mkdir(exist_ok=True)
    if corpus.tokenizer.is_audio:
        from compressive.data.speech.audio import write_wav

        write_wav(folder / f"step-{step:08d}.wav", corpus.tokenizer.decode([*prompt, *tokens]))
        return
    text = [corpus.tokenizer.decode(part).decode("utf-8", "replace") for part in (prompt, tokens)]
    (folder / f"step-{step:08d}.txt").write_text(f"[prompt]\n{text[0]}\n[sample]\n{text[1]}\n", "utf-8")


@contextlib.contextmanager
def tolerate_failed_checkpoint(recorder: Recorder) -> Iterator[None]:
    """Report a checkpoint that cannot be written, and go on training."""
    try:
        yield
    except Exception as error:  # safetensors has errors of its own besides OSError
        recorder.say(f"warning: no checkpoint written ({error}); the one before stays good, training goes on")
