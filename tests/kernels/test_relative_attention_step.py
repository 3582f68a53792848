"""The step kernels against plain torch, in Triton's interpreter: any shape, both schemes, both norms."""

import pytest
import torch
from helpers import build, random_tokens, tiny_config
from torch import nn

from compressive import CompressiveLM
from compressive.inference.fast_decoder import FastDecoder, FastLayer, step_kernels
from compressive.model.attention import Positions
from compressive.model.decoding import Now
from compressive.model.decoding import relative_attention_step as reference_step

pytest.importorskip("triton", reason="triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # B, H, C, M, T, K
    "one split": (1, 2, 3, 5, 4, 16),
    "many splits": (2, 3, 50, 40, 70, 16),
    "no compressed": (2, 1, 0, 66, 9, 32),
    "no memory": (3, 2, 0, 0, 5, 16),
}


@pytest.fixture
def kernels():
    """The kernel module; without a GPU its kernels are interpreted (conftest.py)."""
    from compressive.kernels import relative_attention_step

    return relative_attention_step


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_the_reference_step(kernels, name, dtype, tolerance, separate):
    B, H, C, M, T, K = SHAPES[name]
    N = C + M + T
    generator = torch.Generator().manual_seed(len(name))

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    q, k, v = normal(B, 3, H, K).unbind(dim=1)
    keys, values, r, u, v_bias = normal(B, H, N, K), normal(B, H, N, K), normal(H, N, K), normal(H, K), normal(H, K)
    far = {"r_far": normal(H, N, K), "v_far": normal(H, K)} if separate else {"r_far": None, "v_far": None}
    position = torch.randint(T, (B,), generator=generator)  # rows are at different positions
    slots = torch.arange(N)
    hidden = (torch.rand(B, N, generator=generator) < 0.5) | (slots > C + M + position[:, None])
    hidden[:, : C + M][0] = True  # whole splits are hidden
    hidden[torch.arange(B), C + M + position] = False
    distance = (C + M + position[:, None] - slots).clamp(min=0)
    now = Now(*(x.to(DEVICE) for x in (position, distance.expand(H, -1, -1), hidden)))

    caches = [keys.double(), values.double()]
    r_far, v_far = (None if x is None else x.double() for x in far.values())
    positions = Positions(r.double(), v_bias.double(), r_far, v_far)
    exact = (q.double(), k.double(), v.double(), caches[0], caches[1])
    want, weights = reference_step(*exact, u.double(), positions, now, C, C + M)
    operands, sizes = (q, k, v, keys, values, r, u, v_bias, now.position, now.hidden), {"n_compressed": C} | far
    got, none = kernels.relative_attention_step(*operands, **sizes, n_memory=C + M)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    assert none is None
    again, found = kernels.relative_attention_step(*operands, **sizes, n_memory=C + M, with_weights=True)
    assert torch.equal(again, got)
    torch.testing.assert_close(found.double(), weights, rtol=0, atol=tolerance)
    assert torch.equal(keys.double(), caches[0])  # both have written the new position, and nothing else
    assert torch.equal(values.double(), caches[1])


@pytest.mark.parametrize(("B", "K", "N"), [(1, 24, 40), (19, 40, 24), (2, 600, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("variant", ["plain", "norm, relu", "residual", "normed residual"])
def test_linear_layers_with_norm_relu_and_residual(kernels, B, K, N, dtype, variant):
    torch.manual_seed(0)
    x, residual = 2 * torch.randn(B, K, device=DEVICE) + 1, torch.randn(B, N, device=DEVICE)
    linear = nn.Linear(K, N, bias=variant != "plain", device=DEVICE).to(dtype).requires_grad_(False)
    norm = nn.LayerNorm(N if variant == "normed residual" else K, device=DEVICE).requires_grad_(False)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    if variant == "plain":
        options, before, after = {}, x, lambda y: y
    elif variant == "norm, relu":
        options, before, after = {"norm": norm, "relu": True}, norm(x), torch.relu
    elif variant == "residual":
        options, before, after = {"residual": residual}, x, lambda y: y + residual
    else:
        options = {"residual": residual, "residual_norm": norm}
        before, after = x, lambda y: y + norm(residual)
    got = kernels.linear_step(x, linear.weight, linear.bias, **options)
    want = after(linear.float()(before.to(dtype).float()))
    assert got.dtype == (torch.float32 if "residual" in variant else dtype)
    torch.testing.assert_close(got.float(), want, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"compressed_positions": "separate"},
        {"norm": "pre"},
        {"compressed_positions": "from_window", "norm": "pre"},
        {"compression": "most_used", "compression_loss": "none"},
    ],
    ids=["plain", "separate", "pre-norm", "separate from window, pre-norm", "most used"],
)
def test_a_model_steps_with_the_kernels_as_without(kernels, variant):
    config = tiny_config(d_model=32, memory_size=(6, 3), compressed_size=(3, 2), **variant)
    model, tokens = build(config, dtype=torch.float32).to(DEVICE), random_tokens(config, 2, 11).to(DEVICE)

    def logits(steps):
        state, found = steps.decoding_state(model.initial_memory(2)), []
        for t in range(tokens.shape[1]):
            out, state = steps.step(tokens[:, t], state, torch.tensor([t == 6, False], device=DEVICE))
            found.append(out)
        return torch.stack(found, dim=1)

    decoder = FastDecoder(model)
    assert isinstance(decoder.model, CompressiveLM)
    layers = decoder.model.trunk.layers
    decoder.layers = [FastLayer(layer, attends=True, finishes=True) for layer in layers]
    torch.testing.assert_close(logits(decoder), logits(model), rtol=0, atol=1e-4)
    decoder.layers = [FastLayer(layer, attends=True, finishes=False) for layer in layers]
    torch.testing.assert_close(logits(decoder), logits(model), rtol=0, atol=1e-4)


def test_what_the_kernels_cannot_do_is_left_to_torch():
    gpu = torch.device("cuda")
    assert step_kernels(tiny_config(d_model=32), gpu) == (True, True)
    assert step_kernels(tiny_config(d_model=32), torch.device("cpu")) == (False, False)
    assert step_kernels(tiny_config(d_model=32, compression="most_used", compression_loss="none"), gpu) == (True, True)
    assert step_kernels(tiny_config(d_model=24, n_heads=2), gpu) == (False, False)
    assert step_kernels(tiny_config(d_model=1024, n_heads=16), gpu) == (True, True)
    assert step_kernels(tiny_config(d_model=2048, n_heads=32), gpu) == (True, False)
