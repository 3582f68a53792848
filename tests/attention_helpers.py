"""Compare an implementation of relative attention with the reference, in values, usage and gradients."""

import functools
from unittest import mock

import torch

from compressive.model.attention import relative_attention as reference_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # B, H, T, C, M, K: batch, heads, window, compressed, recent, head width
    "blocks": (2, 1, 32, 16, 16, 16),
    "odd": (2, 2, 19, 13, 18, 16),
    "no compressed": (2, 1, 33, 0, 19, 16),
    "no memory": (2, 1, 17, 0, 0, 32),
    "no recent": (2, 1, 16, 35, 0, 16),
    "tiny": (2, 1, 3, 2, 1, 16),
    "nothing remembered": (2, 1, 17, 16, 20, 64),
}


def assert_agree(found, expected):
    """Outputs and usage agree within 1e-5, gradients within 1e-4 of themselves or 1e-5 of the largest."""
    for part, want in expected.items():
        rtol, atol = {"out": (1e-5, 1e-5), "usage": (1e-5, 1e-6)}.get(part, (1e-4, 1e-5 * float(want.abs().max())))
        said = functools.partial("{}: {}".format, part)
        torch.testing.assert_close(found[part], want, rtol=rtol, atol=atol, msg=said)


def compare(attention, name, segmented, separate, dtype=torch.float32, size=1.0, dropout=0.0):
    """Output, usage and gradients of `attention` in a type, and of the reference in float64, by name.

    Inputs are rounded to float16, so that every type represents them exactly; `size` scales the queries. The reference
    drops the weights that the kernels drop.
    """
    B, H, T, C, M, K = SHAPES[name]
    N, generator = C + M + T, torch.Generator().manual_seed(len(name))

    def leaf(*shape, size=1.0):
        return (size * torch.randn(*shape, generator=generator)).half().double().requires_grad_()

    leaves = {"q": leaf(B, T, H, K, size=size), "kv": leaf(B, N, 2, H, K)}
    leaves |= {"u": leaf(H, K), "v": leaf(H, K), "r": leaf(N + T, H, K)}
    if separate:
        leaves |= {"v_far": leaf(H, K), "r_far": leaf(N + T, H, K)}
    valid = torch.rand(B, C + M, generator=generator) > 0.3
    valid[0] = True  # a row that sees all of its memory
    valid[1] &= name != "nothing remembered"  # whole tiles of hidden slots
    segments = (torch.rand(B, T, generator=generator) < 0.15).cumsum(dim=1) if segmented else None
    if segments is not None:
        segments[0] = 0  # and in which no document starts
    d_out = torch.randn(B, H, T, K, generator=generator).half()

    def results(attention, dtype, device):
        bias_dtype = torch.promote_types(dtype, torch.float32)  # biases are parameters, never in half precision
        own = {
            name: x.detach().to(device, bias_dtype if x.ndim == 2 else dtype).requires_grad_()
            for name, x in leaves.items()
        }
        far = {"r_far": own["r_far"].transpose(0, 1), "v_far": own["v_far"]} if separate else {}
        masks = [None if x is None else x.to(device) for x in (valid, segments)]
        out, usage = attention(
            own["q"].transpose(1, 2), own["kv"], own["r"].transpose(0, 1), own["u"], own["v"], *masks,
            **far, n_compressed=C, dropout=dropout, with_usage=True,
        )  # fmt: skip
        gradients = torch.autograd.grad(out, list(own.values()), d_out.to(device, dtype))
        found = {"out": out, "usage": usage, **dict(zip(own, gradients, strict=True))}
        return {name: x.detach().cpu().double() for name, x in found.items()}

    state = torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state()
    found = results(attention, dtype, DEVICE)
    if not dropout:
        return found, results(reference_attention, torch.float64, "cpu")
    from dropout_helpers import kept_weights

    from compressive.kernels.relative_attention import dropout_seed

    (torch.set_rng_state if DEVICE == "cpu" else torch.cuda.set_rng_state)(state)
    kept = kept_weights(dropout_seed(torch.device(DEVICE)), B, H, T, N, dropout).cpu()
    with mock.patch("torch.nn.functional.dropout", lambda weights, rate: weights * kept / (1 - rate)):
        return found, results(reference_attention, torch.float64, "cpu")
