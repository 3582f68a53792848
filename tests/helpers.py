"""What several tests need: small models in float64, random tokens, the way from a model to the reference."""

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from compressive import CompressiveLM, Memory, ModelConfig
from compressive.config.model import Compression
from compressive.model.embedding import TiedEmbedding

TESTS = Path(__file__).parent
ROOT = TESTS.parent
COMPRESSIONS: list[Compression] = ["max", "mean", "conv", "dilated", "most_used", "gru", "attention"]
WITH_A_LOSS = [(kind, loss) for kind in COMPRESSIONS for loss in ("attention", "autoencoding")
               if (kind, loss) != ("most_used", "autoencoding")]  # fmt: skip
TRAINABLE: list[Compression] = ["conv", "dilated", "gru", "attention"]


def benchmark(name: str) -> ModuleType:
    """One of the scripts in benchmarks/, by its path: a folder of tests may have the same name."""
    path = ROOT / "benchmarks" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = sys.modules.get(name)
    if found is not None and getattr(found, "__file__", None) == str(path):
        return found
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_config(**values: Any) -> ModelConfig:
    """A model that runs in milliseconds, with every size different from the others."""
    defaults: dict[str, Any] = {
        "vocab_size": 11, "n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12,
        "window": 4, "memory_size": 6, "compressed_size": 3, "compression_rate": 2,
    }  # fmt: skip
    return ModelConfig(**(defaults | values))


def build(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> CompressiveLM:
    """A model whose every parameter, biases and gains included, is random: nothing cancels by being zero."""
    torch.manual_seed(seed)
    model = CompressiveLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def tied_embedding(model: CompressiveLM) -> TiedEmbedding:
    """The model's embedding, which must be one table."""
    assert isinstance(model.embedding, TiedEmbedding)
    return model.embedding


def gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, which must have one."""
    assert parameter.grad is not None
    return parameter.grad


def random_tokens(config: ModelConfig, batch: int, time: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, time), generator=generator)


def windows_of(tokens: Tensor, size: int) -> tuple[Tensor, ...]:
    return tokens.split(size, dim=1)


def run_windows(model: CompressiveLM, windows: Any, memory: Memory, starts: Any = None) -> Iterator[Any]:
    """Read windows one after the other, memory carried."""
    for i, window in enumerate(windows):
        out = model(window, memory, starts=None if starts is None else starts[i])
        memory = out.memory
        yield out


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Hide from `live_bytes` what is there already: what other tests left behind, and a million objects of torch's."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once; see `only_new_objects`."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # isinstance would wake lazy modules up; fake tensors, left over from tracing, hold no memory
        if issubclass(type(thing), Tensor) and not issubclass(type(thing), FakeTensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def reference_config(config: ModelConfig) -> SimpleNamespace:
    plain = {name: getattr(config, name) for name in vars(config)}
    return SimpleNamespace(
        **plain
        | {
            "memory_size": config.memory_sizes,
            "compressed_size": config.compressed_sizes,
            "compression_rate": config.compression_rates,
        }
    )


def reference_params(model: CompressiveLM) -> dict[str, Any]:
    """The model's weights in the reference's layout, which multiplies rows from the left: x @ W."""

    def array(x: Tensor) -> np.ndarray:
        return x.detach().double().numpy()

    def matrix(linear: nn.Linear) -> np.ndarray:
        return array(linear.weight).T

    config, embedding = model.config, tied_embedding(model)
    params: dict[str, Any] = {"embedding": array(embedding.table), "output_bias": array(embedding.bias)}
    if config.norm == "pre":
        norm = model.trunk.final_norm
        assert isinstance(norm, nn.LayerNorm)
        params |= {"final_gain": array(norm.weight), "final_bias": array(norm.bias)}
    params["layers"] = []
    for layer in model.trunk.layers:
        attention, compression = layer.attention, layer.compression
        widen, _, _, narrow = layer.mlp
        assert isinstance(widen, nn.Linear)
        assert isinstance(narrow, nn.Linear)
        Wk, Wv = np.split(matrix(attention.key_value), 2, axis=1)
        values = {
            "Wq": matrix(attention.query), "Wk": Wk, "Wv": Wv, "Wo": matrix(attention.output),
            "Wr": matrix(attention.relative), "u": array(attention.content_bias), "v": array(attention.position_bias),
            "ln1_gain": array(layer.attention_norm.weight), "ln1_bias": array(layer.attention_norm.bias),
            "ln2_gain": array(layer.mlp_norm.weight), "ln2_bias": array(layer.mlp_norm.bias),
            "W1": matrix(widen), "b1": array(widen.bias),
            "W2": matrix(narrow), "b2": array(narrow.bias),
            "compressor": None if compression is None else compressor_params(config, compression),
        }  # fmt: skip
        if attention.separate:
            values |= {"Wr_far": matrix(attention.far_relative), "v_far": array(attention.far_position_bias)}
        if compression is not None and config.compression_loss == "autoencoding":
            expand = layer.compression_decoder.expand
            values["decoder"] = {"W": matrix(expand), "b": array(expand.bias)}
        params["layers"].append(values)
    return params


def compressor_params(config: ModelConfig, compression: Any) -> dict[str, Any]:
    def array(x: Tensor) -> np.ndarray:
        return x.detach().double().numpy()

    D, kind = config.d_model, config.compression
    params: dict[str, Any] = {}
    if kind in ("conv", "dilated"):
        params["kernel"] = array(compression.kernel.weight).T.reshape(compression.rate, D, D)
        params["bias"] = array(compression.kernel.bias)
    if kind == "dilated":
        params["stack"] = [(array(conv.weight).transpose(2, 1, 0), array(conv.bias)) for conv in compression.stack]
    if kind == "gru":
        for side, letter in (("ih", "i"), ("hh", "h")):
            weights = np.split(array(getattr(compression.cell, f"weight_{side}")).T, 3, axis=1)
            biases = np.split(array(getattr(compression.cell, f"bias_{side}")), 3)
            for gate, weight, bias in zip("rzn", weights, biases, strict=True):
                params[f"W_{letter}{gate}"], params[f"b_{letter}{gate}"] = weight, bias
        params["W_out"], params["b_out"] = array(compression.output.weight).T, array(compression.output.bias)
    if kind == "attention":
        params["Wk"], params["Wv"] = np.split(array(compression.key_value.weight).T, 2, axis=1)
        params["Wo"] = array(compression.output.weight).T
        params["query"], params["offset"] = array(compression.query), array(compression.offset)
    return params
