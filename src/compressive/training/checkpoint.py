"""Checkpoints that are whole or not there: written aside, checksummed, then renamed into place.

checkpoints/step-00001000/manifest.json      step, state, checksum of every file and of itself
                         /model.safetensors
                         /trainer.safetensors
checkpoints/best.json                        which one did best on the validation split
"""

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


class CheckpointError(RuntimeError):
    """No usable checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that was found whole."""

    folder: Path
    step: int
    state: dict[str, Any]

    def tensors(self, part: str, device: str = "cpu") -> dict[str, Tensor]:
        """Read one part's tensors."""
        return load_file(self.folder / f"{part}.safetensors", device=device)


def save(folder: Path, step: int, parts: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write a checkpoint of named parts; until the last moment, whatever was there before stays untouched."""
    folder.mkdir(parents=True, exist_ok=True)
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        checksums = {}
        for part, tensors in parts.items():
            path = aside / f"{part}.safetensors"
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
            checksums[path.name] = _sync_and_hash(path)
        manifest = {"step": step, "state": state, "files": checksums}
        path = aside / "manifest.json"
        path.write_text(json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=1), "utf-8")
        _sync_and_hash(path)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        _sync_folder(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


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
