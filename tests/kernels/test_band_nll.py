"""The loss of a band in Triton against torch's, in the interpreter, and that training with it needs no device sync."""

import dataclasses
from functools import partial

import pytest
import torch
from helpers import build, random_tokens, tiny_config
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from compressive import CompressiveLM
from compressive.kernels import linear_nll
from compressive.model import embedding

pytest.importorskip("triton", reason="triton is not installed")
from compressive.kernels import band_nll

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ADAPTIVE = tiny_config(vocab_size=64, d_model=32, n_heads=2, adaptive_cutoffs=(20, 40), adaptive_factor=2)
PROJECTED = dataclasses.replace(ADAPTIVE, first_band_projections=True)


@pytest.fixture
def kernels(monkeypatch):
    """The kernel module, with small tiles and three parts; without a GPU its kernels are interpreted (conftest.py)."""
    monkeypatch.setattr(band_nll, "TILES", {name: {256: (16, 16, 4, 1)} for name in band_nll.TILES})
    monkeypatch.setattr(band_nll, "MAX_SPLITS", 3)
    return band_nll


def case(n, V, K, share, dtype=torch.float32):
    """Input, weights, biases and targets, a share of them in the band; inputs are rounded to float16."""
    generator = torch.Generator().manual_seed(n)
    leaves = [torch.randn(*shape, generator=generator).half() for shape in ((n, K), (V, K), (V,))]
    target = torch.randint(V, (n,), generator=generator)
    target[torch.rand(n, generator=generator) >= share] = -1
    d_nll = torch.randn(n, generator=generator).to(DEVICE)
    return [x.to(DEVICE, dtype).requires_grad_() for x in leaves], target.to(DEVICE), d_nll


def with_gradients(nll, leaves, d_nll):
    return nll, *torch.autograd.grad((nll * d_nll).sum(), leaves)


def in_float64(leaves, target, d_nll):
    """The loss in plain torch, and its gradients."""
    h, weight, bias = exact = [x.detach().double().requires_grad_() for x in leaves]
    nll = F.cross_entropy(F.linear(h, weight, bias), target.clamp(min=0), reduction="none").masked_fill(target < 0, 0)
    return with_gradients(nll, exact, d_nll)


CASES = [(70, 100, 16, 0.3), (33, 129, 8, 0.1), (50, 7, 40, 1.0), (20, 50, 16, 0.0), (1, 1, 4, 1.0), (64, 320, 48, 0.6)]


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_it_agrees_with_torch(kernels, shape):
    leaves, target, d_nll = case(*shape)
    found = with_gradients(kernels.band_nll(*leaves, target), leaves, d_nll)
    want = in_float64(leaves, target, d_nll)
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    assert (found[0][target < 0] == 0).all()
    assert (found[1][target < 0] == 0).all()


@pytest.mark.parametrize("partial_sums", [1, 10**9], ids=["one part", "three parts"])
def test_parts_of_the_words_add_up(kernels, partial_sums, monkeypatch):
    monkeypatch.setattr(kernels, "PARTIAL_SUMS", partial_sums)
    leaves, target, d_nll = case(40, 100, 16, 0.5)
    assert kernels._split(40, 100, 16, 16) == ((1, 112) if partial_sums == 1 else (3, 48))
    found = with_gradients(kernels.band_nll(*leaves, target), leaves, d_nll)
    for ours, theirs in zip(found, in_float64(leaves, target, d_nll), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_half_precision_rounds_no_logits(kernels):
    """Logits and sums are float32: closer to the truth than logits in half precision, gradients as close."""
    leaves, target, d_nll = case(100, 200, 32, 0.5, torch.float16)
    nll, *found = with_gradients(kernels.band_nll(*leaves, target), leaves, d_nll)
    assert (nll.dtype, [x.dtype for x in found]) == (torch.float32, 3 * [torch.float16])
    want_nll, *want = in_float64(leaves, target, d_nll)
    torch.testing.assert_close(nll.double(), want_nll, rtol=1e-5, atol=1e-4)
    for ours, theirs in zip(found, want, strict=True):
        assert (ours.double() - theirs).norm() < 1e-3 * theirs.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tiles of this size need a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("V", "K"), [(40_000, 256), (207_735, 64), (21_278, 16)])
def test_bands_of_wikitext_agree_with_torch(V, K, dtype):
    leaves, target, d_nll = case(1024, V, K, 0.2, dtype)
    h, weight, bias = leaves
    nll, *found = with_gradients(band_nll.band_nll(h, weight, bias, target), leaves, d_nll)
    want_nll, *want = in_float64(leaves, target, d_nll)
    torch.testing.assert_close(nll.double(), want_nll, rtol=1e-5, atol=1e-3)
    for ours, theirs in zip(found, want, strict=True):
        assert (ours.double() - theirs).norm() < (1e-2 if dtype == torch.bfloat16 else 1e-4) * theirs.norm()


def test_gradients_have_the_types_of_what_they_belong_to(kernels):
    leaves, target, d_nll = case(40, 60, 16, 0.5)
    h = leaves[0].detach().half().requires_grad_()  # as autocast casts it
    found = with_gradients(kernels.band_nll(h, *leaves[1:], target), (h, *leaves[1:]), d_nll)
    assert [x.dtype for x in found] == [torch.float32, torch.float16, torch.float32, torch.float32]
    want = with_gradients(kernels.band_nll(*leaves, target), leaves, d_nll)
    for ours, exact in zip(found, want, strict=True):
        assert (ours.float() - exact).norm() < 2e-3 * exact.norm()


def test_a_row_outside_the_band_spoils_nothing(kernels):
    leaves, target, d_nll = case(40, 60, 16, 0.5)
    want = with_gradients(kernels.band_nll(*leaves, target), leaves, d_nll)
    with torch.no_grad():
        leaves[0][target < 0] = float("nan")
    torch.testing.assert_close(with_gradients(kernels.band_nll(*leaves, target), leaves, d_nll), want, rtol=0, atol=0)


def test_shapes_are_known_without_running(kernels):
    leaves, target, d_nll = case(40, 60, 16, 0.5)
    rows, count = torch.argsort(target < 0, stable=True), (target >= 0).sum()
    torch.library.opcheck(kernels._band_nll, (*leaves, target, rows, count))
    _, lse = kernels._band_nll(*leaves, target, rows, count)
    detached = [x.detach() for x in leaves]
    torch.library.opcheck(kernels._band_nll_backward, (*detached, target, rows, count, lse.detach(), d_nll))


@pytest.mark.parametrize("config", [ADAPTIVE, PROJECTED], ids=["adaptive", "projected"])
def test_a_model_is_the_same_with_it(kernels, config, monkeypatch):
    model = build(config, dtype=torch.float32).to(DEVICE)
    tokens, targets = (random_tokens(config, 3, 4, seed=i).to(DEVICE) for i in range(2))
    targets[0, 0] = -100
    memory, losses = model.initial_memory(3), []
    for form in (partial(linear_nll.linear_nll, some=True), kernels.band_nll):
        monkeypatch.setattr(embedding, "band_nll", form)
        nll = model(tokens, memory, targets=targets).nll
        losses.append((nll, *torch.autograd.grad(nll.sum(), model.task_parameters())))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_model_compiles_whole_with_it(kernels, monkeypatch):
    monkeypatch.setattr(embedding, "band_nll", kernels.band_nll)
    model = build(ADAPTIVE, dtype=torch.float32).to(DEVICE)
    tokens, memory = random_tokens(ADAPTIVE, 2, 4).to(DEVICE), model.initial_memory(2)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    found = [form(tokens, memory, targets=tokens).nll for form in (model, compiled)]
    gradients = [torch.autograd.grad(nll.sum(), model.task_parameters()) for nll in found]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


class InTheOpen(TorchDispatchMode):
    """Runs the operators of both losses, which declare their shapes, as the Python that they are made of."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("compressive::").split(".")[0]
        module = {"linear_nll": linear_nll, "band_nll": band_nll}.get(name.removesuffix("_backward"))
        if module is None:
            return func(*args, **(kwargs or {}))
        with self:
            return getattr(module, f"_{name}")._init_fn(*args, **(kwargs or {}))


class NoLaunch:
    """In place of a Triton kernel: its launch only notes the grid."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **__: None


def train_without_values(config):
    """Forward and backward of a model whose tensors have shapes but no values.

    Whatever needs a value raises: an `item`, a shape that depends on the data. On a GPU these make the host wait, and
    cannot be captured.
    """
    with InTheOpen(), torch.device("meta"):
        model = CompressiveLM(config).train()
        tokens = torch.zeros(3, config.window, dtype=torch.long)
        out = model(tokens, model.initial_memory(3), targets=tokens)
        (out.nll.mean() + out.compression_loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("config", [ADAPTIVE, PROJECTED], ids=["adaptive", "projected"])
def test_training_needs_no_device_sync(config, monkeypatch):
    launches = [NoLaunch() for _ in range(3)]
    for name, launch in zip(("forward", "backward_h", "backward_weight"), launches, strict=True):
        monkeypatch.setattr(band_nll, f"_{name}_kernel", launch)
    monkeypatch.setattr(embedding, "band_nll", band_nll.band_nll)
    train_without_values(config)
    assert [len(launch.grids) for launch in launches] == [2, 2, 2]  # the second and third band


def test_without_the_kernel_it_needs_one():
    with pytest.raises(NotImplementedError, match="nonzero"):
        train_without_values(ADAPTIVE)
