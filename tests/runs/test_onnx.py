"""Models as ONNX: onnxruntime gives what torch gives, window after window."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from compressive.config import ModelConfig
from compressive.model.language_model import CompressiveLM
from compressive.runs import onnx

pytestmark = pytest.mark.slow
onnxruntime = pytest.importorskip("onnxruntime")
TYPES = {"tensor(float)": np.float32, "tensor(bool)": np.bool_}
SIZES = {"vocab_size": 40, "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "window": 8, "memory_size": 8}


def make(**values):
    """A tiny model, biases and norms not at their initial zeros and ones."""
    torch.manual_seed(0)
    sizes = SIZES | {"compressed_size": 6, "compression_rate": 2}
    model = CompressiveLM(ModelConfig(**(sizes | values))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("values", "names"),
    [
        pytest.param(
            {"n_layers": 2, "memory_size": (3, 12), "compressed_size": (6, 0)},
            ["recent.0", "compressed.0", "recent.1"],
            id="conv, other sizes in each layer",
        ),
        pytest.param(
            {"compression": "max", "compressed_positions": "from_window", "norm": "pre", "empty_memory": "masked"},
            ["recent.0", "compressed.0", "recent_valid.0", "compressed_valid.0"],
            id="max, positions from the window, pre-norm, masked",
        ),
        pytest.param(
            {"compressed_size": 0, "adaptive_cutoffs": (8, 20), "adaptive_factor": 2},
            ["recent.0"],
            id="TransformerXL, adaptive",
        ),
        *(
            pytest.param({"compression": name}, ["recent.0", "compressed.0"], id=name, marks=pytest.mark.soak)
            for name in ("mean", "dilated", "gru", "attention")
        ),
    ],
)
def test_onnxruntime_agrees_with_torch_over_windows(values, names, tmp_path):
    model = make(**values)
    onnx.write_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    tokens, *memories = session.get_inputs()
    assert (tokens.name, tokens.type, tokens.shape) == ("tokens", "tensor(int64)", ["batch", 8])
    assert [m.name for m in memories] == names
    assert [output.name for output in session.get_outputs()] == ["logits", *(f"next_{name}" for name in names)]

    for batch in (1, 3):
        held = {m.name: np.zeros((batch, *m.shape[1:]), TYPES[m.type]) for m in memories}
        memory = model.initial_memory(batch)
        for _ in range(3):
            window = torch.randint(40, (batch, 8))
            logits, *after = session.run(None, {"tokens": window.numpy(), **held})
            held = dict(zip(held, after, strict=True))
            with torch.no_grad():
                out = model(window, memory)
            memory = out.memory
            np.testing.assert_allclose(logits, out.logits, atol=2e-5)
            for name, got in held.items():
                field, layer = name.split(".")
                want = getattr(memory.layers[int(layer)], field).numpy()
                assert got.dtype == want.dtype
                np.testing.assert_allclose(got, want, atol=2e-5)
        assert all(array.any() for array in held.values())

    _about(session, tmp_path / "model.onnx", names)


def _about(session, path, names):
    """The metadata has all names and shapes; nothing in the file names this machine's folders."""
    about = json.loads(session.get_modelmeta().custom_metadata_map["compressive"])
    assert about["memory_starts_as"] == "zeros"
    assert about["inputs"]["tokens"] == {"shape": ["batch", 8], "type": "int64"}
    for kind, found in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        assert {name: value["shape"] for name, value in about[kind].items()} == {x.name: x.shape for x in found}
    assert about["outputs"].keys() == {"logits", *(f"next_{name}" for name in names)}
    assert b"site-packages" not in (content := path.read_bytes())
    assert b"compressive/" not in content


def test_importing_the_package_or_exporting_without_onnx_imports_no_onnx():
    code = (
        "import sys, compressive, compressive.cli.export, compressive.runs.onnx\n"
        "assert not {'onnx', 'onnxscript', 'onnx_ir', 'onnxruntime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
