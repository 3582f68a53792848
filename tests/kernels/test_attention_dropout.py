"""Dropout of attention weights in the kernels: the reference with the kernels' own mask, the mask itself, its seed."""

import pytest
import torch
from attention_helpers import DEVICE, assert_agree, compare
from helpers import build, random_tokens, tiny_config
from torch.utils.checkpoint import checkpoint

from compressive.kernels import dispatch

pytest.importorskip("triton", reason="triton is not installed")
from dropout_helpers import kept_weights, random_numbers  # needs Triton


def seed_of(number):
    return torch.tensor([number], device=DEVICE)


# --- Against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "segmented", "separate"),
    [
        ("tiny", False, False),
        ("tiny", True, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("odd", True, True),
                ("no memory", True, False),
                ("no recent", False, True),
                ("nothing remembered", False, False),
            ]
        ),
    ],
)
def test_kernels_agree_with_the_reference_that_drops_the_same_weights(kernels, name, segmented, separate):
    assert_agree(*compare(kernels.relative_attention, name, segmented, separate, dropout=0.3))


@pytest.mark.slow
def test_the_mask_does_not_depend_on_tiles(kernels, monkeypatch):
    for kernel, tile in {"forward": (32, 16, 4, 1), "backward_kv": (16, 32, 4, 1)}.items():
        monkeypatch.setitem(kernels.TILES, kernel, {128: tile})
    monkeypatch.setattr(kernels, "ROW_ALIGNMENT", 32)
    assert_agree(*compare(kernels.relative_attention, "no compressed", True, False, dropout=0.6))


@pytest.mark.slow
def test_half_precision(kernels):
    found, expected = compare(kernels.relative_attention, "odd", False, False, torch.float16, 40.0, dropout=0.2)
    for part, want in expected.items():
        assert (found[part] - want).norm() < 0.02 * want.norm(), part


# --- The mask -------------------------------------------------------------------------------------


def test_random_numbers_are_those_of_tritons_philox():
    for number in (0, 5, 2**32, 2**62 - 1):
        assert torch.equal(random_numbers(seed_of(number), ours=True), random_numbers(seed_of(number), ours=False))


@pytest.mark.parametrize("dropout", [0.001, 0.15, 0.5, 0.999])
def test_weights_are_dropped_at_the_rate(dropout):
    kept = kept_weights(seed_of(3), 2, 2, 96, 96, dropout)
    n = kept.numel()
    deviation = (dropout * (1 - dropout) / n) ** 0.5
    assert float((~kept).double().mean()) == pytest.approx(dropout, abs=4 * deviation)


def test_weights_are_dropped_independently():
    """Of batch row, head, query and slot, near and at the distances within one call of Philox; and of the seed."""
    first, second = (kept_weights(seed_of(number), 3, 2, 64, 80, 0.3).double() - 0.7 for number in (11, 12))
    pairs = {
        "rows": (first[0], first[1]), "heads": (first[:, 0], first[:, 1]), "seeds": (first, second),
        "row and head": (first[0, 1], first[1, 0]),
    }  # fmt: skip
    for distance in (1, 2, 7, 8, 9, 16, 32):
        pairs[f"queries {distance} apart"] = first[:, :, distance:], first[:, :, :-distance]
        pairs[f"slots {distance} apart"] = first[..., distance:], first[..., :-distance]
        pairs[f"both {distance} apart"] = first[:, :, distance:, distance:], first[:, :, :-distance, :-distance]
    pairs["queries and slots exchanged"] = first[..., :64], first[..., :64].mT
    for name, (a, b) in pairs.items():
        correlation = float((a * b).mean() / 0.21)
        assert abs(correlation) < 4 / a.numel() ** 0.5, name
    for axis in range(4):  # no row, head, query or slot has a rate of its own
        rates = first.movedim(axis, 0).flatten(1).mean(dim=1)
        assert float(rates.abs().max()) < 4.5 * (0.21 / (first.numel() / len(rates))) ** 0.5


# --- The seed -------------------------------------------------------------------------------------


def random_inputs(K=16):
    generator = torch.Generator().manual_seed(0)
    q, kv, r = (torch.randn(*shape, generator=generator) for shape in ((1, 1, 5, K), (1, 8, 2, 1, K), (1, 13, K)))
    u = torch.zeros(1, K)
    return [x.to(DEVICE) for x in (q, kv, r, u, u, torch.ones(1, 3, dtype=torch.bool))]


def test_each_call_has_a_mask_of_its_own_and_torchs_generator_repeats_it(kernels):
    inputs = random_inputs()

    def attend(dropout=0.5):
        return kernels.relative_attention(*inputs, dropout=dropout)[0]

    torch.manual_seed(5)
    first, second = attend(), attend()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(attend(), first)
    assert torch.equal(attend(), second)
    assert torch.equal(attend(0.0), attend(0.0))


@pytest.mark.slow
def test_a_model_drops_in_training_only_and_a_layer_that_is_computed_again_has_the_same_masks(kernels):
    config = tiny_config(n_layers=1, d_model=16, n_heads=1, attention_dropout=0.4)
    model = build(config).float().to(DEVICE)
    tokens, memory = random_tokens(config, 2, 4).to(DEVICE), model.initial_memory(2)

    def loss(memory, tokens):
        return model(tokens, memory, targets=tokens).nll.sum()

    def gradients(recomputed):
        torch.manual_seed(1)
        # The tokens are an argument, as checkpointing keeps the random state of its arguments' devices.
        total = checkpoint(loss, memory, tokens, use_reentrant=False) if recomputed else loss(memory, tokens)
        return torch.autograd.grad(total, list(model.trunk.layers[0].attention.parameters()))

    with dispatch.using("fused"):
        with torch.no_grad():
            assert loss(memory, tokens) == loss(memory, tokens)
            model.train()
            assert loss(memory, tokens) != loss(memory, tokens)
        torch.testing.assert_close(gradients(recomputed=False), gradients(recomputed=True), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_compiled_forward_and_backward_have_the_same_mask(kernels, recomputed):
    """The output is linear in the values, so the product of values and their gradient is that of output and its own."""
    q, kv, *rest = random_inputs()
    k, v = kv.unbind(dim=2)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def attend(v):
        return kernels.relative_attention(q, torch.stack([k, v], dim=2), *rest, dropout=0.5)[0]

    @torch.compile(fullgraph=True)
    def total_of(v):
        return ((checkpoint(attend, v, use_reentrant=False) if recomputed else attend(v)) * d_out).sum()

    found = []
    for _ in range(2):
        v = v.detach().requires_grad_()
        total = total_of(v)
        total.backward()
        found.append(total.detach())
        torch.testing.assert_close(found[-1], (v * v.grad).sum().detach(), rtol=1e-4, atol=1e-5)
    assert found[0] != found[1]


@pytest.mark.skipif(DEVICE == "cpu", reason="captures need a GPU")
def test_a_captured_call_has_a_new_mask_with_each_replay_the_same_as_if_called():
    from compressive.kernels.relative_attention import relative_attention

    q, kv, r, u, v, valid = (x.to(torch.bfloat16) if x.is_floating_point() else x for x in random_inputs(64))
    kv.requires_grad_()

    def attend():
        out = relative_attention(q, kv, r, u, v, valid, dropout=0.5)[0]
        # Detached: a graph that outlives the call would tie the capture to the stream of the calls before it.
        return out.detach(), torch.autograd.grad(out.float().sum(), kv)[0]

    torch.cuda.manual_seed(3)
    want = [attend(), attend()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = attend()
    torch.cuda.manual_seed(3)
    for called in want:
        graph.replay()
        torch.testing.assert_close([x.clone() for x in held], list(called))
    assert not torch.equal(want[0][0], want[1][0])
