"""A model as ONNX: one window, with both memories in and out.

Inputs are `tokens`, (batch, window) int64, then what each layer remembers: `recent.0`, `compressed.0`, ..., (batch,
slots, d_model) float32, and with `empty_memory="masked"` also `recent_valid.0`, `compressed_valid.0`, ..., (batch,
slots) bool. Memories of no slots are left out. Outputs are `logits`, (batch, window, vocab_size), and the next memories
in the order of the inputs: `next_recent.0`, ... Any batch size will do. The window has the configured length: pad a
shorter one at its end, read its logits and drop its memories. Every memory starts as zeros, flags as False.
"""

import contextlib
import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressive.config import AnyModelConfig, ModelConfig
from compressive.model.language_model import CompressiveLM
from compressive.model.memory import Memory

ONNX = "model.onnx"
"""The file in a release; weights above 1.5 GiB are in `model.onnx.data` beside it."""
REFUSED = {
    "architecture": ("wavenet", "it has no recent and compressed memory"),
    "compression": ("most_used", "ONNX has no stable sort"),
    "head": ("logistics", "ONNX has no expm1, and what stands in for it gives infinite log-probabilities"),
}
"""Values of a configuration that have no ONNX form, and why."""


def write_onnx(model: CompressiveLM, path: Path) -> None:
    """Write a model in evaluation mode, on the CPU, as ONNX."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    window = Window(model).eval()
    memory = model.initial_memory(2)  # of one row, torch would take the batch size for a constant
    tokens = torch.zeros(2, model.config.window, dtype=torch.long)
    batch = {0: torch.export.Dim("batch")}
    inputs = dict(zip(["tokens", *window.names], [tokens, *window.flat(memory)], strict=True))
    with torch.no_grad(), _silent():
        outputs = dict(
            zip(["logits", *(f"next_{name}" for name in window.names)], window(*_split(inputs)), strict=True)
        )
        program = torch.onnx.export(
            window,
            _split(inputs),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=(batch, [batch] * len(window.names)),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # stack traces, with the paths of this machine
    about = {"inputs": _shapes(inputs), "outputs": _shapes(outputs), "memory_starts_as": "zeros"}
    program.model.metadata_props["compressive"] = json.dumps(about)
    program.save(path)


class Window(nn.Module):
    """A model of one window as a function of plain tensors, which is all that ONNX knows."""

    def __init__(self, model: CompressiveLM) -> None:
        super().__init__()
        self.model = model
        fields = ["recent", "compressed"]
        if model.config.empty_memory == "masked":  # else every slot is valid, always
            fields += ["recent_valid", "compressed_valid"]
        layers = model.initial_memory(1).layers
        self.places = [(i, name) for i, layer in enumerate(layers) for name in fields if getattr(layer, name).shape[1]]
        self.names = [f"{name}.{i}" for i, name in self.places]

    def flat(self, memory: Memory) -> list[Tensor]:
        """The tensors of a memory that `names` names."""
        return [getattr(memory.layers[i], name) for i, name in self.places]

    def forward(self, tokens: Tensor, memories: list[Tensor]) -> list[Tensor]:
        """Read tokens (B, window); return the logits (B, window, V), then the next memories."""
        memory = self.model.initial_memory(tokens.shape[0])
        held: list[dict[str, Any]] = [{} for _ in memory.layers]
        for (i, name), tensor in zip(self.places, memories, strict=True):
            held[i][name] = tensor
        layers = (dataclasses.replace(layer, **fields) for layer, fields in zip(memory.layers, held, strict=True))
        out = self.model(tokens, dataclasses.replace(memory, layers=tuple(layers)))
        return [out.logits, *self.flat(out.memory)]


def require_exportable(config: AnyModelConfig) -> ModelConfig:
    """Return the configuration; raise ValueError if packages are missing or its model has no ONNX form."""
    for name, (value, why) in REFUSED.items():
        if getattr(config, name, None) == value:
            raise ValueError(f"{name}={value!r} cannot be exported as ONNX: {why}; leave out --onnx")
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--onnx needs onnx and onnxscript: pip install 'compressive[onnx]' ({error})") from None
    assert isinstance(config, ModelConfig)
    return config


def _split(inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    tokens, *memories = inputs.values()
    return tokens, memories


def _shapes(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        name: {"shape": ["batch", *tensor.shape[1:]], "type": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in tensors.items()
    }


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hide what torch says about its own insides while it exports."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)
