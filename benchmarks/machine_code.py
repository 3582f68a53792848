"""Compile every kernel for a Hopper GPU, on a machine without one, and say what the compiler made of it.

    python benchmarks/machine_code.py                                   # all kernels, heads of 64 and 128
    python benchmarks/machine_code.py attention --results benchmarks/results/machine-code/DATE-sm90.json

Prints, for each variant of a kernel: registers of a thread, instructions that spill registers, bytes of shared memory,
instructions, and those of its innermost loops. Two versions of a kernel that have the same `ptx`, a hash
of the PTX without names and line numbers, are the same machine code. Fails if a kernel has `hazards`, which depend on
the version of Triton and its ptxas: install the one that the GPU's machine has. TRITON_INTERPRET must not be set.
"""

import argparse
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compressive import bench
from compressive.bench import Row
from compressive.kernels import adam, add_norm, band_nll, reconstruction, relative_attention, sampling
from compressive.kernels import relative_attention_kernels as attention_kernels
from compressive.kernels import relative_attention_step as step

HOPPER, SHARED_MEMORY = GPUTarget("cuda", 90, 32), 227 * 1024
HEAD_WIDTHS = (64, 128)
"""The head widths of all presets."""
TYPES = {  # of arguments, by name; all others, sizes and strides, are i32
    "*bf16": (
        "q_ptr", "k_ptr", "v_ptr", "k_new_ptr", "v_new_ptr", "r_ptr", "r_far_ptr", "out_ptr", "do_ptr", "ds_ptr",
        "dq_ptr", "old_ptr", "new_ptr", "d_new_ptr", "difference_ptr", "w_ptr", "weight_ptr", "bias_ptr", "y_ptr",
        "logits_ptr", "h_ptr",
    ),
    "*fp16": ("scores_ptr",),
    "*fp32": (
        "lse_ptr", "delta_ptr", "usage_ptr", "dr_ptr", "du_ptr", "dv_bias_ptr", "losses_ptr", "d_losses_ptr", "x_ptr",
        "norm_weight_ptr", "norm_bias_ptr", "residual_ptr", "u_ptr", "v_bias_ptr", "v_far_ptr", "acc_ptr", "m_ptr",
        "l_ptr", "weights_ptr", "mean_ptr", "rstd_ptr", "dz_ptr", "dweight_ptr", "dbias_ptr", "norms_ptr",
        "factors_ptr", "noise_ptr", "nll_ptr", "d_nll_ptr", "dh_ptr",
    ),
    "*i1": ("valid_ptr", "fully_visible_ptr", "old_valid_ptr", "new_valid_ptr", "good_ptr"),
    "*u8": ("hidden_ptr",),
    "*i32": ("segments_ptr",),
    "*i64": (
        "position_ptr", "addresses_ptr", "work_ptr", "tokens_ptr", "seed_ptr", "target_ptr", "rows_ptr", "count_ptr"
    ),
    "fp32": (
        "scale", "factor", "mean_factor", "eps", "max_norm", "one_minus_b1", "one_minus_b2", "temperature", "top_p",
        "keep_scale",
    ),
}  # fmt: skip
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names}
DESCRIPTOR_TYPES = {
    "q_desc": "bf16", "do_desc": "bf16", "kv_desc": "bf16", "dkv_desc": "bf16", "scores_desc": "fp16", "ds_desc": "bf16"
}  # fmt: skip
MULTIPLES_OF_16 = {
    "T", "N", "L", "K", "D", "V", "slot_begin", "slot_end", "n_memory", "n_compressed", "n_old", "n_new",
    "stride_kv_b", "stride_kv_n", "stride_q_b", "stride_q_t", "stride_old_b", "stride_old_n", "stride_new_b",
    "stride_new_n", "stride_hidden_b",
}  # fmt: skip
"""Sizes and strides that are multiples of 16 in every preset, which Triton compiles for."""
WAITING = 8
"""A loop of up to so many instructions waits for a copy."""
Descriptors = Mapping[str, tuple[int, int]]


def main() -> None:
    """Compile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--results", type=Path, help="results file to write")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"unknown groups {sorted(unknown)}: expected {', '.join(GROUPS)}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: nothing would be compiled; unset it")
    rows: list[Row] = []
    for group in options.groups or GROUPS:
        for width in HEAD_WIDTHS:
            GROUPS[group](width, functools.partial(add, rows, group))
    if options.results:
        bench.write_results(
            options.results, "machine code of every kernel, for sm_90, without a GPU", " ".join(["python", *sys.argv]),
            rows, triton=triton.__version__,
        )  # fmt: skip


def add(rows: list[Row], group: str, *kernel: Any, **constants: Any) -> None:
    """Compile a kernel, print its row and keep it."""
    row = compile_kernel(*kernel, **constants)
    figures = {name: row[name] for name in ("registers", "spills", "spills_in_loops", "shared", "loops", "ptx")}
    print(f"{row['kernel']:28}", *(f"{name} {value}," for name, value in figures.items()), row["constants"], flush=True)
    rows.append({"group": group} | row)


def compile_kernel(
    kernel: Any, options: Mapping[str, Any], descriptors: Descriptors | None = None, **constants: Any
) -> Row:
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
    multiples = {name for name, kind in signature.items() if kind.startswith("*")}
    multiples |= {name for name in MULTIPLES_OF_16 if signature.get(name) == "i32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in multiples}
    values = {(names.index(name),): value for name, value in constants.items()}
    found = triton.compile(ASTSource(kernel, signature, values, aligned), target=HOPPER, options=launch)
    assert found.metadata.shared <= SHARED_MEMORY, (kernel, found.metadata.shared)
    code = inspect(found.asm["cubin"])
    assert code["hazards"] == 0, (kernel, constants, code["hazards"])
    return {
        "kernel": kernel.__name__, "constants": constants, "launch": launch, "shared": found.metadata.shared,
        **code, "ptx": ptx_hash(found.asm["ptx"]),
    }  # fmt: skip


def tool(name: str) -> str:
    """Return the path of one of the NVIDIA tools that Triton brings along."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def inspect(cubin: bytes) -> Row:
    """Registers and bytes of stack of a thread; instructions of a kernel, those that spill, and its innermost loops."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = run_tool("cuobjdump", "--dump-resource-usage", file.name)
        code = run_tool("nvdisasm", "-c", file.name)
    count, spills, labels, loops = 0, list[int](), dict[str, int](), list[tuple[int, int]]()
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            count += 1
            if re.search(r"\b(LDL|STL)\b", line):
                spills.append(count)
            target = re.search(r"@!?U?P\d BRA.*`\((\.L\w+)\)", line)
            if target and labels.get(target[1], count) < count - WAITING:
                loops.append((labels[target[1]], count))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "spills": len(spills),
        "spills_in_loops": [sum(begin < spill <= end for spill in spills) for begin, end in sorted(set(inner))],
        "instructions": count,
        "loops": [end - begin for begin, end in sorted(set(inner))],
        "hazards": hazards(code),
    }


def hazards(code: str) -> int:
    """How many instructions overwrite registers that an asynchronous product (HGMMA) may still read.

    A product reads its first factor, if that is in registers, until WARPGROUP.DEPBAR has waited for its group; `gsb0`
    ends a group. ptxas before 13.3 may use the registers before that (triton-lang/triton#9433).
    """
    instructions, labels = list[tuple[str, str, str]](), dict[str, int]()  # predicate, operator, operands
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(@\S+)?\s*([A-Z]\S*)\s*(.*?);", line):
            instructions.append((found[1] or "", found[2], found[3]))

    def following(i: int) -> list[int]:
        predicate, operator, operands = instructions[i]
        ends = operator in ("EXIT", "BRA") and not predicate and not re.match(r"!?U?P", operands)
        target = re.search(r"`\((\.L\w+)\)", operands) if operator == "BRA" else None
        return [i + 1] * (not ends and i + 1 < len(instructions)) + ([labels[target[1]]] if target else [])

    overwriting = set()
    for i, (_, operator, operands) in enumerate(instructions):
        factor = re.match(r"[^,]+, R(\d+),", operands) if operator.startswith("HGMMA") else None
        if factor is None:
            continue
        reads = set(range(int(factor[1]), int(factor[1]) + 4))
        paths, seen = [(i, -1)], set[tuple[int, int]]()  # instruction, and groups that ended after this one did
        while paths:
            j, ended = paths.pop()
            if instructions[j][1].startswith("HGMMA") and "gsb0" in instructions[j][2]:
                ended = min(ended + 1, 8)  # no wait leaves so many groups
            for k in following(j):
                wait = re.match(r"gsb0, (0x\w+)", instructions[k][2]) if "DEPBAR" in instructions[k][1] else None
                if (k, ended) in seen or (wait and int(wait[1], 16) <= ended):
                    continue
                seen.add((k, ended))
                paths.append((k, ended))
                if reads & written(*instructions[k][1:]):
                    overwriting.add(k)
    return len(overwriting)


def written(operator: str, operands: str) -> set[int]:
    """The registers that an instruction writes."""
    first = re.match(r"R(\d+)\b", operands)
    if first is None:
        return set()
    count = 2 if ".64" in operator or "WIDE" in operator else 4 if ".128" in operator else 1
    if operator.startswith("HGMMA"):
        count = int(operator.split("x")[1]) // 2
    elif operator.startswith("LDSM") and operator[-1].isdigit():
        count = int(operator[-1])
    return set(range(int(first[1]), int(first[1]) + count))


def run_tool(name: str, *words: str) -> str:
    """Run one of the NVIDIA tools that Triton brings along; return what it prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *words], capture_output=True, text=True, check=True).stdout


def ptx_hash(ptx: str) -> str:
    """A hash of PTX without comments, line numbers and debug sections."""
    code = ptx.split(".section")[0]
    lines = (re.sub(r"//.*", "", line).strip() for line in code.splitlines())
    kept = "\n".join(line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp")))
    return hashlib.sha256(kept.encode()).hexdigest()[:12]


def attention(width: int, compiled: Callable[..., None]) -> None:
    """Relative attention, forward and backward."""

    def tile(name: str) -> dict[str, Any]:
        return relative_attention.tile_options(relative_attention.TILES[name], width, torch.bfloat16)

    for block_b in (1, 4):
        compiled(attention_kernels.position_scores_kernel, tile("position_scores"), BLOCK_B=block_b)
        compiled(attention_kernels.backward_q_position_kernel, tile("backward_q_position"), BLOCK_B=block_b)
    kv = tile("backward_kv")
    descriptors = dict.fromkeys(("q_desc", "do_desc"), (kv["BLOCK_Q"], width))
    descriptors |= dict.fromkeys(("kv_desc", "dkv_desc"), (kv["BLOCK_N"], width))
    descriptors |= dict.fromkeys(("scores_desc", "ds_desc"), (kv["BLOCK_Q"], kv["BLOCK_N"]))
    no_dropout: dict[str, Any] = dict.fromkeys(("seed_ptr", "threshold", "keep_scale"))
    for dropout in (no_dropout, {}):
        for segments in (False, True):
            own = {"HAS_SEGMENTS": segments} | dropout
            compiled(attention_kernels.forward_kernel, tile("forward"), **own)
            compiled(attention_kernels.backward_kv_kernel, kv, descriptors, USAGE=False, **own)
    compiled(attention_kernels.backward_kv_kernel, kv, descriptors, HAS_SEGMENTS=False, USAGE=True, **no_dropout)
    compiled(attention_kernels.delta_kernel, tile("backward_q_content"))
    compiled(attention_kernels.backward_q_content_kernel, tile("backward_q_content"))
    compiled(attention_kernels.backward_r_kernel, tile("backward_r"))


def reconstruction_loss(width: int, compiled: Callable[..., None]) -> None:
    """The reconstruction loss and its gradient."""

    def tile(name: str) -> dict[str, Any]:
        return relative_attention.tile_options(reconstruction.TILES[name], width, torch.bfloat16)

    compiled(reconstruction._forward_kernel, tile("forward"), MAX_SLOTS=1024)
    compiled(reconstruction._backward_kernel, tile("backward"))


def steps(width: int, compiled: Callable[..., None]) -> None:
    """A decoding step of a model of 8 heads, with programmatic dependent launch."""
    pdl = {"PDL": True, "launch_pdl": True}
    split = pdl | {"num_warps": step.SPLIT_WARPS}
    sizes = {"K": width, "BLOCK_N": step.BLOCK_N}
    no_weights: dict[str, Any] = {"weights_ptr": None}
    for weights in (no_weights, {}):
        for separate in (False, True):
            compiled(step._split_kernel, split, H=8, SEPARATE=separate, **sizes, **weights)
    compiled(step._combine_kernel, pdl, SPLITS=64, N=None, **sizes, **no_weights)
    compiled(step._combine_kernel, pdl, SPLITS=64, **sizes)
    compiled(step._norm_kernel, pdl, EPS=1e-5, BLOCK_D=8 * width)
    tile = pdl | {"num_warps": step.LINEAR_WARPS, "num_stages": 1, "BLOCK_N": step.LINEAR_BLOCK_N}
    for block_m in (n for n in step.LINEAR_BLOCKS_M if n * 8 * width <= step.MAX_NORM_TILE):
        rows = {"BLOCK_M": block_m, "BLOCK_D": 8 * width, "EPS": 1e-5}
        no = dict.fromkeys(("NORM", "BIAS", "RELU", "RESIDUAL", "RESIDUAL_NORM"), False)
        for yes in ((), ("NORM", "BIAS", "RELU"), ("RESIDUAL",), ("BIAS", "RESIDUAL", "RESIDUAL_NORM")):
            block_k = 8 * width if "NORM" in yes else min(8 * width, step.LINEAR_BLOCK_K)
            compiled(step._linear_kernel, tile, BLOCK_K=block_k, **rows, **no | dict.fromkeys(yes, True))
    for vocabulary in (256, sampling.MAX_VOCAB):
        tile = {"BLOCK_V": vocabulary, "CHUNK": sampling.CHUNK, "num_warps": vocabulary // 32}
        compiled(sampling._choose_kernel, tile)


def training(width: int, compiled: Callable[..., None]) -> None:
    """The norms of a model of 8 heads, and the optimiser's update."""
    for kernel in (add_norm._forward_kernel, add_norm._backward_kernel):
        compiled(kernel, add_norm._tile_options(8 * width))
    compiled(adam._update_kernel, {"BLOCK": adam.BLOCK, "num_warps": adam.NUM_WARPS})


def bands(width: int, compiled: Callable[..., None]) -> None:
    """The loss of a band: 64 or 256 wide, as those of WikiText-103, the second and third for a d_model of 1024."""
    for kernel in ("forward", "backward_h", "backward_weight"):
        options = band_nll.tile_options(kernel, {64: 64, 128: 256}[width], torch.bfloat16)
        compiled(getattr(band_nll, f"_{kernel}_kernel"), options)


GROUPS = {
    "attention": attention,
    "reconstruction": reconstruction_loss,
    "steps": steps,
    "training": training,
    "bands": bands,
}

if __name__ == "__main__":
    main()
