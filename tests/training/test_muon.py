"""Muon: against torch's, its updates, and which parameters are its."""

import pytest
import torch
from helpers import build, tiny_config
from torch import nn
from training_helpers import latest, make_run, tiny_corpus, tiny_run_config

from compressive.training import loop
from compressive.training.muon import Muon, layer_matrices, orthogonal

SHAPES = ((8, 8), (8, 24), (24, 8), (8, 8))


@pytest.mark.parametrize(("clip", "decay"), [(100.0, 0.0), (0.5, 0.0), (0.5, 0.7)])
def test_it_is_torch_s(clip, decay):
    """Torch's iterates in bf16, so updates agree to its precision."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    muon = Muon(dict.fromkeys(ours, 1), 3.0, clip, decay)
    rate = 0.01
    reference = torch.optim.Muon(
        theirs, lr=3 * rate, weight_decay=decay, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        gradients = [torch.randn(shape) for shape in SHAPES]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for p, q, gradient in zip(ours, theirs, gradients, strict=True):
            p.grad, q.grad = gradient, gradient * min(1, clip / (float(norm) + 1e-6))
        muon(rate, norm, torch.tensor(True))
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.1 * rate)
        torch.testing.assert_close(muon.state[p]["momentum"], reference.state[q]["momentum_buffer"])


def test_singular_values_of_an_update_are_about_one():
    torch.manual_seed(0)
    for shape in ((3, 16, 16), (2, 16, 48), (2, 48, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.max() < 1.3
        assert values.median() > 0.6


def test_parts_of_a_weight_are_matrices_of_their_own():
    torch.manual_seed(0)
    gradient = torch.randn(16, 8) * torch.tensor([100.0] * 8 + [1.0] * 8)[:, None]
    together, apart = nn.Parameter(torch.zeros(16, 8)), [nn.Parameter(torch.zeros(8, 8)) for _ in range(2)]
    together.grad = gradient
    for parameter, part in zip(apart, gradient.chunk(2), strict=True):
        parameter.grad = part
    for muon in (Muon({together: 2}, 1.0, 1e9), Muon(dict.fromkeys(apart, 1), 1.0, 1e9)):
        muon(1.0, torch.tensor(1.0), torch.tensor(True))
    torch.testing.assert_close(together.detach(), torch.cat([p.detach() for p in apart]))
    sizes = [float(part.norm()) for part in together.detach().chunk(2)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)  # whatever the size of the gradient


def test_a_gradient_may_have_any_layout_or_be_missing():
    a, b = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.ones(8, 8))
    a.grad = torch.randn(8, 8).T
    Muon({a: 1, b: 1}, 1.0, 1.0)(torch.tensor(0.1), torch.tensor(1.0), torch.tensor(True))
    assert a.detach().abs().sum() > 0
    assert torch.equal(b, torch.ones(8, 8))


def test_nothing_decays_in_a_step_that_is_not_good():
    weight = nn.Parameter(torch.ones(8, 8))
    muon = Muon({weight: 1}, 2.0, 1.0, 0.5)
    weight.grad = torch.zeros(8, 8)
    muon(torch.tensor(0.1), torch.tensor(float("nan")), torch.tensor(False))
    assert torch.equal(weight, torch.ones(8, 8))
    muon(torch.tensor(0.1), torch.tensor(0.0), torch.tensor(True))
    torch.testing.assert_close(weight.detach(), torch.full((8, 8), 0.9))


@pytest.mark.parametrize(
    ("model", "besides"),
    [
        ({}, {"compression.kernel.weight"}),
        ({"compression": "gru"}, {"compression.output.weight"}),
        (
            {"compression": "attention", "compressed_positions": "separate"},
            {"compression.key_value.weight", "compression.output.weight", "attention.far_relative.weight"},
        ),
        ({"compression_loss": "autoencoding"}, {"compression.kernel.weight", "compression_decoder.expand.weight"}),
    ],
)
def test_what_is_not_a_linear_map_of_a_layer_is_adam_s(model, besides):
    lm = build(tiny_config(**model))
    names = layer_matrices(lm)
    parameters = dict(lm.named_parameters())
    assert all(parameters[name].ndim == 2 for name in names)
    assert {name.split(".", 3)[3] for name in names if ".0." in name[:15]} == {
        "attention.query.weight", "attention.key_value.weight", "attention.output.weight", "attention.relative.weight",
        "mlp.0.weight", "mlp.3.weight",
    } | besides  # fmt: skip
    assert {name for name, parts in names.items() if parts == 2} == {n for n in names if "key_value" in n}


def test_a_run_resumes_exactly_and_with_no_other_optimiser(tmp_path):
    tiny_corpus(tmp_path)
    for name, stops in (("whole", [8]), ("parts", [4, 8])):
        for steps in stops:
            config = tiny_run_config(tmp_path, optimiser="muon", steps=steps, eval_every=0, checkpoint_every=4)
            loop.train(make_run(tmp_path / name, config))
    whole, parts = (latest(tmp_path / name / "checkpoints") for name in ("whole", "parts"))
    for part in ("model", "optimiser"):
        found = parts.tensors(part)
        assert all(torch.equal(tensor, found[name]) for name, tensor in whole.tensors(part).items())
    assert sum(name.endswith(".momentum") for name in whole.tensors("optimiser")) == 2 * 7
    run = make_run(tmp_path / "whole", config)
    with pytest.raises(ValueError, match=r"train.optimiser='adam': the run to be resumed has 'muon'"):
        type(run).begin(run.folder, tiny_run_config(tmp_path), resume=True)
