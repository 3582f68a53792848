"""Embeddings at both ends: tied weights, adaptive bands, log-probabilities without all logits."""

import dataclasses
from functools import partial

import pytest
import torch
from helpers import build, gradient, random_tokens, tiny_config
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from compressive import ModelConfig
from compressive.kernels import linear_nll as module
from compressive.model.embedding import AdaptiveEmbedding, TiedEmbedding, build_embedding, linear_nll

PLAIN = tiny_config(vocab_size=23)
ADAPTIVE = tiny_config(vocab_size=23, adaptive_cutoffs=(5, 12), adaptive_factor=2)


PROJECTED = dataclasses.replace(ADAPTIVE, first_band_projections=True)


@pytest.fixture(params=[PLAIN, ADAPTIVE, PROJECTED], ids=["plain", "adaptive", "projected"])
def model(request):
    return build(request.param)


def test_the_configuration_chooses(model):
    kind = AdaptiveEmbedding if model.config.adaptive_cutoffs else TiedEmbedding
    assert type(model.embedding) is kind


def test_cutoffs_beyond_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"adaptive_cutoffs=\(5, 23\): .* between 0 and vocab_size=23; give smaller"):
        build(tiny_config(vocab_size=23, adaptive_cutoffs=(5, 23), adaptive_factor=2))


def test_input_and_output_share_their_weights(model):
    names = dict(model.embedding.named_parameters())
    widths = 8 * 23 if type(model.embedding) is TiedEmbedding else 8 * 5 + 4 * 7 + 2 * 11 + 8 * 4 + 8 * 2 + 2 * 8 + 2
    widths += 2 * 8 * 8 if model.config.first_band_projections else 0
    assert sum(p.numel() for p in names.values()) == widths + 23


def test_embedding_looks_tokens_up():
    embedding = build(ADAPTIVE).embedding
    assert isinstance(embedding, AdaptiveEmbedding)
    tables, projections = embedding.tables, embedding.projections
    got = embedding(torch.tensor([3, 7, 22])) / 8**0.5
    torch.testing.assert_close(got[0], tables[0][3])
    torch.testing.assert_close(got[1], projections[0] @ tables[1][7 - 5])
    torch.testing.assert_close(got[2], projections[1] @ tables[2][22 - 12])


def test_the_first_band_may_be_projected_at_both_ends():
    plain, projected = build(ADAPTIVE).embedding, build(PROJECTED).embedding
    assert isinstance(plain, AdaptiveEmbedding)
    assert isinstance(projected, AdaptiveEmbedding)
    assert projected.first_input is not None
    assert projected.first_output is not None
    assert {name for name, _ in projected.named_parameters()} - {name for name, _ in plain.named_parameters()} == {
        "first_input", "first_output",
    }  # fmt: skip
    got = projected(torch.tensor([3])) / 8**0.5
    torch.testing.assert_close(got[0], projected.first_input @ projected.tables[0][3])
    hidden = torch.randn(8, dtype=torch.float64)
    head = torch.cat([projected.tables[0], projected.band_scores.weight]) @ (hidden @ projected.first_output)
    head = head + torch.cat([projected.biases[0], projected.band_scores.bias])
    torch.testing.assert_close(projected.logits(hidden)[:5], head.log_softmax(-1)[:5])
    with pytest.raises(ValueError, match="first_band_projections=True: expected False without bands"):
        dataclasses.replace(PLAIN, first_band_projections=True)


@pytest.mark.parametrize("config", [ADAPTIVE, PROJECTED])
def test_adaptive_logits_are_log_probabilities(config):
    model = build(config)
    logits = model.embedding.logits(torch.randn(4, 8, dtype=torch.float64))
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(4, dtype=torch.float64))


def test_nll_is_that_of_the_logits(model, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 60)  # a few rows at a time
    tokens, targets = random_tokens(model.config, 3, 4), random_tokens(model.config, 3, 4, seed=1)
    memory = model.initial_memory(3)
    out, scored = model(tokens, memory), model(tokens, memory, targets=targets)
    want = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 4)
    torch.testing.assert_close(scored.nll, want)
    assert scored.logits is None
    assert out.nll is None

    weight = torch.randn(3, 4, dtype=torch.float64)
    parameters = [p for n, p in model.named_parameters() if "compress" not in n]
    got = torch.autograd.grad((scored.nll * weight).sum(), parameters)
    for g, w in zip(got, torch.autograd.grad((want * weight).sum(), parameters), strict=True):
        torch.testing.assert_close(g, w)


def test_nll_gradients_are_right():
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (7, 3), (7,)))
    target = torch.tensor([0, 6, -1, 3, 3])
    for targets, some in ((target, True), (target.abs(), True), (target.abs(), False)):
        assert torch.autograd.gradcheck(partial(linear_nll, some=some), (hidden, weight, bias, targets))
        torch.library.opcheck(module._linear_nll, (hidden, weight, bias, targets, some))
    assert linear_nll(hidden, weight, bias, target, some=True)[2] == 0


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation gives; our own operators, which hide theirs, are run in the open."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "compressive":
            operator = module._linear_nll_backward if "backward" in func.name() else module._linear_nll
            with self:
                return operator._init_fn(*args)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("cutoffs", [(), (500, 2000)])
def test_nll_never_builds_all_logits(cutoffs, monkeypatch):
    config = ModelConfig(vocab_size=5000, d_model=4, n_heads=1, n_layers=1, adaptive_cutoffs=cutoffs, adaptive_factor=2)
    embedding = build_embedding(config)
    hidden = torch.randn(2, 64, 4, requires_grad=True)
    targets = random_tokens(config, 2, 64)
    monkeypatch.setattr(module, "CHUNK", 30_000)
    with Largest() as chunked:
        embedding.nll(hidden, targets).sum().backward()
    with Largest() as whole:
        embedding.logits(hidden)
    assert whole.numel >= 2 * 64 * 5000
    assert 25_000 <= chunked.numel <= 30_000


def test_a_band_costs_its_own_tokens_only():
    config = tiny_config(vocab_size=2000, adaptive_cutoffs=(10,), adaptive_factor=2)
    embedding = build_embedding(config)
    hidden = torch.randn(1, 500, 8)
    targets = torch.zeros(1, 500, dtype=torch.long)
    targets[0, :3] = 1999
    with Largest() as seen:
        embedding.nll(hidden, targets)
    assert 3 * 1990 <= seen.numel < 10 * 1990


def test_band_edges_belong_to_one_band_each():
    embedding, tokens = build(ADAPTIVE).embedding, torch.arange(23)
    assert isinstance(embedding, AdaptiveEmbedding)
    tables, projections = embedding.tables, embedding.projections
    want = torch.cat([tables[0], tables[1] @ projections[0].T, tables[2] @ projections[1].T])
    torch.testing.assert_close(embedding(tokens) / 8**0.5, want)
    hidden = torch.randn(1, 23, 8, dtype=torch.float64)
    torch.testing.assert_close(embedding.nll(hidden, tokens[None])[0], -embedding.logits(hidden)[0].diagonal())


def test_one_row_at_a_time_where_rows_are_long(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    hidden, weight, bias, target = torch.randn(5, 3), torch.randn(7, 3), torch.randn(7), torch.arange(5)
    want = F.cross_entropy(hidden @ weight.T + bias, target, reduction="none")
    torch.testing.assert_close(linear_nll(hidden, weight, bias, target), want)


def test_half_precision_gradients_do_not_suffer_from_chunks(monkeypatch):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(4096, 16), torch.randn(50, 16), torch.randn(50)
    target, errors = torch.randint(50, (4096,)), []
    exact = [x.clone().requires_grad_() for x in (weight, bias)]
    F.cross_entropy(hidden @ exact[0].T + exact[1], target, reduction="sum").backward()
    for chunk in (2**23, 50 * 16):
        monkeypatch.setattr(module, "CHUNK", chunk)
        leaves = [x.clone().requires_grad_() for x in (weight, bias)]
        with torch.autocast("cpu", torch.bfloat16):
            nll = linear_nll(hidden, leaves[0], leaves[1], target)
        assert nll.dtype == torch.float32
        nll.sum().backward()
        pairs = [(gradient(a), gradient(b)) for a, b in zip(leaves, exact, strict=True)]
        errors.append([((a - b).norm() / b.norm()).item() for a, b in pairs])
    for whole, chunked in zip(*errors, strict=True):
        assert chunked < 1.5 * whole < 0.02


@pytest.mark.parametrize("cutoffs", [(), (1000, 2000)])
def test_embeddings_start_at_unit_scale(cutoffs):
    torch.manual_seed(0)
    embedding = build_embedding(ModelConfig(vocab_size=4000, d_model=256, adaptive_cutoffs=cutoffs))
    for low in (0, 1000, 2000):
        assert abs(embedding(torch.arange(low, low + 1000)).std().item() - 1) < 0.1


def test_plain_nll_asks_the_device_nothing():
    """Tensors without data cannot answer: what runs on them makes no host wait."""
    hidden, weight, bias = (torch.randn(*s, device="meta") for s in ((5, 3), (7, 3), (7,)))
    target, gradient = torch.zeros(5, dtype=torch.long, device="meta"), torch.randn(5, device="meta")
    module._linear_nll._init_fn(hidden, weight, bias, target, False)
    module._linear_nll_backward._init_fn(gradient, hidden, weight, bias, target, False)
    with pytest.raises((NotImplementedError, RuntimeError)):
        module._linear_nll._init_fn(hidden, weight, bias, target, True)
