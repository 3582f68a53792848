"""One step of training: some windows of every stream, forward and back, memory carried, and an update if it is time.

Nothing here waits for the device: whether a step was finite is decided there. So on a GPU that trains alone a whole
step is captured as a CUDA graph, and costs the host one launch.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from compressive.config import TrainConfig
from compressive.distributed import World, local, whole
from compressive.kernels.dispatch import choose
from compressive.model.embedding import asks_for_shapes
from compressive.model.language_model import LanguageModel
from compressive.runtime import autocast, cuda_graph, memory_gib, peak_gib
from compressive.training.muon import Muon, layer_matrices
from compressive.training.schedule import average_decay, is_update, learning_rate, steps_per_update

WARM_UP = 3
"""Steps of a kind that are called before one is captured: compilation, and buffers that libraries keep."""
FITTING = 0.75
"""Share of a GPU's memory that a step may take with `micro_batch="auto"`; evaluation needs some of the rest."""


class Windows(NamedTuple):
    """What one step reads, on the device."""

    tokens: Tensor  # (unroll, streams, window)
    targets: Tensor  # the same
    starts: Tensor | None  # the same, bool: where new documents begin, if the corpus has such places
    resets: Tensor | None = None  # (unroll, streams), bool: rows whose memory is emptied before a window

    def rows(self, rows: slice) -> Self:
        """Some of the streams."""
        return type(self)(*(None if x is None else x[:, rows] for x in self))  # type: ignore[arg-type]

    def clone(self) -> Self:
        """Copy everything."""
        return type(self)(*(None if x is None else x.clone() for x in self))  # type: ignore[arg-type]

    def copy_(self, other: Self) -> None:
        """Take over another one's contents."""
        for mine, its in zip(self, other, strict=True):
            if mine is not None and its is not None:
                mine.copy_(its)


class Losses(NamedTuple):
    """Of one micro-batch, with their graph."""

    task: Tensor  # ()
    compression: Tensor  # ()
    memory: Any


class StepRecord(NamedTuple):
    """What one step reports: 0-d tensors on the device, or, once read back, numbers."""

    loss: Any  # the task loss, in nats per token
    compression_loss: Any
    gradient_norm: Any  # of the task's parameters, before clipping
    compressor_gradient_norm: Any
    finite: Any  # 1 if losses and gradients were, else the step changed nothing
    stop: Any  # above 0 if any process was asked to stop


class Step:
    """All that steps change, and how: parameters, their optimiser, memory, gradients summed since the last update."""

    def __init__(self, model: LanguageModel, options: TrainConfig, world: World, streams: int) -> None:
        self.options, self.world, self.device = options, world, world.device
        self.autocast = autocast(self.device, options.precision)
        self.forward = world.wrap(model, options)
        self.named: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.groups = model.task_parameters(), model.compressor_parameters()  # they are clipped apart
        # No capture: DDP and FSDP exchange gradients outside the graph; shapes may depend on data.
        self.captures = self.device.type == "cuda" and options.cuda_graph and world.size == 1
        self.captures &= options.parallel != "fsdp" and not asks_for_shapes(model.embedding)
        fused = choose("adam", device=self.device.type, sharded=options.parallel == "fsdp").form == "kernel"
        # A captured update reads its rate from the device; so does the kernel, to be the same captured or not.
        on_device = self.captures or fused
        rate = torch.tensor(options.learning_rate, device=self.device) if on_device else options.learning_rate
        matrices = layer_matrices(model) if options.optimiser == "muon" else {}
        counts = {self.named[name]: n for name, n in matrices.items()}
        self.muons = [
            Muon({p: counts[p] for p in group if p in counts}, options.muon_scale, options.clip, options.weight_decay)
            for group in self.groups
        ]
        self.optimiser = _optimiser([p for p in self.named.values() if p not in counts], rate, on_device)
        self.adam_groups = [[p for p in group if p not in counts] for group in self.groups]
        self.clipped_adam = None
        if fused:
            from compressive.kernels.adam import ClippedAdam

            self.clipped_adam = ClippedAdam(self.optimiser, self.adam_groups, options.clip)
        self.memory = model.initial_memory(streams, options.precision)
        self.streams = streams
        self.micro_batch = streams if options.micro_batch in (0, "auto") else min(int(options.micro_batch), streams)
        self.averages = [parameter.detach().clone() for parameter in self.named.values() if options.weight_average]
        self.forgetting = torch.zeros((), device=self.device)  # of the averages, at this step
        self.totals: list[Tensor] = []  # gradients since the last update, where updates are rarer than steps
        self.counted = torch.zeros((), device=self.device)  # and over how many steps
        self.accumulating = False
        self.asked = torch.zeros((), device=self.device)
        self.keep = _keeper(options, self.device)
        self.graphs: dict[tuple[bool, bool], tuple[Callable[[], object], Windows, StepRecord]] = {}
        # One pool for all kinds of steps: they never run at once, and nothing but the record outlives a step.
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None
        self.taken: dict[tuple[bool, bool], int] = {}

    def __call__(self, windows: Windows, step: int, asked: bool = False) -> StepRecord:
        """Take step number `step`, and report it, on the device; a captured step overwrites its last report."""
        kind = accumulates, updates = steps_per_update(step, self.options) > 1, is_update(step, self.options)
        self.accumulating = accumulates and not updates
        if accumulates and not self.totals:
            self.totals = [torch.zeros_like(parameter) for parameter in self.named.values()]
        self.asked.fill_(asked)
        if self.averages:
            self.forgetting.fill_(1 - average_decay(step, self.options))
        for settings in self.optimiser.param_groups:
            if isinstance(settings["lr"], Tensor):
                settings["lr"].fill_(learning_rate(step, self.options))
            else:
                settings["lr"] = learning_rate(step, self.options)
        self.taken[kind] = self.taken.get(kind, 0) + 1
        if not self.captures or self.taken[kind] <= WARM_UP:
            return self.advance(windows, *kind)
        if kind not in self.graphs:
            self.graphs[kind] = self._capture(windows.clone(), kind)
        replay, held, record = self.graphs[kind]
        held.copy_(windows)
        replay()
        return record

    def advance(self, windows: Windows, accumulates: bool, updates: bool) -> StepRecord:
        """Take a step: forward over the BPTT windows, backward, and an update if this kind of step has one."""
        task, compression, memory = self.gradients(windows)

        # Whether the step is finite is decided on the device, for all processes.
        losses = torch.stack([task, compression, self.asked])
        task, compression, asked = self.world.mean(losses).unbind()
        norms = self.norms()
        good = finite = (task + compression).isfinite() & whole(norms[0]).isfinite() & whole(norms[1]).isfinite()
        self.memory = self.keep(memory, finite, self.memory)
        if accumulates:
            self._accumulate(finite)
        if updates:
            if accumulates:
                for parameter, total in zip(self.named.values(), self.totals, strict=True):
                    local(total).div_(self.counted.clamp(min=1))
                    parameter.grad = total
                good, norms = self.counted > 0, self.norms()
            self.update(norms, good)
            self._average(good)
            if accumulates:
                torch._foreach_zero_([local(total) for total in self.totals])
                self.counted.zero_()
        self.clear_gradients()
        norm, compressor_norm = map(whole, norms)
        return StepRecord(task, compression, norm, compressor_norm, finite.float(), asked)

    def gradients(self, windows: Windows) -> tuple[Tensor, Tensor, list[Any]]:
        """Add the gradients of all rows to those of the parameters, one micro-batch after the other.

        Returns both losses and the next memory of each micro-batch, all detached. Processes exchange gradients with the
        last micro-batch only.
        """
        task, compression = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        parts, memories = self.micro_batches(), []
        for rows in parts:
            share = (rows.stop - rows.start) / self.streams  # every row has as many targets
            whole_batch = len(parts) == 1
            read, memory = (windows, self.memory) if whole_batch else (windows.rows(rows), self.memory.rows(rows))
            with self.world.exchanging_gradients(self.forward, rows is parts[-1]):
                losses = self.losses(read, memory)
                # They share no parameter, so no constant weighs them.
                ((losses.task + losses.compression) * share).backward()
            task, compression = task + losses.task.detach() * share, compression + losses.compression.detach() * share
            memories.append(losses.memory.detach())
        return task, compression, memories

    def losses(self, windows: Windows, memory: Any) -> Losses:
        """Go forward over the BPTT windows, from a memory; the means over windows and rows."""
        unroll = self.options.unroll
        task, compression = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        with self.autocast:
            for i in range(unroll):
                x, y, starts, resets = (None if part is None else part[i] for part in windows)
                if resets is not None:
                    memory = memory.reset(resets)
                out = self.forward(x, memory, targets=y, starts=starts)
                memory = out.memory
                task = task + out.nll.mean() / unroll
                compression = compression + out.compression_loss / unroll
        return Losses(task, compression, memory)

    def micro_batches(self) -> list[slice]:
        """The rows that go through the model together."""
        edges = [*range(0, self.streams, self.micro_batch), self.streams]
        return [slice(start, stop) for start, stop in itertools.pairwise(edges)]

    def fit_micro_batch(self, windows: Windows) -> None:
        """Halve the micro-batch until gradients of such windows fit into the device's memory; nothing else changes.

        Raises torch.OutOfMemoryError if not even one row fits.
        """
        there = memory_gib(self.device)
        while True:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                fits = False
                try:
                    self.gradients(windows)
                    fits = self.device.type != "cuda" or there is None or peak_gib(self.device) <= FITTING * there
                except torch.OutOfMemoryError:
                    if self.micro_batch == 1:
                        raise
            self.clear_gradients()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
            if fits or self.micro_batch == 1:
                return
            self.micro_batch = -(-self.micro_batch // 2)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All that a run needs to go on as if it had never stopped; to be saved, or to be read into.

        The parameters are those named at the start: FSDP puts others in their place while a model is in use.
        """
        by_muon = {p: state for muon in self.muons for p, state in muon.state.items()}
        held = {p: by_muon.get(p) or self.optimiser.state[p] for p in self.named.values()}
        optimiser = {f"{name}.{key}": x for name, p in self.named.items() for key, x in held[p].items()}
        return {
            "model": dict(self.named),
            "optimiser": optimiser,
            "average": dict(zip(self.named, self.averages, strict=True)) if self.averages else {},
            "gradient": dict(zip(self.named, self.totals, strict=True)) if self.accumulating else {},
            "counted": {"steps": self.counted},
            "memory": {name: self.world.by_stream(tensor) for name, tensor in self.memory.state_dict().items()},
        }

    def update(self, norms: list[Tensor], good: Tensor) -> None:
        """Clip each group of gradients by its norm and take the optimiser's step, or do nothing unless `good`."""
        for muon, norm in zip(self.muons, norms, strict=True):
            muon(self.optimiser.param_groups[0]["lr"], norm, good)
        if self.clipped_adam is not None:
            self.clipped_adam(norms, good)
            return
        if self.device.type == "mps" and not good:  # its fused Adam may ignore found_inf (pytorch/pytorch#186360)
            return
        for group, norm in zip(self.adam_groups, norms, strict=True):
            clip_grads_with_norm_(group, self.options.clip, norm)
        self.optimiser.found_inf = (~good).float()  # type: ignore[attr-defined]  # torch's fused Adam then does nothing
        self.optimiser.step()

    def norms(self) -> list[Tensor]:
        """The norm of each group's gradients."""
        gradients = [[p.grad for p in group if p.grad is not None] for group in self.groups]
        return [get_total_norm(group) if group else torch.zeros((), device=self.device) for group in gradients]

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for parameter in self.named.values():
            parameter.grad = None

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averages of the weights in place of the weights, where there are averages."""
        if not self.averages:
            yield
            return
        weights, averages = ([local(x).detach() for x in xs] for xs in (self.named.values(), self.averages))
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            self.world.release(self.forward)
            torch._foreach_copy_(weights, kept)

    @torch.no_grad()
    def _average(self, good: Tensor) -> None:
        """Move the averages towards the weights, unless the step is not `good`."""
        if self.averages:
            averages = [local(average) for average in self.averages]
            apart = torch._foreach_sub([local(parameter) for parameter in self.named.values()], averages)
            torch._foreach_mul_(apart, torch.where(good, self.forgetting, 0))
            torch._foreach_add_(averages, apart)

    def _capture(self, held: Windows, kind: tuple[bool, bool]) -> tuple[Callable[[], object], Windows, StepRecord]:
        """Capture a kind of step that reads its windows from `held`; return what repeats it, and what it reports."""
        records: list[StepRecord] = []
        replay = cuda_graph(lambda: records.append(self.advance(held, *kind)), self.pool)
        return replay, held, records[0]

    def _accumulate(self, finite: Tensor) -> None:
        """Add this step's gradients to the sum, unless they are not finite."""
        for total, parameter in zip(self.totals, self.named.values(), strict=True):
            if parameter.grad is not None:
                local(total).add_(torch.where(finite, local(parameter.grad), 0))
        self.counted += finite


def _optimiser(parameters: list[nn.Parameter], rate: float | Tensor, capturable: bool) -> torch.optim.Adam:
    """Adam, with its state there from the beginning, so that a checkpoint can be read into it."""
    optimiser = torch.optim.Adam(parameters, lr=rate, fused=True, capturable=capturable)
    for parameter in parameters:
        optimiser.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimiser


def _keeper(options: TrainConfig, device: torch.device) -> Callable[[list[Any], Tensor, Any], Any]:
    """Return what keeps a step's memory, given by micro-batch, if the step was finite, and else the one before it.

    On a CPU Python can decide. On a GPU the device decides, in place, as a captured step must find memory where it was:
    dozens of tensors, so best compiled.
    """
    if device.type == "cpu":
        return lambda parts, finite, before: before if not finite else parts[0] if len(parts) == 1 else join(parts)

    def replace(memory: Any, finite: Tensor, before: Any) -> Any:
        return before.replace_(finite, memory)

    replace = torch.compile(replace) if options.compile else replace

    def keep(parts: list[Any], finite: Tensor, before: Any) -> Any:
        if len(parts) == 1:
            return replace(parts[0], finite, before)
        start = 0
        for part in parts:
            stop = start + part.batch_size
            replace(part, finite, before.rows(slice(start, stop)))
            start = stop
        return before

    return keep


def join(parts: list[Any]) -> Any:
    """The memories of all rows, of those of some."""
    return parts[0].join(parts)
