"""Atomic checkpoints: written to a partial folder, checksummed, then renamed into place.

checkpoints/step-00001000/manifest.json      step, state, checksums of every file and of the manifest
                         /shard-00001-model-00001-of-00002.safetensors    the weights, as far as process 1 has them
                         /shard-00001-model-00002-of-00002.safetensors    the state of training: optimiser, memory, ...
checkpoints/best.json                        the step with the lowest validation loss

The shards are written by torch's distributed checkpointing (DCP) in safetensors format, without pickles. DCP records
which part of which tensor each shard holds, so a checkpoint can be read by another number of processes.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from compressive.console import warn
from compressive.distributed import World, local
from compressive.runtime import synchronise, write_atomically

Parts = Mapping[str, Mapping[str, Tensor]]


class _Files(dict[str, int]):
    """The file of each tensor, 1 or 2: weights apart from the state of training, which is several times as large.

    The first process decides for all of them, and does not know the names of tensors that only others have: these are
    no weights.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__({name: 1 if name.startswith(("model.", "average.")) else 2 for name in ("", *names)})

    def __missing__(self, name: str) -> int:
        return 2


# DCP warns if there is no process group; one process needs none.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged or cannot be written."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose checksums match."""

    folder: Path
    step: int
    state: dict[str, Any]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Read the tensors of one part, unsharded; raise CheckpointError if the checkpoint has no such part."""
        reader = HuggingFaceStorageReader(str(self.folder))
        found: dict[str, Tensor] = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(f"{part}.") and isinstance(about, TensorStorageMetadata)
        }
        if not found:
            raise CheckpointError(f"{self.folder} holds no {part!r}: it was written by another kind of run")
        with _plain_errors(f"{self.folder} cannot be read"):
            state_dict_loader.load(found, storage_reader=reader, no_dist=True)
        return {name.removeprefix(f"{part}."): tensor for name, tensor in found.items()}

    def fill(self, parts: Parts, world: World | None = None) -> None:
        """Read into existing tensors, each process its shards; raise CheckpointError on all if one process fails."""
        group = None if world is None else world.background
        with _plain_errors(f"{self.folder} cannot be read"):
            state_dict_loader.load(
                _flat(parts),
                storage_reader=HuggingFaceStorageReader(str(self.folder)),
                process_group=group,
                no_dist=group is None,
            )


def save(folder: Path, step: int, parts: Parts, state: dict[str, Any], world: World | None = None) -> Path:
    """Write a checkpoint of named parts and return its folder; an existing one stays intact until the final rename.

    All processes call this together, each with its shards. They must share the file system. Raises CheckpointError
    if a process cannot write.
    """
    return _save(folder, step, _flat(parts), state, world or World())


def _save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], world: World) -> Path:
    final, partial = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        files = {path.name: _sync_and_hash(path) for path in sorted(partial.iterdir())}
        manifest = {"step": step, "state": state, "files": files}
        path = partial / "manifest.json"
        path.write_text(json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=1), "utf-8")
        _sync_and_hash(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync_folder(folder)

    try:
        world.first(begin)
        with _plain_errors(f"{final} cannot be written"):
            state_dict_saver.save(
                tensors,
                storage_writer=HuggingFaceStorageWriter(str(partial), _Files(tensors), save_distributed=True),
                process_group=world.background,
                no_dist=world.background is None,
            )
        world.first(finish)
    except BaseException:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


class Saver:
    """Asynchronous checkpoints: tensors are copied to the host at once, and a thread writes the copies."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        self.staged: dict[str, Tensor] = {}  # reused by every save: allocating pinned memory is slow
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        if world.is_first:
            for left in folder.glob(".step-*.partial"):  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the save in progress, also after an error."""
        with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
            self.wait()

    def save(self, step: int, parts: Parts, state: dict[str, Any], best: float | None = None) -> None:
        """Start a save; `best`, if given, marks it as the best checkpoint with this loss.

        Waits for the previous save first, and raises its error on all processes.
        """
        self.wait()
        staged = {name: self._stage(name, tensor) for name, tensor in _flat(parts).items()}
        synchronise(self.world.device)

        def write() -> None:
            try:
                _save(self.folder, step, staged, state, self.world)
                if self.world.is_first:
                    if best is not None:
                        mark_best(self.folder, step, best)
                    prune(self.folder, step)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=write, name=f"saving step {step}")
        self.thread.start()

    def _stage(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory, without blocking."""
        source = local(tensor)
        kept = self.staged.get(name)
        if kept is None or (kept.shape, kept.dtype) != (source.shape, source.dtype):
            kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self.staged[name] = kept
        kept.copy_(source, non_blocking=source.is_cuda)
        return self.world.shard_like(kept, tensor)

    def wait(self) -> None:
        """Wait for the save in progress; raise its error."""
        if self.thread is not None:
            self.thread.join()
        error, self.thread, self.error = self.error, None, None
        if error is not None:
            raise error


def mark_best(folder: Path, step: int, value: float) -> None:
    """Record which checkpoint has the lowest validation loss, atomically."""
    write_atomically(folder / "best.json", json.dumps({"step": step, "value": value}))


def best_step(folder: Path) -> int | None:
    """Return the step of the best checkpoint, or None if none is recorded."""
    try:
        return int(json.loads((folder / "best.json").read_text("utf-8"))["step"])
    except (OSError, ValueError, KeyError):
        return None


def prune(folder: Path, step: int, keep: int = 2) -> None:
    """Delete all checkpoints before the last `keep` up to a step, but not the best.

    Later ones are damaged, or training would have gone on from them. They stay, and do not count.
    """
    steps = [saved for saved in _steps(folder) if saved <= step]
    for old in set(steps[:-keep]) - {best_step(folder)}:
        shutil.rmtree(folder / f"step-{old:08d}", ignore_errors=True)


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, None if there is no checkpoint at all; warn about each damaged one.

    Raises CheckpointError if all of them are damaged.
    """
    damaged = []
    for step in reversed(_steps(folder)):
        try:
            found = load(folder / f"step-{step:08d}")
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for reason in damaged:
            warn(f"{reason}; going back to the checkpoint before it")
        return found
    if damaged:
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged ({'; '.join(damaged)}): restore one from a copy, or start anew "
            f"with another --out, or after removing {folder.parent}"
        )
    return None


def best(folder: Path) -> Checkpoint | None:
    """Return the checkpoint with the lowest validation loss, or the newest if none is recorded or it is damaged."""
    if (step := best_step(folder)) is not None:
        try:
            return load(folder / f"step-{step:08d}")
        except CheckpointError as error:
            warn(f"{error}; using the newest instead of the best")
    return latest(folder)


def load(folder: Path) -> Checkpoint:
    """Return a checkpoint whose checksums match; raise CheckpointError otherwise."""
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
        raise CheckpointError(f"{folder} is not a complete checkpoint ({error})") from error


@contextlib.contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Turn DCP's exception into a CheckpointError that names each failed process; it is not an `Exception` itself.

    DCP also wraps Ctrl-C, which is unwrapped here.
    """
    try:
        yield
    except CheckpointException as error:
        if any(isinstance(cause[0], KeyboardInterrupt) for cause in error.failures.values()):
            raise KeyboardInterrupt from None
        causes = [f"process {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items())]
        raise CheckpointError(f"{what} ({'; '.join(causes)})") from error


def _flat(parts: Parts) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor.detach() for part, tensors in parts.items() for name, tensor in tensors.items()}


def _steps(folder: Path) -> list[int]:
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_and_hash(path: Path) -> str:
    with path.open("r+b") as file:  # Windows syncs only what may be written
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
