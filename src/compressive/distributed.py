"""Many processes that train one model: which streams each reads, how gradients meet, what all must agree on.

    torchrun --nproc-per-node 8 -m compressive train pg19 --train.parallel fsdp --train.recompute

Everything is torch's own: torchrun starts the processes, DDP or FSDP2 exchanges gradients, DCP writes checkpoints. A
stream of the corpus belongs to one process, with its memory. Streams are numbered across all processes, so a run can
go on with another number of processes.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from compressive.config import TrainConfig
from compressive.model.language_model import LanguageModel
from compressive.runtime import pick_device

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them; by default there is only this one."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    background: dist.ProcessGroup | None = None
    """Process group for what is not part of a step: checkpoints, and start-up decisions. One thread at a time."""

    @property
    def is_first(self) -> bool:
        """Whether this process logs and writes for all."""
        return self.rank == 0

    def streams(self, batch: int) -> tuple[int, int]:
        """The first of this process's streams, and how many it has; ValueError where they cannot be shared evenly."""
        count = batch // self.size
        if count * self.size != batch:
            sizes = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
            raise ValueError(
                f"batch={batch}: {self.size} processes cannot share so many streams evenly; take one of {sizes} "
                f"processes, or, for a new run, a batch that is a multiple of {self.size}"
            )
        return self.rank * count, count

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes, on the device, without a sync."""
        if self.size > 1:
            values = values.detach().clone()
            dist.all_reduce(values)
            values /= self.size
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, written into the tensor."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def first(self, act: Callable[[], T]) -> T:
        """Call a function in the first process; return its result, or raise its error, in all of them."""
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        if self.size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self.background)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def by_stream(self, tensor: Tensor) -> Tensor:
        """This process's streams, first dimension, as part of all streams; storage is shared, not copied."""
        if self.size == 1 or tensor.ndim == 0:
            return tensor
        return DTensor.from_local(tensor, self._mesh(tensor.device.type), [Shard(0)], run_check=False)

    def shard_like(self, shard: Tensor, tensor: Tensor) -> Tensor:
        """Give a shard in host memory the placement of `tensor`, if that is a DTensor."""
        if not isinstance(tensor, DTensor):
            return shard
        mesh, shape, stride = self._mesh("cpu"), tensor.shape, tensor.stride()
        return DTensor.from_local(shard, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)

    def wrap(self, model: LanguageModel, options: TrainConfig) -> nn.Module:
        """Apply recomputation, compilation and DDP or FSDP2; return the module to call in training."""
        layers = list(model.trunk.layers)
        if options.recompute:
            for layer in layers:  # replaced on the layer itself, so that parameter names stay
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if options.compile:
            # Dynamo reads .grad of every input, which warns for activations.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            # All layers share compiled code, but the first and last layer, evaluation and partial windows recompile it.
            # Above the limit fullgraph=True raises.
            torch._dynamo.config.recompile_limit = 64
            for layer in layers:
                layer.compile(fullgraph=True)
        if options.parallel == "fsdp":
            if self.background is None:
                raise ValueError("parallel='fsdp': expected torchrun to start the processes; see docs/scaling.md")
            # Nothing modifies the outputs in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            for layer in layers:
                fully_shard(layer, mesh=self._mesh(self.device.type))
                for name in ("step", "start_cache", "end_window"):
                    if hasattr(layer, name):  # WaveNet's layers only have `step`
                        register_fsdp_forward_method(layer, name)
            fully_shard(model, mesh=self._mesh(self.device.type))
            register_fsdp_forward_method(model, "step")
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if self.size > 1 else model

    @contextlib.contextmanager
    def exchanging_gradients(self, module: nn.Module, exchange: bool) -> Iterator[None]:
        """Exchange the gradients of a forward and backward pass of a wrapped module, or leave that to a later one."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(exchange)
        waits = not exchange and isinstance(module, DistributedDataParallel)
        with cast(DistributedDataParallel, module).no_sync() if waits else contextlib.nullcontext():
            yield

    def release(self, module: nn.Module) -> None:
        """Drop the gathered weights that FSDP2 holds after a forward pass, so that the next one gathers them anew."""
        if isinstance(module, FSDPModule):
            module.reshard()

    @functools.cache  # noqa: B019  # one World per process
    def _mesh(self, device: str) -> Any:
        return init_device_mesh(device, (self.size,))


@contextlib.contextmanager
def join(device: str) -> Iterator[World]:
    """Join the process group that torchrun started; without torchrun, a world of one process.

    Raises ValueError for processes of torchrun on Apple's GPU (mps), which has no collectives.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ and "RANK" not in os.environ:
        yield World(device=pick_device(device))
        return
    local = int(os.environ.get("LOCAL_RANK", 0))
    chosen = pick_device(f"cuda:{local}" if device in ("auto", "cuda") and torch.cuda.is_available() else device)
    if chosen.type == "mps":
        raise ValueError("device='mps': expected cpu or cuda under torchrun; Apple's GPU has no collectives")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # On one machine torchrun keeps the store across restarts, with the addresses of dead workers. A prefix with the
        # restart count separates them. On several machines that count can differ, so no prefix is used.
        store = PrefixStore(f"attempt-{restarts()}", store)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, chosen, dist.new_group(backend="gloo"))
        dist.barrier()  # a process that exits early would break the others' connections
    finally:
        dist.destroy_process_group()


def restarts() -> int:
    """How often torchrun has restarted its processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, gathered from all processes; other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
