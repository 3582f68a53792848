"""The machine: devices, precision, signals, timing, memory, a record of the environment, atomic file writes."""

import contextlib
import gc
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compressive.config import Precision

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux states the memory of a container, by version of cgroups."""


def pick_device(name: str) -> torch.device:
    """Return the device of a name; raise ValueError if it is not there. A GPU with a number becomes the current one.

    `auto` is an NVIDIA GPU if there is one, else Apple's (MPS) if it works, else the CPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _mps_works() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # graphs are captured, and Triton's kernels launched, on the current device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise ValueError(f"device={name!r}: expected auto, cpu or a device that is there ({reason})") from error
    return device


def _mps_works() -> bool:
    """Whether Apple's GPU is there and computes: virtual machines list one that fails when it is used."""
    if not torch.backends.mps.is_available():
        return False
    try:
        return bool(torch.ones(2, device="mps").sum().item() == 2)
    except RuntimeError:
        return False


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Autocast on a device: bf16 matrix products, or none for fp32; raises ValueError for bf16 on Apple's GPU."""
    if device.type == "mps" and precision == "bf16":
        raise ValueError("precision='bf16': expected fp32 on Apple's GPU (mps)")
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch use so many CPU threads, and then as many as before; 0: change nothing."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronise(device: torch.device) -> None:
    """Wait for everything that a device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back into the mode it had."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Returns what repeats, on the device, all that a function did there when it was captured."""


def cuda_graph(function: Callable[[], object], pool: Any = None) -> Callable[[], object]:
    """Record what a function does on the GPU, without doing it; it must have been called before.

    Functions that leave nothing behind but in tensors of others may share a pool of memory. Other threads may use the
    GPU meanwhile, as one that writes a checkpoint does.
    """
    graph = torch.cuda.CUDAGraph()
    # Garbage may hold graphs or kernels, which CUDA must not free while it records.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
    finally:
        if collects:
            gc.enable()
    return graph.replay


@contextlib.contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGINT and SIGTERM in a list instead of ending the process; a second signal acts as usual.

    Only a main thread may handle signals: in others the list stays empty.
    """
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        for name in before:
            signal.signal(name, before[name])

    before = {name: signal.signal(name, note) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class Stopwatch:
    """Measures intervals of work on a device; can be paused."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.clock = device, time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the context out of the interval."""
        synchronise(self.device)
        began = time.monotonic()
        yield
        self.clock += time.monotonic() - began

    def lap(self) -> float:
        """Return the seconds since the last call."""
        synchronise(self.device)
        now = time.monotonic()
        seconds, self.clock = now - self.clock, now
        return max(seconds, 1e-9)


def peak_gib(device: torch.device) -> float:
    """Peak memory of the device or, on a CPU, of the process, in GiB; NaN where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":  # ru_maxrss would include the peak of the parent process
        status = Path("/proc/self/status").read_text("utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return math.nan

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def memory_gib(device: torch.device) -> float | None:
    """Memory that a device has in all, in GiB: of the GPU, or of the machine or its container; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    if device.type not in ("cpu", "mps"):  # Apple's GPUs share the machine's memory
        return None
    limits = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or no limit, which reads as `max`
            limits.append(int(limit.read_text("utf-8")))
    return min(limits) / 2**30 if limits else None


def describe_environment() -> dict[str, Any]:
    """Return what a result depends on besides the configuration: commit, versions, hardware, command."""
    import compressive

    source = Path(compressive.__file__).parent
    commit = None
    with contextlib.suppress(FileNotFoundError):  # no git
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(asked, cwd=source, capture_output=True, text=True, check=False).stdout.strip() or None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": sys.argv,
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": gpu,
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part: written aside, then renamed.

    Parent folders are created; text is written as UTF-8.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
