"""How fast a model trains and generates on this machine, and where the time goes; what `compressive bench` prints.

    row = measure(ours(config, device), config, device, steps=20)

The same functions measure other people's models, see benchmarks/peers.py: to them a model is a `Subject`. Each row is
measured in a process of its own, so that none sees another's memory or compiled code.
"""

import dataclasses
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

from compressive.architectures import build_model
from compressive.config import Attention, Precision, RunConfig
from compressive.distributed import World
from compressive.inference.generate import generate
from compressive.kernels.dispatch import using
from compressive.runtime import (
    autocast,
    describe_environment,
    evaluating,
    peak_gib,
    pick_device,
    synchronise,
    write_atomically,
)
from compressive.training.flops import peak_flops, training_flops_per_token
from compressive.training.preflight import fit_device, micro_batch
from compressive.training.schedule import is_update
from compressive.training.step import Step, Windows

WARM_UP = 4
"""Steps that are not counted: compilation, first allocations."""
REPEATS = 3
"""How often a stretch of text is sampled."""
BATCHES = 1, 32
"""How many texts are sampled side by side."""
COLUMNS = {
    "micro_batch": ("micro-\nbatch", "d"),
    "tokens_per_second": ("training\ntokens/s", ",.0f"),
    "step_ms": ("ms/step", ",.1f"),
    "forward_ms": ("forward", ",.1f"),
    "backward_ms": ("backward", ",.1f"),
    "update_ms": ("clip,\nAdam", ",.1f"),
    "peak_gib": ("peak\nGiB", ",.2f"),
    "utilisation": ("model\nFLOPs", ".1%"),
    "sampled_per_second_batch_1": ("tokens/s\nsampled, 1", ",.0f"),
    "sampled_per_second_batch_32": ("tokens/s\nsampled, 32", ",.0f"),
}
"""Keys of a row's figures, each with its heading in the table and its format."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model to be measured, ours or another."""

    forward: Callable[[], Tensor] | None
    """Read the next window of every stream, memory carried; return the loss to be minimised. None where the streams do
    not go through the model together: then a step is measured whole."""
    groups: Sequence[list[nn.Parameter]]
    """Parameters, in groups that are clipped together."""
    sample: Callable[[int, int, Callable[[], object]], object] | None = None
    """Read a prompt that fills the memories, then sample tokens: called with the batch size, the length and what to
    call after each token."""
    update: Callable[[], object] | None = None
    """Clip and update, if not by torch's functions."""
    step: Callable[[], object] | None = None
    """A whole step, if it is not just forward, backward and update in turn."""
    micro_batch: int | None = None
    """Streams that go through the model together, if not all."""


@dataclass(frozen=True)
class Work:
    """One row of `compressive bench`; None stands for what training takes: the preset's, if it suits the device."""

    preset: str
    batch: int | None = None
    steps: int = 20
    precision: Precision | None = None
    compile: bool = False
    recompute: bool = False
    attention: Attention | None = None
    device: str = "auto"

    def run(self) -> Row:
        """Measure."""
        config, device = RunConfig.from_preset(self.preset), pick_device(self.device)
        train = dataclasses.replace(
            config.train,
            batch=self.batch or config.train.batch,
            precision=self.precision or config.train.precision,
            compile=self.compile or config.train.compile,
            recompute=self.recompute or config.train.recompute,
            attention=self.attention or config.train.attention,
        )
        train, _ = fit_device(
            train, [f"train.{name}" for name in ("precision", "compile") if getattr(self, name)], device
        )
        config = dataclasses.replace(config, train=train)
        about = {name: getattr(train, name) for name in ("batch", "precision", "compile", "recompute", "attention")}
        with using(train.attention):
            return about | measure(ours(config, device), config, device, self.steps)


def ours(config: RunConfig, device: torch.device) -> Subject:
    """Our model as it is trained and used, on random tokens."""
    torch.manual_seed(0)
    with torch.device(device):
        model = build_model(config.model).train()
    batch, world = config.train.batch, World(device=device)
    step_fn = Step(model, config.train, world, batch)
    x, y = random_tokens(config, device), random_tokens(config, device)
    windows = Windows(x[None], y[None], None)
    step_fn.micro_batch = micro_batch(config, world, batch)
    if config.train.micro_batch == "auto" and device.type == "cuda":
        step_fn.fit_micro_batch(windows)
    parts = step_fn.micro_batch < batch
    prompt, memory = x[0].repeat(prompt_windows(config)), step_fn.memory.clone()

    def forward() -> Tensor:
        nonlocal memory
        out = step_fn.forward(x, memory, targets=y)
        memory = out.memory.detach()
        loss: Tensor = out.nll.mean() + out.compression_loss
        return loss

    def update() -> None:
        step_fn.update(step_fn.norms(), torch.ones((), dtype=torch.bool, device=device))

    updating = next(step for step in itertools.count() if is_update(step, config.train))

    def step() -> object:
        return step_fn(windows, updating)  # also where updates are rarer than steps

    def sample(batch: int, length: int, after_token: Callable[[], object]) -> None:
        with evaluating(model):  # once, or every token would switch the model's mode
            for _ in generate(model, prompt, length, samples=batch):
                after_token()

    return Subject(
        None if parts else forward, step_fn.groups, sample, update, step, step_fn.micro_batch if parts else None
    )


def random_tokens(config: RunConfig, device: torch.device) -> Tensor:
    """A window of every stream; words of an adaptive vocabulary by Zipf's law, since rare ones cost more."""
    model, shape = config.model, (config.train.batch, config.model.window)
    if model.architecture == "compressive" and model.adaptive_cutoffs:
        ranks = torch.exp(torch.rand(shape, device=device) * math.log(model.vocab_size + 1)).long() - 1
        return ranks.clamp(0, model.vocab_size - 1)
    return torch.randint(model.vocab_size, shape, device=device)


def prompt_windows(config: RunConfig) -> int:
    """How many windows fill the memories of every layer."""
    return -(-config.model.memory_span // config.model.window) + 1


def measure(subject: Subject, config: RunConfig, device: torch.device, steps: int, sampled: int | None = None) -> Row:
    """Measure training and generation of a model of the configuration's size, trained as it says.

    So many tokens are sampled, a whole window by default: each position in it, and the compression at its end, once.
    """
    cast = autocast(device, config.train.precision)
    row: Row = {} if subject.micro_batch is None else {"micro_batch": subject.micro_batch}
    if subject.forward is not None:
        row |= measure_training(cast(subject.forward), subject.groups, device, steps, subject.update)
    if subject.step is not None:
        row |= measure_steps(subject.step, device, steps)
    speed = row["tokens_per_second"] = config.train.batch * config.model.window / row["step_ms"] * 1e3
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is not None:
        row["utilisation"] = speed * training_flops_per_token(config.model) / peak
    # Our kernels are warmed up and captured in the first two windows.
    settling = 2 * config.model.window if sampled is None and device.type == "cuda" else 0
    sampled = config.model.window if sampled is None else sampled
    if sampled and subject.sample is not None:
        for batch in BATCHES:
            speed = measure_generation(cast(subject.sample), batch, sampled, device, settling)
            row[f"sampled_per_second_batch_{batch}"] = speed
    return row


def measure_training(
    forward: Callable[[], Tensor],
    groups: Sequence[list[nn.Parameter]],
    device: torch.device,
    steps: int,
    update: Callable[[], object] | None = None,
) -> Row:
    """Milliseconds of a whole step and of its parts, medians over steps, and peak memory.

    On an NVIDIA GPU times are between events in its queue, so that nothing waits for being measured. Elsewhere memory
    is that of the whole process.
    """
    optimiser = torch.optim.Adam([p for group in groups for p in group], lr=1e-5, fused=True)

    def clip_and_step() -> None:
        for group in groups:
            clip_grad_norm_(group, 0.1)
        optimiser.step()

    update = update or clip_and_step
    marks: list[Any] = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            synchronise(device)
            marks = [mark(device)]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
        loss = forward()
        marks.append(mark(device))
        loss.backward()
        marks.append(mark(device))
        update()
        optimiser.zero_grad(set_to_none=True)
        marks.append(mark(device))
    synchronise(device)
    parts = {
        f"{name}_ms": statistics.median(between(marks[i], marks[i + 1]) for i in range(start, len(marks) - 1, 3))
        for start, name in enumerate(("forward", "backward", "update"))
    }
    whole = statistics.median(between(a, b) for a, b in zip(marks[:-3:3], marks[3::3], strict=True))
    return {"step_ms": whole, **parts, "peak_gib": peak_gib(device)}


def measure_steps(step: Callable[[], object], device: torch.device, steps: int) -> Row:
    """Milliseconds of a whole step, median over steps, and peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # before the capture, which allocates a step's memory
    marks: list[Any] = []
    for i in range(2 * WARM_UP + steps):
        if i == 2 * WARM_UP:
            synchronise(device)
            marks = [mark(device)]
        step()
        marks.append(mark(device))
    synchronise(device)
    whole = statistics.median(between(a, b) for a, b in itertools.pairwise(marks))
    return {"step_ms": whole, "peak_gib": peak_gib(device)}


def measure_generation(
    sample: Callable[[int, int, Callable[[], object]], object],
    batch: int,
    length: int,
    device: torch.device,
    settling: int = 0,
) -> float:
    """Tokens per second of `length` tokens in a row, all texts together: the median over some calls.

    The clock starts after the prompt, the first token and `settling` more: to subtract the time of a shorter call would
    put the noise of reading the prompt into the figure.
    """

    def seconds() -> float:
        count, began = 0, 0.0

        def after_token() -> None:
            nonlocal count, began
            count += 1
            if count == 1 + settling:
                synchronise(device)
                began = time.perf_counter()

        sample(batch, 1 + settling + length, after_token)
        synchronise(device)
        if count != 1 + settling + length:
            raise RuntimeError(f"{count} tokens were sampled: expected {1 + settling + length}")
        return time.perf_counter() - began

    sample(batch, 2, lambda: None)
    return batch * length / statistics.median(seconds() for _ in range(REPEATS))


def median_seconds(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, with the device idle before and after."""
    times = []
    for _ in range(repeats):
        synchronise(device)
        began = time.perf_counter()
        act()
        synchronise(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def kernel_times(act: Callable[[], object], repeats: int, warm_up: int = 0) -> dict[str, float]:
    """GPU milliseconds of one call, by kernel, from the profiler: wall time of short kernels would measure the host."""
    for _ in range(warm_up):
        act()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            act()
        torch.cuda.synchronize()
    return {kernel.key: kernel.device_time_total / 1000 / repeats for kernel in profiled.key_averages()}


def mark(device: torch.device) -> Any:
    """A time stamp; on an NVIDIA GPU a CUDA event, so that nothing waits."""
    if device.type != "cuda":
        synchronise(device)
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    """Milliseconds between two time stamps."""
    return float((second - first) * 1e3 if isinstance(first, float) else first.elapsed_time(second))


def row_or_error(act: Callable[[], Row]) -> Row:
    """Return a row, or one that holds the error, so that the other rows of a run are kept."""
    try:
        return act()
    except Exception as error:  # written to the results, whatever it is
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def in_own_process(command: Sequence[str]) -> Row:
    """Run a Python command that prints a row as JSON on its last line; a failure gives a row with its error."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return row
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # The first line that names an error: torch adds advice after it.
    said = next((line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))), "")
    return {"error": said or f"ended with code {done.returncode}"}


def bench(works: Sequence[Work], show: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measure row after row, each in its own process; `show` is called with the name of each."""
    rows = []
    for work in works:
        show(f"{work.preset}, batch {work.batch or RunConfig.from_preset(work.preset).train.batch}")
        found = in_own_process(["-m", "compressive.bench", json.dumps(dataclasses.asdict(work))])
        rows.append({"name": work.preset, "batch": work.batch} | found)
    return rows


def print_table(rows: Sequence[Row], title: str) -> None:
    """Print a table, one line per row; errors in full below it."""
    from rich.console import Console
    from rich.table import Table

    shown = {key: column for key, column in COLUMNS.items() if any(key in row for row in rows)}
    table = Table("", "batch", title=title, title_justify="left", box=None, pad_edge=False)
    for heading, _ in shown.values():
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [format(row[key], style) if key in row else "–" for key, (_, style) in shown.items()]
        table.add_row(row["name"], str(row.get("batch") or "–"), *cells)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['name']}: {row['error']}", markup=False, highlight=False)


def results(what: str, command: str, rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """Return rows with command, commit and hardware, for JSON."""
    found = describe_environment()
    hardware = {name: found[name] for name in ("gpu", "cpu_cores", "threads", "torch", "cuda", "python")}
    about = {"what": what, "command": command, "commit": found["commit"], "time": found["time"]}
    about["hardware"] = {"cpu": processor(), **hardware}
    return about | more | {"rows": list(rows)}


def write_results(path: Path, what: str, command: str, rows: Sequence[Row], **more: Any) -> None:
    """Write rows as JSON, with command, commit and hardware; the folder is created."""
    write_atomically(path, json.dumps(results(what, command, rows, **more), indent=1) + "\n")


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    print(json.dumps(Work(**json.loads(sys.argv[1])).run()))
