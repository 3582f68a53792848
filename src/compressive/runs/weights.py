"""Weights as safetensors files: in one file or in shards, in fp32, bf16 or 8 bits.

model.safetensors                   all weights; or, where they exceed the largest size of a file,
model-00001-of-00003.safetensors    shards, and
model.safetensors.index.json        the shard of each weight, in Hugging Face's form

In 8 bits every row of a matrix has a scale of its own: NAME holds whole numbers from -127 to 127 and NAME.scale_int8
what they are multiplied by. Vectors stay in fp32. Whatever the type in the files, weights are read as fp32 or bf16.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
"""The weights in a release, which has no checkpoints; see `export.py`."""
INDEX = f"{WEIGHTS}.index.json"
"""Which shard has which weight, where there are several."""
Stored = Literal["fp32", "bf16", "int8"]
"""Types in which weights are written."""
SCALE = ".scale_int8"
"""What the scales of a matrix in 8 bits are called after its name."""
MIB = 2**20


def write_weights(folder: Path, weights: Mapping[str, Tensor], stored: Stored = "fp32", shard_mib: int = 0) -> None:
    """Write weights into a folder, in files of at most `shard_mib` MiB, or in one file if that is 0.

    Raises ValueError if a single tensor is larger than `shard_mib`.
    """
    kept = {name: tensor for whole, w in weights.items() for name, tensor in _as_stored(whole, w, stored).items()}
    shards = _sharded(kept, shard_mib)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip([WEIGHTS] if len(shards) == 1 else names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(map(_bytes, kept.values()))}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1), "utf-8")


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a folder, or those that it lacks, in the order of their names.

    Raises ValueError if the index is none, or names files outside the folder.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file():
        return [folder / WEIGHTS]
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
            raise ValueError(f"it names {', '.join(map(repr, names)) or 'no file'}")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{index} cannot be used ({error}): expected the shards of the weights, safetensors files beside it"
        ) from error
    return [folder / name for name in names]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder, from safetensors only: loading a pickle can run arbitrary code.

    Raises FileNotFoundError if a file is missing, ValueError if one is no safetensors file.
    """
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: expected weights as safetensors; no other format is loaded"
            )
        try:
            found |= load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path} is not a valid safetensors file ({error}): pickles are never loaded; export it again"
            ) from error
    scales = {name.removesuffix(SCALE): found.pop(name) for name in list(found) if name.endswith(SCALE)}
    return found | {name: found[name].float() * scale for name, scale in scales.items()}


def _as_stored(name: str, weight: Tensor, stored: Stored) -> dict[str, Tensor]:
    if stored == "fp32":
        return {name: weight.float()}
    if stored == "bf16":
        return {name: weight.bfloat16()}
    if weight.ndim < 2:
        return {name: weight.float()}
    rows = weight.float()
    largest = rows.abs().amax(dim=tuple(range(1, rows.ndim)), keepdim=True)
    scale = torch.where(largest > 0, largest / 127, 1)
    return {name: (rows / scale).round().to(torch.int8), name + SCALE: scale}


def _sharded(weights: Mapping[str, Tensor], shard_mib: int) -> list[dict[str, Tensor]]:
    """Tensors in their order, a new shard wherever the next one does not fit."""
    # A file has a header besides its tensors: some hundred bytes for each.
    limit = shard_mib * MIB * 0.99 if shard_mib else math.inf
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if _bytes(tensor) > limit:
            raise ValueError(
                f"shard_size={shard_mib}: {name} alone has {_bytes(tensor) / MIB:.1f} MiB; take a larger size, "
                "or a precision with fewer bytes"
            )
        if shards[-1] and _bytes(tensor) + sum(map(_bytes, shards[-1].values())) > limit:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
