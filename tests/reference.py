"""The Compressive Transformer (Rae et al. 2019) in float64 NumPy loops: a slow oracle for tests.

Every row of the batch runs alone, and every query lists the slots that it may see: no relative shift, no
masks, no batching. Line numbers are those of Algorithms 1 and 2 of the paper. All products are x @ W; a head
is a block of consecutive columns, D / H wide. Slots are in time order, oldest first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray as Array


@dataclass
class WindowResult:
    """What one window gives; the memory fields (one entry per layer) are the memory after that window."""

    logits: Array  # (B, T, V)
    hidden: Array  # (B, T, D), the trunk's output
    recent: list[Array]  # (B, n_m, D)
    compressed: list[Array]  # (B, n_cm, D)
    recent_valid: list[Array]  # (B, n_m) bool
    compressed_valid: list[Array]  # (B, n_cm) bool
    usage: list[Array]  # (B, n_m)
    losses: Array  # (n_layers,)


@dataclass
class RowMemory:
    """The two memories of one layer in one batch row; usage is the attention each recent slot has received."""

    recent: Array
    recent_valid: list[bool]
    usage: list[float]
    compressed: Array
    compressed_valid: list[bool]


def run(config: Any, params: dict, windows: Sequence, starts: Sequence | None = None) -> list[WindowResult]:
    """Read the windows in order, carrying each row's memory from one to the next."""
    params = _float64(params)
    rows, layers = range(len(windows[0])), range(config.n_layers)
    memory = [[_initial_memory(config, i) for i in layers] for _ in rows]
    results = []
    for index, window in enumerate(windows):
        window = np.asarray(window)
        flags = None if starts is None else starts[index]
        flags = np.zeros(window.shape, bool) if flags is None else np.asarray(flags, bool)
        outputs = [_row(config, params, window[b], flags[b], memory[b]) for b in rows]
        hidden = np.stack([output[0] for output in outputs])
        memory = [output[1] for output in outputs]
        errors = [[e for output in outputs for e in output[2][i]] for i in layers]
        after: dict[str, list[Array]] = {}
        for name in ("recent", "compressed", "recent_valid", "compressed_valid", "usage"):
            dtype = bool if name.endswith("_valid") else np.float64
            after[name] = [np.array([getattr(row[i], name) for row in memory], dtype) for i in layers]
        losses = np.array([sum(squared) / len(squared) if squared else 0.0 for squared in errors])
        logits = hidden @ params["embedding"].T + params["output_bias"]
        results.append(WindowResult(logits=logits, hidden=hidden, losses=losses, **after))
    return results


def _initial_memory(config: Any, i: int) -> RowMemory:
    """Algorithm 1, lines 1-2: zeros, which are visible unless empty memory is masked."""
    n_m, n_cm, d = config.memory_size[i], config.compressed_size[i], config.d_model
    flag = {"zeros": True, "masked": False}[config.empty_memory]
    return RowMemory(np.zeros((n_m, d)), [flag] * n_m, [0.0] * n_m, np.zeros((n_cm, d)), [flag] * n_cm)


def _row(config: Any, params: dict, tokens: Array, starts: Array, memory: list[RowMemory]) -> tuple:
    """Algorithm 1, lines 3-13: trunk output (T, D), next memory, squared errors of each layer's loss."""
    h = params["embedding"][tokens] * math.sqrt(config.d_model)  # line 3
    next_memory, errors = [], []
    for i, p in enumerate(params["layers"]):  # line 4
        attended, received = _attention(config, p, h, memory[i], starts)  # lines 5-6
        updated, squared = _update(config, i, p, h, memory[i], received, starts)  # lines 8-11
        next_memory.append(updated)
        errors.append(squared)
        if config.norm == "pre":
            a = h + attended
            h = a + _mlp(p, _layer_norm(a, p["ln2_gain"], p["ln2_bias"]))
        else:
            a = _layer_norm(attended + h, p["ln1_gain"], p["ln1_bias"])  # line 7
            h = _layer_norm(_mlp(p, a) + a, p["ln2_gain"], p["ln2_bias"])  # line 12
    if config.norm == "pre":
        h = _layer_norm(h, params["final_gain"], params["final_bias"])
    return h, next_memory, errors


def _attention(config: Any, p: dict, h: Array, memory: RowMemory, starts: Array) -> tuple[Array, list]:
    """Algorithm 1, lines 5-6, with TransformerXL's scores over [compressed, recent, window].

    Also gives, for each recent slot, the mean over heads and queries of the weight it received.
    """
    n_cm, n_m, n_s = len(memory.compressed), len(memory.recent), len(h)
    width = config.d_model // config.n_heads
    slots = np.concatenate([memory.compressed, memory.recent, h])  # line 5
    if config.norm == "pre":
        slots = _layer_norm(slots, p["ln1_gain"], p["ln1_bias"])
    queries, keys, values = slots @ p["Wq"], slots @ p["Wk"], slots @ p["Wv"]
    sinusoids = np.stack([_sinusoid(distance, config.d_model) for distance in range(len(slots))])
    near = sinusoids @ p["Wr"]
    far, v_far = near, p["v"]
    if config.compressed_positions != "shared":
        far, v_far = sinusoids @ p["Wr_far"], p["v_far"]
    skipped = n_m if config.compressed_positions == "from_window" else 0
    out, received = np.zeros((n_s, config.d_model)), [0.0] * n_m
    for k, block in enumerate(_blocks(config)):
        for t in range(n_s):
            here = n_cm + n_m + t  # the query's own slot
            q = queries[here, block]
            visible = _visible(memory, starts, t)
            scores = []
            for j in visible:
                content = np.dot(q + p["u"][k], keys[j, block])
                if j < n_cm:
                    position = np.dot(q + v_far[k], far[here - j - skipped, block])
                else:
                    position = np.dot(q + p["v"][k], near[here - j, block])
                scores.append((content + position) / math.sqrt(width))
            for j, weight in zip(visible, _softmax(scores), strict=True):
                out[t, block] += weight * values[j, block]
                if n_cm <= j < n_cm + n_m:
                    received[j - n_cm] += weight / (config.n_heads * n_s)
    return out @ p["Wo"], received


def _visible(memory: RowMemory, starts: Array, t: int) -> list[int]:
    """The slots query t may see: nothing after t, and nothing from before the latest start at or before t."""
    valid = memory.compressed_valid + memory.recent_valid
    of_memory = [j for j in range(len(valid)) if valid[j] and not any(starts[: t + 1])]
    of_window = [len(valid) + s for s in range(t + 1) if not any(starts[s + 1 : t + 1])]
    return of_memory + of_window


def _update(
    config: Any, i: int, p: dict, h: Array, memory: RowMemory, received: list[float], starts: Array
) -> tuple[RowMemory, list[float]]:
    """Algorithm 1, lines 8-11: the next memory of layer i, and the squared errors of its compression loss."""
    n_s, n_cm, rate, started = len(h), config.compressed_size[i], config.compression_rate[i], any(starts)
    line = np.concatenate([memory.recent, h])
    usage = [total + new for total, new in zip(memory.usage, received, strict=True)] + [0.0] * n_s
    valid = [flag and not started for flag in memory.recent_valid]
    valid += [not any(starts[s + 1 :]) for s in range(n_s)]
    compressed = memory.compressed
    compressed_valid = [flag and not started for flag in memory.compressed_valid]
    errors = []
    if n_cm > 0 and n_s // rate > 0:
        old = np.stack([line[s] if valid[s] else np.zeros(config.d_model) for s in range(n_s)])  # line 8
        new, new_valid = _compress(config, rate, p.get("compressor", {}), old, valid[:n_s], usage[:n_s])  # line 9
        compressed = np.concatenate([compressed, new])[-n_cm:]  # line 11
        compressed_valid = (compressed_valid + new_valid)[-n_cm:]
        if config.compression_loss == "attention" and not started:
            errors = _attention_errors(config, p, h, old, valid[:n_s], new, new_valid)
        elif config.compression_loss == "autoencoding" and not started:
            errors = _autoencoding_errors(p["decoder"], rate, old, valid[:n_s], new, new_valid)
    # Line 10: the first n_s of the n_m + n_s slots are gone, the last n_m remain.
    return RowMemory(line[n_s:], valid[n_s:], usage[n_s:], compressed, compressed_valid), errors


def _compress(
    config: Any, rate: int, p: dict, old: Array, valid: list[bool], usage: list[float]
) -> tuple[Array, list[bool]]:
    """Algorithm 1, line 9: f_c from n_s old slots to floor(n_s / c) new ones, with their valid flags."""
    n_new, kind = len(old) // rate, config.compression
    if kind == "most_used":
        ranking = sorted(range(len(old)), key=lambda s: (not valid[s], -usage[s], s))
        kept = sorted(ranking[:n_new])
        return np.stack([old[s] for s in kept]), [valid[s] for s in kept]
    if kind == "dilated":
        for (kernel, bias), dilation in zip(p["stack"], (1, 2, 4), strict=True):
            old = _dilated(old, kernel, bias, dilation)
    reduce = {
        "max": lambda group, kept: group[kept].max(axis=0),
        "mean": lambda group, kept: group[kept].mean(axis=0),
        "conv": lambda group, kept: p["bias"] + sum(group[o] @ p["kernel"][o] for o in range(rate)),
        "dilated": lambda group, kept: p["bias"] + sum(group[o] @ p["kernel"][o] for o in range(rate)),
        "gru": lambda group, kept: _gru(p, group[kept]),
        "attention": lambda group, kept: _pool(config, p, group, kept),
    }[kind]
    groups = [range(g * rate, (g + 1) * rate) for g in range(n_new)]
    if config.spanning_slots == "hidden":
        members = [list(range(rate)) for _ in groups]
        seen = [all(valid[s] for s in group) for group in groups]
    else:  # of the visible members alone; without any, of all: nobody sees it
        members = [[o for o, s in enumerate(group) if valid[s]] or list(range(rate)) for group in groups]
        seen = [any(valid[s] for s in group) for group in groups]
    return np.stack([reduce(old[list(group)], kept) for group, kept in zip(groups, members, strict=True)]), seen


def _dilated(x: Array, kernel: Array, bias: Array, dilation: int) -> Array:
    """A convolution of width 3 that keeps the length, with zeros beyond both ends, then relu."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        y[t] = bias
        for o in (-1, 0, 1):
            if 0 <= t + o * dilation < len(x):
                y[t] += x[t + o * dilation] @ kernel[o + 1]
    return np.maximum(y, 0.0)


def _gru(p: dict, group: Array) -> Array:
    """A GRU over the group from the zero state, oldest member first; its last state is projected."""
    s = np.zeros(p["W_hr"].shape[0])
    for x in group:
        r = 1.0 / (1.0 + np.exp(-(x @ p["W_ir"] + p["b_ir"] + s @ p["W_hr"] + p["b_hr"])))
        z = 1.0 / (1.0 + np.exp(-(x @ p["W_iz"] + p["b_iz"] + s @ p["W_hz"] + p["b_hz"])))
        n = np.tanh(x @ p["W_in"] + p["b_in"] + r * (s @ p["W_hn"] + p["b_hn"]))
        s = (1.0 - z) * n + z * s
    return s @ p["W_out"] + p["b_out"]


def _pool(config: Any, p: dict, group: Array, kept: list[int]) -> Array:
    """A learned query per head attends to the kept members, with a learned score offset per head and member."""
    keys, values, out = group[kept] @ p["Wk"], group[kept] @ p["Wv"], np.zeros(config.d_model)
    for k, block in enumerate(_blocks(config)):
        contents = [np.dot(p["query"][k], key[block]) / math.sqrt(len(key[block])) for key in keys]
        scores = [content + p["offset"][k, o] for o, content in zip(kept, contents, strict=True)]
        for weight, value in zip(_softmax(scores), values, strict=True):
            out[block] += weight * value[block]
    return out @ p["Wo"]


def _attention_errors(
    config: Any, p: dict, h: Array, old: Array, old_valid: list[bool], new: Array, new_valid: list[bool]
) -> list[float]:
    """Algorithm 2, line 8: squared differences over queries and D; none where no new slot is valid."""
    if not any(new_valid):
        return []
    before = np.stack([slot for slot, flag in zip(old, old_valid, strict=True) if flag])
    after = np.stack([slot for slot, flag in zip(new, new_valid, strict=True) if flag])
    difference = _content_attention(config, p, h, before) - _content_attention(config, p, h, after)
    return list(difference.ravel() ** 2)


def _content_attention(config: Any, p: dict, h: Array, m: Array) -> Array:
    """Algorithm 2, line 6: softmax((hQ)(mK))(mV) in each head; no Wo, no positions, no causal order."""
    if config.norm == "pre":
        h, m = (_layer_norm(x, p["ln1_gain"], p["ln1_bias"]) for x in (h, m))
    queries, keys, values, out = h @ p["Wq"], m @ p["Wk"], m @ p["Wv"], np.zeros_like(h)
    for block in _blocks(config):
        for t, q in enumerate(queries):
            scores = [np.dot(q[block], key[block]) / math.sqrt(len(q[block])) for key in keys]
            for weight, value in zip(_softmax(scores), values, strict=True):
                out[t, block] += weight * value[block]
    return out


def _autoencoding_errors(
    p: dict, rate: int, old: Array, old_valid: list[bool], new: Array, new_valid: list[bool]
) -> list[float]:
    """L^ae = |old_mem - g(new_cm)|: squared differences over the valid members of groups with a valid new slot."""
    d, errors = old.shape[1], []
    for g in range(len(new)):
        decoded = new[g] @ p["W"] + p["b"]
        for o in range(rate):
            if new_valid[g] and old_valid[g * rate + o]:
                errors += list((decoded[o * d : (o + 1) * d] - old[g * rate + o]) ** 2)
    return errors


def _blocks(config: Any) -> list[slice]:
    """The columns of each head."""
    width = config.d_model // config.n_heads
    return [slice(k * width, (k + 1) * width) for k in range(config.n_heads)]


def _sinusoid(distance: int, d: int) -> Array:
    """R[distance]: the sines of all frequencies, then the cosines."""
    angles = [distance * 10000.0 ** (-2 * m / d) for m in range(d // 2)]
    return np.array([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])


def _mlp(p: dict, x: Array) -> Array:
    return np.maximum(x @ p["W1"] + p["b1"], 0.0) @ p["W2"] + p["b2"]


def _layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    """Each row to mean 0 and (biased) variance 1, then gain and bias."""
    return np.stack([(row - row.mean()) / math.sqrt(row.var() + 1e-5) * gain + bias for row in x])


def _softmax(scores: list[float]) -> Array:
    exponentials = np.exp(np.array(scores) - max(scores))
    return exponentials / exponentials.sum()


def _float64(tree: Any) -> Any:
    """Every parameter as a float64 array, in the same containers."""
    if isinstance(tree, dict):
        return {name: _float64(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_float64(value) for value in tree]
    return None if tree is None else np.asarray(tree, dtype=np.float64)
