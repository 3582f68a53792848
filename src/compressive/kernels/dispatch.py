"""Which form of an operation runs, the reference in plain torch or a kernel: the one place that decides.

The reference form of an operation is written where the model is, and decorated with the operation's name:

    @operation("add_norm")
    def add_norm(x, y, weight, bias, eps): ...

Calling it asks the operation's rule, from device, type and shape, whether the kernel of the same name and signature in
`compressive.kernels` can run. A rule returns the reason why it cannot, or None. `choose` answers without a call,
`explain` for all operations of a configuration, also for a GPU that is not there. Rules are plain Python over
constants, so that layers compile with `fullgraph=True`. Kernel modules need Triton: they are imported when first used.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from compressive.config import AnyModelConfig, Attention, Parallel, Precision

P = ParamSpec("P")
R = TypeVar("R")

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets its kernels, so that they run on a CPU: for tests."""
HEAD_WIDTHS = (16, 32, 64, 128)
"""Head widths of the attention kernels: powers of two, as tiles are."""
MAX_NORM_WIDTH = 4096
"""Widest row that `add_norm` holds in registers."""
MAX_STEP_WIDTH = 1024
"""Widest row that `linear_step` norms."""
MAX_BAND_WIDTH = 256
"""Widest band whose weights' gradient `band_nll` sums in registers."""
MAX_SAMPLING_VOCAB = 1024
"""Largest vocabulary for which counting pairwise is faster than sorting."""
HALF = (torch.bfloat16, torch.float16)

_attention: Attention = "auto"


class Choice(NamedTuple):
    """Which form of an operation runs, and why."""

    form: Literal["kernel", "reference"]
    why: str


@contextlib.contextmanager
def using(attention: Attention) -> Iterator[None]:
    """Force the form of attention and of its reconstruction loss, in this process, until the context ends.

    `fused` raises a ValueError, when attention is called, where the kernel cannot run.
    """
    global _attention
    before, _attention = _attention, attention
    try:
        yield
    finally:
        _attention = before


# Rules: the reason why the kernel cannot run, or None.


def _attention_rule(device: str, dtype: torch.dtype, head_width: int, triton: bool) -> str | None:
    if _attention == "reference":
        return "attention='reference' was asked for"
    if device != "cuda" and _attention == "auto":
        return _no_gpu(device)
    reason = _no_triton(triton)
    if head_width not in HEAD_WIDTHS:
        reason = f"heads are {head_width} wide, the kernel takes {', '.join(map(str, HEAD_WIDTHS))}"
    if _attention == "fused":
        if reason is None and not INTERPRETED:
            reason = _no_gpu(device)
        if reason is not None:
            raise ValueError(f"attention='fused': {reason}; use auto, or reference")
        return None
    return _not_half(dtype) or reason


def _add_norm_rule(device: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int, triton: bool) -> str | None:
    # In half precision only: programs add up gradients in any order, and float32 runs are to repeat exactly.
    if device != "cuda":
        return _no_gpu(device)
    if weight_dtype != torch.float32:
        return f"the weight is {_name(weight_dtype)}, the kernel takes float32"
    if width > MAX_NORM_WIDTH:
        return f"rows are {width} wide, the kernel takes up to {MAX_NORM_WIDTH}"
    return _not_half(dtype) or _no_triton(triton)


def _linear_rule(device: str, autocast: bool, grad: bool, relu: bool, n_frozen: int, triton: bool) -> str | None:
    if n_frozen and grad:
        return None  # saves half of the input gradient on every device
    if device != "cuda":
        return _no_gpu(device)
    if relu:
        return None
    if not grad:
        return "no gradient is wanted"
    return None if autocast else "products are in float32: there is no rounding of gradients to avoid"


def _linear_nll_rule(device: str, triton: bool) -> str | None:
    return None  # plain torch in chunks: never all logits at once, on any device


def _band_nll_rule(device: str, dtype: torch.dtype, width: int, triton: bool) -> str | None:
    if width > MAX_BAND_WIDTH:
        return f"a band is {width} wide, the kernel takes up to {MAX_BAND_WIDTH}"
    if dtype == torch.float64:
        return "the type is float64, the kernel computes in float32"
    return _no_gpu(device) or _no_triton(triton)


def _step_rule(device: str, head_width: int, sharded: bool, triton: bool) -> str | None:
    if head_width not in HEAD_WIDTHS:
        return f"heads are {head_width} wide, the kernel takes {', '.join(map(str, HEAD_WIDTHS))}"
    return _no_gpu(device) or _no_triton(triton) or _sharded(sharded)


def _linear_step_rule(device: str, width: int, sharded: bool, triton: bool) -> str | None:
    if width > MAX_STEP_WIDTH:
        return f"rows are {width} wide, the kernel takes up to {MAX_STEP_WIDTH}"
    return _no_gpu(device) or _no_triton(triton) or _sharded(sharded)


def _sampling_rule(device: str, dtype: torch.dtype, vocab_size: int, triton: bool) -> str | None:
    if vocab_size > MAX_SAMPLING_VOCAB:
        return f"of {vocab_size:,} tokens, more than {MAX_SAMPLING_VOCAB:,}: sorting is faster"
    if dtype == torch.float64:
        return "logits are float64, the kernel computes in float32"
    return _no_gpu(device) or _no_triton(triton)


def _adam_rule(device: str, sharded: bool, triton: bool) -> str | None:
    return _no_gpu(device) or _no_triton(triton) or _sharded(sharded)


def _no_gpu(device: str) -> str | None:
    if device == "cuda":
        return None
    return _ON_CPU if device == "cpu" else f"the device is {device}, the kernel needs CUDA"


_ON_CPU = "the device is cpu, the kernel needs a GPU"
"""A constant, because it is the answer to every call on a CPU."""


def _not_half(dtype: torch.dtype) -> str | None:
    return None if dtype in HALF else f"the type is {_name(dtype)}, the kernel runs in bfloat16 or float16"


def _no_triton(triton: bool) -> str | None:
    return None if triton else "triton is not installed"


def _sharded(sharded: bool) -> str | None:
    return "weights are sharded (FSDP)" if sharded else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


RULES: Mapping[str, Callable[..., str | None]] = {
    "relative_attention": _attention_rule,
    "attention_reconstruction": _attention_rule,
    "add_norm": _add_norm_rule,
    "linear": _linear_rule,
    "linear_nll": _linear_nll_rule,
    "band_nll": _band_nll_rule,
    "adam": _adam_rule,
    "relative_attention_step": _step_rule,
    "linear_step": _linear_step_rule,
    "sampling": _sampling_rule,
}
"""Every operation that has a kernel, in the order of a training step, then those of generation."""


_MODULES = {"attention_reconstruction": "reconstruction", "linear_step": "relative_attention_step"}
"""Kernel modules that are not named after their operation."""


def choose(operation: str, *, triton: bool = HAS_TRITON, **case: Any) -> Choice:
    """Say which form of an operation runs in a case: the keyword arguments of its rule, `device` among them."""
    reason = RULES[operation](triton=triton, **case)
    return (
        Choice("reference", reason) if reason else Choice("kernel", f"kernels/{_MODULES.get(operation, operation)}.py")
    )


# Operations: what a rule asks about, in its order, read off a call's arguments; and the kernel's module.


def _attention_case(q: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    return q.device.type, q.dtype, q.shape[-1]


def _add_norm_case(x: Tensor, y: Tensor, weight: Tensor, *_: Any) -> tuple[Any, ...]:
    return y.device.type, y.dtype, weight.dtype, y.shape[-1]


def _linear_case(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False, n_frozen: int = 0
) -> tuple[Any, ...]:
    device = x.device.type
    autocast = device == "cuda" and torch.is_autocast_enabled("cuda")
    return device, autocast, torch.is_grad_enabled(), relu, n_frozen


def _linear_nll_case(hidden: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    return (hidden.device.type,)


def _band_nll_case(hidden: Tensor, *_: Any) -> tuple[Any, ...]:
    return hidden.device.type, hidden.dtype, hidden.shape[-1]


def _sampling_case(logits: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    return logits.device.type, logits.dtype, logits.shape[-1]


def _relative_attention_kernel() -> Callable[..., Any]:
    from compressive.kernels.relative_attention import relative_attention

    return relative_attention


def _reconstruction_kernel() -> Callable[..., Any]:
    from compressive.kernels.reconstruction import attention_reconstruction

    return attention_reconstruction


def _add_norm_kernel() -> Callable[..., Any]:
    from compressive.kernels.add_norm import add_norm

    return add_norm


def _linear_kernel() -> Callable[..., Any]:
    from compressive.kernels.linear import linear

    return linear


def _linear_nll_kernel() -> Callable[..., Any]:
    from compressive.kernels.linear_nll import linear_nll

    return linear_nll


def _band_nll_kernel() -> Callable[..., Any]:
    from compressive.kernels.band_nll import band_nll

    return band_nll


def _sampling_kernel() -> Callable[..., Any]:
    from compressive.kernels.sampling import choose

    return choose


_CALLED: Mapping[str, tuple[Callable[..., tuple[Any, ...]], Callable[[], Callable[..., Any]]]] = {
    "relative_attention": (_attention_case, _relative_attention_kernel),
    "attention_reconstruction": (_attention_case, _reconstruction_kernel),
    "add_norm": (_add_norm_case, _add_norm_kernel),
    "linear": (_linear_case, _linear_kernel),
    "linear_nll": (_linear_nll_case, _linear_nll_kernel),
    "band_nll": (_band_nll_case, _band_nll_kernel),
    "sampling": (_sampling_case, _sampling_kernel),
}


def operation(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function the reference form of an operation; calling it runs the form that the rule chooses."""
    rule, (case, kernel) = RULES[name], _CALLED[name]

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(reference)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if rule(*case(*args, **kwargs), HAS_TRITON) is not None:
                return reference(*args, **kwargs)
            result: R = kernel()(*args, **kwargs)
            return result

        return call

    return decorate


def explain(
    config: AnyModelConfig,
    *,
    device: str = "cuda",
    precision: Precision = "bf16",
    parallel: Parallel = "ddp",
    agent: bool = False,
    triton: bool = HAS_TRITON,
) -> dict[str, Choice]:
    """Say for each operation of a model which form trains it, and samples from it, on a device.

    An agent's trunk has no vocabulary, is updated by an optimiser of its own, and acts by reference steps.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    on: dict[str, Any] = {"device": device}
    sharded = on | {"sharded": parallel == "fsdp"}
    cases: dict[str, dict[str, Any]] = {}
    if config.architecture == "compressive":
        heads = on | {"dtype": dtype, "head_width": config.d_head}
        cases["relative_attention"] = heads
        if any(config.compressed_sizes) and config.compression_loss == "attention":
            cases["attention_reconstruction"] = heads
        if config.norm == "post":
            cases["add_norm"] = on | {"dtype": dtype, "weight_dtype": torch.float32, "width": config.d_model}
        cases["linear"] = on | {"autocast": precision == "bf16", "grad": True, "relu": False, "n_frozen": 0}
        if not agent:
            cases["relative_attention_step"] = sharded | {"head_width": config.d_head}
            cases["linear_step"] = sharded | {"width": config.d_model}
            if config.adaptive_cutoffs:  # of the bands that are looked up, the widest
                cases["band_nll"] = on | {"dtype": dtype, "width": config.d_model // config.adaptive_factor}
    if not agent:
        if config.head == "softmax":
            cases["linear_nll"] = on
        cases["adam"] = sharded
        cases["sampling"] = on | {"dtype": dtype, "vocab_size": config.vocab_size}
    choices = {name: choose(name, triton=triton, **cases[name]) for name in RULES if name in cases}
    if agent:
        choices["relative_attention_step"] = Choice("reference", "an agent acts by the trunk's own step")
    return choices


def describe(choices: Mapping[str, Choice]) -> list[str]:
    """Return choices as lines: the operations with kernels, then the others by the reason why not."""
    lines = [f"kernels: {', '.join(name for name, choice in choices.items() if choice.form == 'kernel') or 'none'}"]
    reasons: dict[str, list[str]] = {}
    for name, choice in choices.items():
        if choice.form == "reference":
            reasons.setdefault(choice.why, []).append(name)
    return lines + [f"reference: {', '.join(names)} ({why})" for why, names in reasons.items()]
