"""Checkpoints that are whole or not there: written aside, checksummed, then renamed into place.

checkpoints/step-00001000/manifest.json      step, state, checksum of every file and of itself
                         /shard-00001-...    one safetensors file for each process that had something to write
checkpoints/best.json                        which one did best on the validation split

The shards are those of torch's distributed checkpointing (DCP), with its safetensors format, which holds no pickle. It
knows which part of which tensor each holds, so what some processes wrote another number of them can read.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from compressive.distributed import World, local

Parts = Mapping[str, Mapping[str, Tensor]]

# One process needs no process group; DCP thinks that worth a warning.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(RuntimeError):
    """No usable checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that was found whole."""

    folder: Path
    step: int
    state: dict[str, Any]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Read one part's tensors, each whole, whatever processes wrote them."""
        reader = HuggingFaceStorageReader(str(self.folder))
        found: dict[str, Tensor] = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(f"{part}.") and isinstance(about, TensorStorageMetadata)
        }
        if not found:
            raise CheckpointError(f"{self.folder} holds no {part!r}: it was written by something else")
        state_dict_loader.load(found, storage_reader=reader, no_dist=True)
        return {name.removeprefix(f"{part}."): tensor for name, tensor in found.items()}

    def fill(self, parts: Parts, world: World | None = None) -> None:
        """Read into tensors that are there, each process its share; if one process cannot, none can."""
        group = None if world is None else world.background
        with _plain_errors(f"{self.folder} cannot be read"):
            state_dict_loader.load(
                _flat(parts),
                storage_reader=HuggingFaceStorageReader(str(self.folder)),
                process_group=group,
                no_dist=group is None,
            )


def save(folder: Path, step: int, parts: Parts, state: dict[str, Any], world: World | None = None) -> Path:
    """Write a checkpoint of named parts; until the last moment, whatever was there before stays untouched.

    All processes call this together, each with its share of the tensors; the folder must be one that all can reach.
    """
    return _save(folder, step, _flat(parts), state, world or World())


def _save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], world: World) -> Path:
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        files = {path.name: _sync_and_hash(path) for path in sorted(aside.iterdir())}
        manifest = {"step": step, "state": state, "files": files}
        path = aside / "manifest.json"
        path.write_text(json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=1), "utf-8")
        _sync_and_hash(path)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        _sync_folder(folder)

    try:
        world.first(begin)
        with _plain_errors(f"{final} cannot be written"):
            state_dict_saver.save(
                tensors,
                storage_writer=HuggingFaceStorageWriter(str(aside), save_distributed=True),
                process_group=world.background,
                no_dist=world.background is None,
            )
        world.first(finish)
    except BaseException:
        if world.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


class Saver:
    """Saves while training goes on: the tensors are copied at once, and a thread writes the copies."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        self.staged: dict[str, Tensor] = {}  # kept from save to save: new memory, or pinned memory, takes long to get
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        if world.is_first:
            for left in folder.glob(".step-*.partial"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let what was begun be finished, whatever ended the training."""
        with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
            self.wait()

    def save(self, step: int, parts: Parts, state: dict[str, Any], best: float | None = None) -> None:
        """Begin to save, and note it as the best if `best` gives its value; waits for the save before this one.

        What went wrong with that one is raised here, on all processes.
        """
        self.wait()
        staged = {name: self._stage(name, tensor) for name, tensor in _flat(parts).items()}
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

        def write() -> None:
            try:
                _save(self.folder, step, staged, state, self.world)
                if self.world.is_first:
                    if best is not None:
                        mark_best(self.folder, step, best)
                    prune(self.folder)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=write, name=f"saving step {step}")
        self.thread.start()

    def _stage(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor into the host's memory, without waiting for it."""
        source = local(tensor)
        kept = self.staged.get(name)
        if kept is None or (kept.shape, kept.dtype) != (source.shape, source.dtype):
            kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self.staged[name] = kept
        kept.copy_(source, non_blocking=True)
        return self.world.shard_like(kept, tensor)

    def wait(self) -> None:
        """Wait until all is written; raise what went wrong."""
        if self.thread is not None:
            self.thread.join()
        error, self.thread, self.error = self.error, None, None
        if error is not None:
            raise error


def mark_best(folder: Path, step: int, value: float) -> None:
    """Note which checkpoint did best, in one rename."""
    aside = folder / ".best.json.partial"
    aside.write_text(json.dumps({"step": step, "value": value}), "utf-8")
    aside.replace(folder / "best.json")


def best_step(folder: Path) -> int | None:
    """Return the step noted as best, if there is one."""
    try:
        return int(json.loads((folder / "best.json").read_text("utf-8"))["step"])
    except (OSError, ValueError, KeyError):
        return None


def prune(folder: Path, keep: int = 2) -> None:
    """Delete all but the last few checkpoints and the best."""
    steps = _steps(folder)
    for step in set(steps[:-keep]) - {best_step(folder)}:
        shutil.rmtree(folder / f"step-{step:08d}", ignore_errors=True)


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is whole; warn of each damaged one that is passed over."""
    for step in reversed(_steps(folder)):
        try:
            return load(folder / f"step-{step:08d}")
        except CheckpointError as error:
            warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
    return None


def best(folder: Path) -> Checkpoint | None:
    """Return the checkpoint that did best on validation, or the newest where none is noted or it is damaged."""
    if (step := best_step(folder)) is not None:
        try:
            return load(folder / f"step-{step:08d}")
        except CheckpointError as error:
            warnings.warn(f"{error}; taking the newest in place of the best", stacklevel=2)
    return latest(folder)


def load(folder: Path) -> Checkpoint:
    """Check a checkpoint against its checksums and return it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        checksum = manifest.pop("checksum")
        if checksum != _checksum(manifest):
            raise CheckpointError(f"{folder / 'manifest.json'} does not match its checksum")
        for name, expected in manifest["files"].items():
            if _hash(folder / name) != expected:
                raise CheckpointError(f"{folder / name} does not match its checksum")
        return Checkpoint(folder, manifest["step"], manifest["state"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint ({error})") from error


@contextlib.contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Say what went wrong, and in which process; DCP's own exception is none that `except Exception` catches."""
    try:
        yield
    except CheckpointException as error:
        causes = [f"process {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items())]
        raise CheckpointError(f"{what} ({'; '.join(causes)})") from error


def _flat(parts: Parts) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor.detach() for part, tensors in parts.items() for name, tensor in tensors.items()}


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.is_dir())


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
