"""The dispatcher: which form of an operation runs, and why."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from attention_helpers import DEVICE
from helpers import ROOT, build, random_tokens, tiny_config
from training_helpers import command

from compressive import ModelConfig
from compressive.config import AgentRun, RunConfig, preset_names
from compressive.kernels import dispatch
from compressive.kernels.dispatch import Choice, choose, describe, explain

HEADS = {"device": "cuda", "dtype": torch.bfloat16, "head_width": 64}
STEP = {"device": "cuda", "head_width": 64, "sharded": False}
NORM = {"device": "cuda", "dtype": torch.bfloat16, "weight_dtype": torch.float32, "width": 512}
LINEAR = {"device": "cuda", "autocast": True, "grad": True, "relu": False, "n_frozen": 0}
BAND = {"device": "cuda", "dtype": torch.float32, "width": 256}
SAMPLING = {"device": "cuda", "dtype": torch.bfloat16, "vocab_size": 256}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("relative_attention", HEADS),
        ("attention_reconstruction", HEADS),
        ("add_norm", NORM),
        ("linear", LINEAR),
        ("linear", LINEAR | {"device": "cpu", "n_frozen": 3}),  # saves work on every device
        ("linear", LINEAR | {"autocast": False, "relu": True}),
        ("linear_nll", {"device": "cpu"}),
        ("band_nll", BAND),
        ("adam", {"device": "cuda", "sharded": False}),
        ("relative_attention_step", STEP),
        ("linear_step", {"device": "cuda", "width": 1024, "sharded": False}),
        ("sampling", SAMPLING),
    ],
)
def test_a_kernel_runs_where_it_can(name, case):
    choice = choose(name, triton=True, **case)
    assert choice.form == "kernel"
    assert (ROOT / "src" / "compressive" / choice.why).is_file()


@pytest.mark.parametrize(
    ("name", "case", "why"),
    [
        ("relative_attention", HEADS | {"device": "cpu"}, "the device is cpu, the kernel needs a GPU"),
        ("relative_attention", HEADS | {"dtype": torch.float32}, "the type is float32, the kernel runs in bfloat16 or"),
        ("relative_attention", HEADS | {"head_width": 48}, "heads are 48 wide, the kernel takes 16, 32, 64, 128"),
        ("attention_reconstruction", HEADS | {"head_width": 8}, "heads are 8 wide"),
        ("add_norm", NORM | {"width": 5000}, "rows are 5000 wide, the kernel takes up to 4096"),
        ("add_norm", NORM | {"weight_dtype": torch.bfloat16}, "the weight is bfloat16, the kernel takes float32"),
        ("linear", LINEAR | {"device": "cpu"}, "the device is cpu"),
        ("linear", LINEAR | {"autocast": False}, "products are in float32"),
        ("linear", LINEAR | {"grad": False}, "no gradient is wanted"),
        ("linear", LINEAR | {"device": "cpu", "grad": False, "n_frozen": 3}, "the device is cpu"),
        ("band_nll", BAND | {"device": "cpu"}, "the device is cpu"),
        ("band_nll", BAND | {"width": 512}, "a band is 512 wide, the kernel takes up to 256"),
        ("band_nll", BAND | {"dtype": torch.float64}, "the type is float64"),
        ("adam", {"device": "cuda", "sharded": True}, r"weights are sharded \(FSDP\)"),
        ("relative_attention_step", STEP | {"sharded": True}, "weights are sharded"),
        ("linear_step", {"device": "cuda", "width": 2048, "sharded": False}, "rows are 2048 wide"),
        ("sampling", SAMPLING | {"vocab_size": 32_000}, "of 32,000 tokens, more than 1,024: sorting is faster"),
        ("sampling", SAMPLING | {"dtype": torch.float64}, "logits are float64"),
    ],
)
def test_a_refused_kernel_says_why(name, case, why):
    choice = choose(name, triton=True, **case)
    assert choice.form == "reference"
    assert re.match(why, choice.why)


@pytest.mark.parametrize(
    "name", ["relative_attention", "add_norm", "adam", "band_nll", "relative_attention_step", "sampling"]
)
def test_without_triton_nothing_but_torch_runs(name):
    cases = {"relative_attention": HEADS, "add_norm": NORM, "adam": {"device": "cuda", "sharded": False}}
    cases |= {"band_nll": BAND, "relative_attention_step": STEP, "sampling": SAMPLING}
    assert choose(name, triton=False, **cases[name]) == Choice("reference", "triton is not installed")


def test_attention_can_be_forced_either_way_for_a_while():
    assert choose("relative_attention", triton=True, **HEADS).form == "kernel"
    with dispatch.using("reference"):
        assert choose("relative_attention", triton=True, **HEADS).why == "attention='reference' was asked for"
        assert choose("add_norm", triton=True, **NORM).form == "kernel"  # attention alone is meant
    with dispatch.using("fused"):
        assert choose("relative_attention", triton=True, **HEADS | {"dtype": torch.float32}).form == "kernel"
        with pytest.raises(ValueError, match=r"attention='fused': triton is not installed; use auto, or reference"):
            choose("relative_attention", triton=False, **HEADS)
    with pytest.raises(RuntimeError, match="on the way"), dispatch.using("reference"):
        raise RuntimeError("on the way")
    assert choose("relative_attention", triton=True, **HEADS).form == "kernel"


def test_a_kernel_is_refused_on_a_cpu_even_if_forced(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    with (
        dispatch.using("fused"),
        pytest.raises(ValueError, match="the device is cpu, the kernel needs a GPU; use auto"),
    ):
        choose("relative_attention", triton=True, **HEADS | {"device": "cpu"})


def test_what_rules_repeat_of_kernel_modules_is_the_same():
    pytest.importorskip("triton", reason="triton is not installed")
    from compressive.kernels import add_norm, band_nll, relative_attention, relative_attention_step, sampling

    assert band_nll.MAX_WIDTH == dispatch.MAX_BAND_WIDTH
    assert relative_attention.HEAD_WIDTHS == dispatch.HEAD_WIDTHS
    assert add_norm.MAX_WIDTH == dispatch.MAX_NORM_WIDTH
    assert relative_attention_step.MAX_WIDTH == dispatch.MAX_STEP_WIDTH
    assert sampling.MAX_VOCAB == dispatch.MAX_SAMPLING_VOCAB


@pytest.mark.slow
def test_layers_compile_whole_through_the_dispatcher():
    config = tiny_config()
    model = build(config)
    tokens, memory = random_tokens(config, 2, 4), model.initial_memory(2)
    want = model(tokens, memory).logits
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(tokens, memory).logits, want)


def test_explanations_hold_only_what_a_model_has():
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 64, "n_heads": 2}
    assert "attention_reconstruction" not in explain(ModelConfig(compressed_size=0, **sizes))
    assert "attention_reconstruction" not in explain(ModelConfig(compression_loss="autoencoding", **sizes))
    assert "add_norm" not in explain(ModelConfig(norm="pre", **sizes))
    assert "linear_nll" not in explain(ModelConfig(head="logistics", **sizes))
    assert "band_nll" not in explain(ModelConfig(**sizes))
    bands = explain(ModelConfig(vocab_size=500, adaptive_cutoffs=(100,), adaptive_factor=2, **sizes), triton=True)
    assert bands["band_nll"] == Choice("kernel", "kernels/band_nll.py")
    assert list(explain(RunConfig.from_preset("speech-wavenet").model)) == ["linear_nll", "adam", "sampling"]
    agent = explain(AgentRun.from_preset("rooms").memory, agent=True, triton=True)
    assert agent["relative_attention"].form == "kernel"
    assert agent["relative_attention_step"].form == "reference"
    assert "adam" not in agent


def test_lines_name_every_operation_once():
    choices = explain(RunConfig.from_preset("pg19").model, triton=True)
    lines = describe(choices)
    assert lines[0].startswith("kernels: relative_attention, attention_reconstruction, ")
    assert lines[1:] == ["reference: sampling (of 32,000 tokens, more than 1,024: sorting is faster)"]
    assert describe({"a": Choice("reference", "x"), "b": Choice("reference", "x")}) == [
        "kernels: none",
        "reference: a, b (x)",
    ]
    names = [name for line in lines for name in re.findall(r"\w+", line.split(": ")[1].split(" (")[0])]
    assert sorted(names) == sorted(choices)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["enwik8-base", "wikitext103", "rooms"])
def test_the_command_explains_a_preset(preset):
    done = command("bench", "--explain", preset, "--json")
    assert done.returncode == 0, done.stderr
    operations = json.loads(done.stdout)["operations"]
    assert operations["relative_attention"] == {"form": "kernel", "why": "kernels/relative_attention.py"}
    assert {form for operation in operations.values() for form in [operation["form"]]} <= {"kernel", "reference"}
    plain = command("bench", "--explain", preset)
    assert all(name in plain.stdout for name in operations)


@pytest.mark.parametrize("name", preset_names("data"))
def test_every_preset_runs_as_kernels(name):
    """In bf16 on CUDA; sampling from a large vocabulary alone sorts."""
    model = RunConfig.from_preset(name).model
    choices = explain(model, triton=True)
    assert {"linear_nll", "adam", "sampling"} <= set(choices)
    if model.architecture == "compressive":
        training = {"relative_attention", "add_norm", "linear"}
        training |= {"attention_reconstruction"} if any(model.compressed_sizes) else set()
        assert training | {"relative_attention_step", "linear_step"} <= set(choices)
    sorts = {"sampling"} if model.vocab_size > dispatch.MAX_SAMPLING_VOCAB else set()
    assert {operation for operation, choice in choices.items() if choice.form == "reference"} == sorts


@pytest.mark.parametrize("name", preset_names("task"))
def test_every_agent_learns_by_kernels(name):
    """Its acting goes through the trunk's own step."""
    choices = explain(AgentRun.from_preset(name).memory, agent=True, triton=True)
    assert {"relative_attention", "add_norm", "linear"} <= set(choices)
    assert [operation for operation, choice in choices.items() if choice.form == "reference"] == [
        "relative_attention_step"
    ]


@pytest.mark.parametrize("variant", [
    {"compression": "most_used", "compression_loss": "none"}, {"compressed_positions": "separate"}, {"norm": "pre"},
    {"attention_dropout": 0.3}, {"empty_memory": "masked"},
])  # fmt: skip
def test_no_variant_of_the_model_runs_reference_forms(variant):
    config = ModelConfig.from_preset("enwik8-base", **variant)
    assert {choice.form for choice in explain(config, triton=True).values()} == {"kernel"}


@pytest.mark.slow
def test_a_window_shorter_than_the_configured_one_has_the_same_kernels(monkeypatch):
    """The rules ask for no length: a model refuses nothing that the kernels take."""
    pytest.importorskip("triton", reason="triton is not installed")
    from compressive.kernels import relative_attention

    lengths = []
    attend = relative_attention.relative_attention

    def attend_and_note(q, *rest, **more):
        lengths.append(q.shape[2])
        return attend(q, *rest, **more)

    monkeypatch.setattr(relative_attention, "relative_attention", attend_and_note)
    config = tiny_config(d_model=16, n_heads=1, n_layers=1)
    model = build(config).float().to(DEVICE)
    tokens = random_tokens(config, 2, 4).to(DEVICE)
    found = []
    for form in ("fused", "reference"):
        with dispatch.using(form), torch.no_grad():
            memory, logits = model.initial_memory(2), []
            for window in (tokens, tokens[:, :1], tokens[:, :3]):
                out = model(window, memory)
                memory = out.memory
                logits.append(out.logits)
        found.append(torch.cat(logits, dim=1))
    assert lengths == [4, 1, 3]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_unknown_preset_is_refused():
    done = command("bench", "--explain", "nothing")
    assert done.returncode == 2
    assert "preset='nothing' does not exist" in done.stderr


@pytest.mark.slow
def test_asking_imports_no_kernel():
    script = (
        "import sys; from compressive.config import RunConfig; from compressive.kernels.dispatch import explain; "
        "explain(RunConfig.from_preset('pg19').model); print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
