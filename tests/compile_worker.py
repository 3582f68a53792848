"""Compile every kernel for a GPU that is not there: what the interpreter takes, a compiler may not.

python compile_worker.py attention | reconstruction | steps | training; without TRITON_INTERPRET.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compressive.kernels import adam
from compressive.kernels import add_norm as fused_norm
from compressive.kernels import reconstruction as fused_reconstruction
from compressive.kernels import relative_attention as fused
from compressive.kernels import relative_attention_step as fused_step
from compressive.kernels import sampling as fused_sampling

HOPPER, SHARED = GPUTarget("cuda", 90, 32), 227 * 1024
TYPES = {  # of arguments, by name; sizes are i32
    "*bf16": (
        "query", "key", "value", "key_value", "d_key_value", "r", "near", "far", "out", "d_out", "d_scores", "d_query",
        "new_key", "new_value", "old", "new", "difference", "d_new", "weight", "bias", "y", "logits",
    ),
    "*fp16": ("scores",),
    "*fp32": (
        "lse", "delta", "usage", "d_r", "d_bias", "losses", "d_losses", "x", "norm_weight", "norm_bias", "residual",
        "content_bias", "near_bias", "far_bias", "attended", "maxima", "sums", "means", "scales", "d_sum", "d_weight",
        "norms", "factors", "noise",
    ),
    "*i1": ("valid", "open_lanes", "seen_old", "seen_new", "good"), "*u8": ("hidden",),
    "*i32": ("segments",), "*i64": ("position", "addresses", "shares", "tokens"),
    "fp32": ("scale", "factor", "share", "epsilon", "clip", "fading1", "fading2", "temperature", "top_p"),
}  # fmt: skip
KINDS = {name: kind for kind, names in TYPES.items() for name in names}


def compiled(kernel, options, described=None, **constants):
    """Compile a kernel, with arguments of the types that their names stand for, or with tiles of them."""
    kinds = KINDS | {
        name: f"tensordesc<{KINDS[name][1:]}[1, {rows}, {columns}]>"
        for name, (rows, columns) in (described or {}).items()
    }
    constants |= {name: value for name, value in options.items() if name.isupper()}
    launch = {name: value for name, value in options.items() if not name.isupper()}

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    values = {(names.index(name),): value for name, value in constants.items()}
    found = triton.compile(ASTSource(kernel, signature, values, aligned), target=HOPPER, options=launch)
    assert found.metadata.shared <= SHARED, (kernel, found.metadata.shared)
    print(kernel.__name__, constants, found.metadata.shared)


def attention(width):
    """Forward and backward."""

    def tile(name):
        return fused.compiled_for(fused.TILES[name], width, torch.bfloat16)

    for lanes in (1, 4):
        compiled(fused._score_positions, tile("scoring"), LANES=lanes)
        compiled(fused._backward_positions, tile("positions"), LANES=lanes)
    slots = tile("slots")
    of_queries, of_slots = (slots["BLOCK_Q"], width), (slots["BLOCK_N"], width)
    described = dict.fromkeys(("query", "d_out"), of_queries) | dict.fromkeys(("key_value", "d_key_value"), of_slots)
    described |= dict.fromkeys(("scores", "d_scores"), (slots["BLOCK_Q"], slots["BLOCK_N"]))
    for documents in (False, True):
        compiled(fused._forward, tile("forward"), HAS_SEGMENTS=documents)
        compiled(fused._backward_slots, slots, described, HAS_SEGMENTS=documents, USAGE=False)
    compiled(fused._backward_slots, slots, described, HAS_SEGMENTS=False, USAGE=True)
    compiled(fused._output_products, tile("content"))
    compiled(fused._backward_content, tile("content"))
    compiled(fused._backward_table, tile("table"))


def reconstruction(width):
    """The loss and its gradient."""

    def tile(name):
        return fused.compiled_for(fused_reconstruction.TILES[name], width, torch.bfloat16)

    compiled(fused_reconstruction._compare, tile("compare"), FLAGS=1024)
    compiled(fused_reconstruction._backward, tile("backward"))


def steps(width):
    """A layer at one position, kernels overlapping, as wide as 8 heads."""
    overlap = {"OVERLAP": True, "launch_pdl": True}
    attending = overlap | {"num_warps": fused_step.ATTENDING}
    for separate in (False, True):
        compiled(fused_step._attend, attending, H=8, K=width, BLOCK=fused_step.BLOCK, SEPARATE=separate)
    compiled(fused_step._join, overlap, K=width, PARTS=64)
    compiled(fused_step._norm, overlap, EPSILON=1e-5, BLOCK=8 * width)
    tile = overlap | {"num_warps": fused_step.WARPS, "num_stages": 1, "COLUMNS": fused_step.COLUMNS}
    for lanes in (n for n in fused_step.LANES if n * 8 * width <= fused_step.HELD):
        sizes = {"LANES": lanes, "BLOCK_N": 8 * width, "EPSILON": 1e-5}
        no = dict.fromkeys(("NORM", "BIAS", "RELU", "RESIDUAL", "RESIDUAL_NORM"), False)
        for yes in ((), ("NORM", "BIAS", "RELU"), ("RESIDUAL",), ("BIAS", "RESIDUAL", "RESIDUAL_NORM")):
            inner = 8 * width if "NORM" in yes else min(8 * width, fused_step.INNER)
            compiled(fused_step._linear, tile, INNER=inner, **sizes, **no | dict.fromkeys(yes, True))
    for vocabulary in (256, fused_sampling.MAX_VOCAB):
        tile = {"BLOCK": vocabulary, "CHUNK": fused_sampling.CHUNK, "num_warps": vocabulary // 32}
        compiled(fused_sampling._choose, tile)


def training(width):
    """Norms of models as wide as 8 heads, and the update."""
    for kernel in (fused_norm._norm, fused_norm._backward):
        compiled(kernel, fused_norm._tile(8 * width))
    compiled(adam._update, {"BLOCK": adam.BLOCK, "num_warps": adam.WARPS})


if __name__ == "__main__":
    for width in (64, 128):
        globals()[sys.argv[1]](width)
