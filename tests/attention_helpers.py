"""Compare an implementation of relative attention with the reference, in values, usage and gradients."""

import torch

from compressive.model.attention import relative_attention as reference_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # batch, heads, window, compressed, recent, width of a head
    "blocks": (2, 1, 32, 16, 16, 16),
    "odd": (2, 2, 19, 13, 18, 16),
    "no compressed": (2, 1, 33, 0, 19, 16),
    "no memory": (2, 1, 17, 0, 0, 32),
    "no recent": (2, 1, 16, 35, 0, 16),
    "tiny": (2, 1, 3, 2, 1, 16),
    "nothing remembered": (2, 1, 17, 16, 20, 64),
}


def assert_agree(found, expected):
    """Values within 1e-5, gradients within 1e-4, of themselves; small ones of the largest."""
    for part, want in expected.items():
        rtol, atol = {"out": (1e-5, 1e-5), "usage": (1e-5, 1e-6)}.get(part, (1e-4, 1e-5 * float(want.abs().max())))
        torch.testing.assert_close(
            found[part], want, rtol=rtol, atol=atol, msg=lambda said, part=part: f"{part}: {said}"
        )


def compare(attention, name, segmented, separate, kind=torch.float32, size=1.0):
    """Outputs, usage and gradients of `attention` in a type, and the reference's in float64, by name.

    Inputs have 16 bits, so that all types hold them; queries are as large as `size`.
    """
    B, H, T, C, M, K = SHAPES[name]
    N, draw = C + M + T, torch.Generator().manual_seed(len(name))

    def leaf(*shape, size=1.0):
        return (size * torch.randn(*shape, generator=draw)).half().double().requires_grad_()

    leaves = {"query": leaf(B, T, H, K, size=size), "key_value": leaf(B, N, 2, H, K)}
    leaves |= {"u": leaf(H, K), "v": leaf(H, K), "r": leaf(N + T, H, K)}
    if separate:
        leaves |= {"far v": leaf(H, K), "far r": leaf(N + T, H, K)}
    valid = torch.rand(B, C + M, generator=draw) > 0.3
    valid[0] = True  # a row that sees all of its memory
    valid[1] &= name != "nothing remembered"  # whole tiles of which nothing is seen
    ids = (torch.rand(B, T, generator=draw) < 0.15).cumsum(dim=1) if segmented else None
    if ids is not None:
        ids[0] = 0  # and in which no document starts
    gradient = torch.randn(B, H, T, K, generator=draw).half()

    def results(attention, kind, device):
        own = {
            n: x.detach().to(device, torch.float32 if x.ndim == 2 and kind != torch.float64 else kind).requires_grad_()
            for n, x in leaves.items()
        }
        far = {"r_far": own["far r"].transpose(0, 1), "v_far": own["far v"]} if separate else {}
        masks = [None if x is None else x.to(device) for x in (valid, ids)]
        out, usage = attention(
            own["query"].transpose(1, 2), own["key_value"], own["r"].transpose(0, 1), own["u"], own["v"], *masks,
            **far, n_compressed=C, with_usage=True,
        )  # fmt: skip
        given = torch.autograd.grad(out, list(own.values()), gradient.to(device, kind))
        found = {"out": out, "usage": usage, **dict(zip(own, given, strict=True))}
        return {n: x.detach().cpu().double() for n, x in found.items()}

    return results(attention, kind, DEVICE), results(reference_attention, torch.float64, "cpu")
