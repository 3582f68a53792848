"""Compile every kernel for a Hopper GPU, on a machine without one: the interpreter accepts what a compiler refuses.

    python compile_worker.py attention | reconstruction | steps | training

TRITON_INTERPRET must not be set. Prints each kernel, its constants and its bytes of shared memory.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compressive.kernels import adam, add_norm, reconstruction, relative_attention, sampling
from compressive.kernels import relative_attention_kernels as attention_kernels
from compressive.kernels import relative_attention_step as step

HOPPER, SHARED_MEMORY = GPUTarget("cuda", 90, 32), 227 * 1024
TYPES = {  # of arguments, by name; all others, sizes and strides, are i32
    "*bf16": (
        "q_ptr", "k_ptr", "v_ptr", "k_new_ptr", "v_new_ptr", "r_ptr", "r_far_ptr", "out_ptr", "do_ptr", "ds_ptr",
        "dq_ptr", "old_ptr", "new_ptr", "d_new_ptr", "difference_ptr", "w_ptr", "weight_ptr", "bias_ptr", "y_ptr",
        "logits_ptr",
    ),
    "*fp16": ("scores_ptr",),
    "*fp32": (
        "lse_ptr", "delta_ptr", "usage_ptr", "dr_ptr", "du_ptr", "dv_bias_ptr", "losses_ptr", "d_losses_ptr", "x_ptr",
        "norm_weight_ptr", "norm_bias_ptr", "residual_ptr", "u_ptr", "v_bias_ptr", "v_far_ptr", "acc_ptr", "m_ptr",
        "l_ptr", "mean_ptr", "rstd_ptr", "dz_ptr", "dweight_ptr", "dbias_ptr", "norms_ptr", "factors_ptr", "noise_ptr",
    ),
    "*i1": ("valid_ptr", "fully_visible_ptr", "old_valid_ptr", "new_valid_ptr", "good_ptr"),
    "*u8": ("hidden_ptr",),
    "*i32": ("segments_ptr",),
    "*i64": ("position_ptr", "addresses_ptr", "work_ptr", "tokens_ptr"),
    "fp32": (
        "scale", "factor", "mean_factor", "eps", "max_norm", "one_minus_b1", "one_minus_b2", "temperature", "top_p",
    ),
}  # fmt: skip
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names}
DESCRIPTOR_TYPES = {
    "q_desc": "bf16", "do_desc": "bf16", "kv_desc": "bf16", "dkv_desc": "bf16", "scores_desc": "fp16", "ds_desc": "bf16"
}  # fmt: skip


def compile_kernel(kernel, options, descriptors=None, **constants):
    """Compile a kernel; `descriptors` gives the tile (rows, columns) of each tensor descriptor."""
    types = TYPE_OF | {
        name: f"tensordesc<{DESCRIPTOR_TYPES[name]}[1, {rows}, {columns}]>"
        for name, (rows, columns) in (descriptors or {}).items()
    }
    constants |= {name: value for name, value in options.items() if name.isupper()}
    launch = {name: value for name, value in options.items() if not name.isupper()}

    names = kernel.arg_names
    unknown = [name for name in names if name.endswith(("_ptr", "_desc")) and name not in types]
    assert not unknown, (kernel, unknown)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    values = {(names.index(name),): value for name, value in constants.items()}
    found = triton.compile(ASTSource(kernel, signature, values, aligned), target=HOPPER, options=launch)
    assert found.metadata.shared <= SHARED_MEMORY, (kernel, found.metadata.shared)
    print(kernel.__name__, constants, found.metadata.shared)


def attention(width):
    """Relative attention, forward and backward."""

    def tile(name):
        return relative_attention.tile_options(relative_attention.TILES[name], width, torch.bfloat16)

    for block_b in (1, 4):
        compile_kernel(attention_kernels.position_scores_kernel, tile("position_scores"), BLOCK_B=block_b)
        compile_kernel(attention_kernels.backward_q_position_kernel, tile("backward_q_position"), BLOCK_B=block_b)
    kv = tile("backward_kv")
    descriptors = dict.fromkeys(("q_desc", "do_desc"), (kv["BLOCK_Q"], width))
    descriptors |= dict.fromkeys(("kv_desc", "dkv_desc"), (kv["BLOCK_N"], width))
    descriptors |= dict.fromkeys(("scores_desc", "ds_desc"), (kv["BLOCK_Q"], kv["BLOCK_N"]))
    for segments in (False, True):
        compile_kernel(attention_kernels.forward_kernel, tile("forward"), HAS_SEGMENTS=segments)
        compile_kernel(attention_kernels.backward_kv_kernel, kv, descriptors, HAS_SEGMENTS=segments, USAGE=False)
    compile_kernel(attention_kernels.backward_kv_kernel, kv, descriptors, HAS_SEGMENTS=False, USAGE=True)
    compile_kernel(attention_kernels.delta_kernel, tile("backward_q_content"))
    compile_kernel(attention_kernels.backward_q_content_kernel, tile("backward_q_content"))
    compile_kernel(attention_kernels.backward_r_kernel, tile("backward_r"))


def reconstruction_loss(width):
    """The reconstruction loss and its gradient."""

    def tile(name):
        return relative_attention.tile_options(reconstruction.TILES[name], width, torch.bfloat16)

    compile_kernel(reconstruction._forward_kernel, tile("forward"), MAX_SLOTS=1024)
    compile_kernel(reconstruction._backward_kernel, tile("backward"))


def steps(width):
    """A decoding step of a model of 8 heads, with programmatic dependent launch."""
    pdl = {"PDL": True, "launch_pdl": True}
    split = pdl | {"num_warps": step.SPLIT_WARPS}
    for separate in (False, True):
        compile_kernel(step._split_kernel, split, H=8, K=width, BLOCK_N=step.BLOCK_N, SEPARATE=separate)
    compile_kernel(step._combine_kernel, pdl, K=width, SPLITS=64)
    compile_kernel(step._norm_kernel, pdl, EPS=1e-5, BLOCK_D=8 * width)
    tile = pdl | {"num_warps": step.LINEAR_WARPS, "num_stages": 1, "BLOCK_N": step.LINEAR_BLOCK_N}
    for block_m in (n for n in step.LINEAR_BLOCKS_M if n * 8 * width <= step.MAX_NORM_TILE):
        sizes = {"BLOCK_M": block_m, "BLOCK_D": 8 * width, "EPS": 1e-5}
        no = dict.fromkeys(("NORM", "BIAS", "RELU", "RESIDUAL", "RESIDUAL_NORM"), False)
        for yes in ((), ("NORM", "BIAS", "RELU"), ("RESIDUAL",), ("BIAS", "RESIDUAL", "RESIDUAL_NORM")):
            block_k = 8 * width if "NORM" in yes else min(8 * width, step.LINEAR_BLOCK_K)
            compile_kernel(step._linear_kernel, tile, BLOCK_K=block_k, **sizes, **no | dict.fromkeys(yes, True))
    for vocabulary in (256, sampling.MAX_VOCAB):
        tile = {"BLOCK_V": vocabulary, "CHUNK": sampling.CHUNK, "num_warps": vocabulary // 32}
        compile_kernel(sampling._choose_kernel, tile)


def training(width):
    """The norms of a model of 8 heads, and the optimiser's update."""
    for kernel in (add_norm._forward_kernel, add_norm._backward_kernel):
        compile_kernel(kernel, add_norm._tile_options(8 * width))
    compile_kernel(adam._update_kernel, {"BLOCK": adam.BLOCK, "num_warps": adam.NUM_WARPS})


GROUPS = {"attention": attention, "reconstruction": reconstruction_loss, "steps": steps, "training": training}

if __name__ == "__main__":
    for head_width in (64, 128):
        GROUPS[sys.argv[1]](head_width)
