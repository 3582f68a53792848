"""Training and generation speed of our Compressive Transformer and of other implementations, in one run.

    python benchmarks/peers.py --size base --results benchmarks/results/peers-base/DATE-h200.json
    python benchmarks/peers.py --size paper --results benchmarks/results/peers-paper/DATE-h200.json
    python benchmarks/peers.py --plot-only benchmarks/results/peers-base/DATE-h200.json --plot docs/peers-base.png

The other implementations come from PyPI: `pip install -e '.[peers]'`, or with --no-deps into a folder on
PYTHONPATH. They are called as their documentation says, with the same optimiser and clipping as ours, on random
tokens, from full memories, in bf16 on a GPU and fp32 on a CPU. Each row is measured in its own process, `--rounds`
times in rotation; figures are medians. A row that fails holds its error message. Results are written after each
measurement.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from compressive import bench
from compressive.bench import Row, Subject, prompt_windows, random_tokens
from compressive.config import ModelConfig, Precision, RunConfig, TrainConfig
from compressive.console import note
from compressive.runtime import autocast, cuda_graph, pick_device

SIZES = {
    "tiny": (
        ModelConfig(n_layers=4, d_model=128, n_heads=4, d_ff=512, window=64, memory_size=64, compressed_size=64),
        8,
    ),
    "base": (ModelConfig(), 16),
    "paper": (
        ModelConfig(
            n_layers=24, d_model=1024, d_ff=3072, window=768, memory_size=768, compressed_size=1152, compression_rate=3
        ),
        8,
    ),
}
"""Model and batch of each size."""
PEER_TOKENS = 32
"""Tokens sampled from each peer: its cost per token does not depend on the position."""
KEYS = {
    "tokens_per_second": "training, tokens/s",
    "sampled_per_second_batch_1": "generation, tokens/s, batch 1",
    "sampled_per_second_batch_32": "generation, tokens/s, batch 32",
}
"""Keys of a row, and what a figure calls them."""
LABELS = {
    "ours": "compressive",
    "ours-compiled": "compressive, compiled",
    "ctp": "lucidrains, as shipped",
    "ctp-compiled": "lucidrains, as shipped, compiled",
    "ctp-lean": "lucidrains, no extras",
    "ctp-lean-compiled": "lucidrains, compiled",
    "labml": "labml-nn",
    "plain": "flash attention, no positions\nor compression, eager (not tuned)",
    "plain-compiled": "flash attention, no positions\nor compression (not tuned)",
}
"""Names of rows, and what a figure calls them."""


def main() -> None:
    """Measure, print, write and plot; with --child, measure one row; with --plot-only, plot only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base" if torch.cuda.is_available() else "tiny")
    parser.add_argument(
        "--rows", default=",".join(ROWS), help="rows to measure, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, help="training batch size (default: the size's own)")
    parser.add_argument("--steps", type=int, default=20, help="training steps that are timed (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each row is measured (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to write")
    parser.add_argument("--json", type=Path, dest="results", help=argparse.SUPPRESS)  # its old name
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--plot-only", type=Path, metavar="RESULTS", help="plot this results file; measure nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot_only is not None:
        if options.plot is None:
            parser.error("--plot-only needs --plot")
        results = json.loads(options.plot_only.read_text("utf-8"))
        plot(results["rows"], size_of(results), options.plot)
        return
    batch = options.batch or SIZES[options.size][1]
    if options.child is not None:
        print(json.dumps(measure(options.child, options.size, batch, options.steps)))
        return
    names = options.rows.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; choose from {', '.join(ROWS)}")
    what = f"Compressive Transformers side by side, {options.size}; on a CPU memory is that of the process"
    rows: list[Row] = []
    for rows in side_by_side(names, options.size, batch, options.steps, options.rounds):
        if options.results:
            ratios = against_peers(rows)
            bench.write_results(options.results, what, " ".join(["python", *sys.argv]), rows, ours_to_best_peer=ratios)
    bench.print_table(rows, f"side by side, {options.size}")
    for key, ratio in against_peers(rows).items():
        print(f"ours against the best peer, {KEYS[key]}: {ratio:.2f}×")
    if options.plot:
        plot(rows, options.size, options.plot)


def size_of(results: dict[str, Any]) -> str:
    """Return the size that a results file was measured at, from its description."""
    found = re.search(r"side by side, (\w+)", results["what"])
    if found is None:
        raise SystemExit("not a results file of this script")
    return found[1]


def side_by_side(names: list[str], size: str, batch: int, steps: int, rounds: int) -> Iterator[list[Row]]:
    """Measure each row once per round, so that slow moments of the machine affect all rows.

    After each measurement yields the medians so far.
    """
    found: dict[str, list[Row]] = {}
    work = [__file__, "--size", size, "--batch", str(batch), "--steps", str(steps), "--child"]
    for _ in range(rounds):
        for name in names:
            note(f"measuring {name}")
            found.setdefault(name, []).append(bench.in_own_process([*work, name]))
            yield [{"name": name, "batch": batch} | merge(rows) for name, rows in found.items()]


def merge(rounds: list[Row]) -> Row:
    """Return the median of each figure over the rounds, or the first error."""
    for row in rounds:
        if "error" in row:
            return row
    return {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}


def against_peers(rows: list[Row]) -> dict[str, float]:
    """Return, for each figure, our best row divided by the best peer's row."""
    found = {}
    for key in KEYS:
        own = [row[key] for row in rows if key in row and row["name"].startswith("ours")]
        peers = [row[key] for row in rows if key in row and row["name"].startswith(("ctp", "labml"))]
        if own and peers:
            found[key] = max(own) / max(peers)
    return found


def measure(name: str, size: str, batch: int, steps: int) -> Row:
    """Measure one row in this process. Compiled rows and the paper's size measure no generation."""
    device, (model, _) = pick_device("auto"), SIZES[size]
    precision: Precision = "bf16" if device.type == "cuda" else "fp32"
    config = RunConfig(model=model, train=TrainConfig(batch=batch, precision=precision, compile="compiled" in name))
    torch.manual_seed(0)
    with torch.device(device):
        subject = ROWS[name](config, device)
    # Generation runs the same code in compiled and eager rows, so it is measured in eager rows only.
    tokens = 0 if size == "paper" or config.train.compile else None if name == "ours" else PEER_TOKENS
    return bench.measure(subject, config, device, steps, tokens)


def model_of(config: RunConfig) -> ModelConfig:
    """Return the model's configuration, which is never WaveNet's here."""
    assert isinstance(config.model, ModelConfig)
    return config.model


def slots(c: ModelConfig) -> tuple[int, int]:
    """Return the sizes of the recent and of the compressed memory, which all layers share here."""
    return c.memory_sizes[0], c.compressed_sizes[0]


def ctp(config: RunConfig, device: torch.device, lean: bool = False) -> Subject:
    """Build lucidrains' compressive-transformer-pytorch, as shipped.

    With `lean`, its extras (gated residuals, recurrence from the layer above) are off, and its key and value
    projection is trained: as shipped, the first compression freezes that projection permanently.
    """
    package = import_module("compressive_transformer_pytorch")
    c, batch = model_of(config), config.train.batch
    extras = {"gru_gated_residual": False, "enhanced_recurrence": False} if lean else {}
    net = package.CompressiveTransformer(
        num_tokens=c.vocab_size, dim=c.d_model, seq_len=c.window, depth=c.n_layers, heads=c.n_heads,
        mem_len=c.memory_size, cmem_len=c.compressed_size, cmem_ratio=c.compression_rate, **extras,
    )  # fmt: skip
    for layer in net.ff_layers:  # as shipped, the MLP is always 4 × d_model wide
        mlp = layer.fn.fn
        mlp.w1, mlp.w2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
    frozen = [module.to_kv.weight for module in net.modules() if hasattr(module, "to_kv")] if lean else []
    window = torch.compile(net) if config.train.compile else net
    x, y = random_tokens(config, device), random_tokens(config, device)
    memory = tuple(torch.zeros(c.n_layers, batch, n, c.d_model) for n in slots(c))

    def forward() -> Tensor:
        nonlocal memory
        logits, memory, compression_loss = window(x, memories=memory)
        for weight in frozen:
            weight.requires_grad_()
        loss: Tensor = F.cross_entropy(logits.transpose(1, 2), y) + compression_loss.sum()
        return loss

    def sample(batch: int, length: int, after_token: Callable[[], object]) -> None:
        calls = 0

        def hook(
            *_: Any,
        ) -> None:  # its `generate` calls the model for each window of the prompt but the last, then per token
            nonlocal calls
            calls += 1
            if calls >= prompt_windows(config):
                after_token()

        with net.register_forward_hook(hook):
            package.AutoregressiveWrapper(net).generate(x[:1].repeat(batch, prompt_windows(config)), length)

    return Subject(forward, [list(net.parameters())], sample)


class Labml(nn.Module):
    """labml-nn's Compressive Transformer with an embedding, an output layer and the memory update of its documentation.

    Tokens have shape (T, B).
    """

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        package = import_module("labml_nn.transformers.compressive")
        attention = import_module("labml_nn.transformers.xl").RelativeMultiHeadAttention(c.n_heads, c.d_model, 0.0)
        feed_forward = import_module("labml_nn.transformers.feed_forward").FeedForward(c.d_model, c.d_ff, 0.0)
        compress = package.Conv1dCompression(c.compression_rates[0], c.d_model)
        layer = package.CompressiveTransformerLayer(
            d_model=c.d_model, self_attn=attention, dropout_prob=0.0, feed_forward=feed_forward, compress=compress
        )
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.transformer = package.CompressiveTransformer(layer, c.n_layers)
        self.output = nn.Linear(c.d_model, c.vocab_size)

    def initial_memory(self, batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return full memories of zeros, recent and compressed: one (slots, B, d_model) tensor per layer."""
        c, parameter = self.config, self.output.weight
        recent, compressed = (parameter.new_zeros(n, batch, c.d_model) for n in slots(c))
        return [recent] * c.n_layers, [compressed] * c.n_layers

    def forward(self, x: Tensor, recent: list[Tensor], compressed: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return logits (T, B, vocab) and each layer's input."""
        slots, length = len(recent[0]) + len(compressed[0]), len(x)
        mask = torch.ones(length, slots + length, 1, dtype=torch.bool, device=x.device).tril(slots)
        hidden, read = self.transformer(self.embedding(x), recent, compressed, mask)
        return self.output(hidden), read

    @torch.no_grad()
    def push(
        self, read: list[Tensor], recent: list[Tensor], compressed: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the evicted slots, then the new recent and compressed memories; only whole groups are compressed."""
        (n_recent, n_compressed), rate = slots(self.config), self.config.compression_rates[0]
        queue = [torch.cat(pair) for pair in zip(recent, read, strict=True)]
        count = -(-max(0, len(queue[0]) - n_recent) // rate) * rate
        old = [tensor[:count] for tensor in queue]
        if count:
            fresh = [layer.compress(part) for layer, part in zip(self.transformer.layers, old, strict=True)]
            joined = zip(compressed, fresh, strict=True)
            compressed = [torch.cat(pair)[-n_compressed:] for pair in joined]
        return old, [tensor[count:] for tensor in queue], compressed


def labml(config: RunConfig, device: torch.device) -> Subject:
    """Build labml-nn's model, as shipped."""
    package, model = import_module("labml_nn.transformers.compressive"), Labml(model_of(config))
    reconstruction = package.AttentionReconstructionLoss(model.transformer.layers)
    x, y = random_tokens(config, device).T, random_tokens(config, device).T
    recent, compressed = model.initial_memory(config.train.batch)

    def forward() -> Tensor:
        nonlocal recent, compressed
        logits, read = model(x, recent, compressed)
        old, recent, compressed = model.push(read, recent, compressed)
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), y.flatten()) + reconstruction(read, old)
        return loss

    @torch.no_grad()
    def sample(batch: int, length: int, after_token: Callable[[], object]) -> None:
        memory, tokens = model.initial_memory(batch), x[:, :1].repeat(1, batch)
        for i in range(prompt_windows(config) + length - 1):
            logits, read = model(tokens, *memory)
            memory = model.push(read, *memory)[1:]
            if i >= prompt_windows(config) - 1:
                tokens = logits[-1:].argmax(-1)  # as in its example: greedy, one token per memory update
                after_token()

    return Subject(forward, [list(model.parameters())], sample)


class Plain(nn.Module):
    """torch's flash attention over as many slots, without relative positions and without compression: a bound.

    As in our model, activations between layers and memory are in bf16 under autocast.
    """

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        D = self.width = c.d_model
        self.heads, self.slots = c.n_heads, sum(slots(c))
        self.embedding, self.output = nn.Embedding(c.vocab_size, D), nn.Linear(D, c.vocab_size)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "q": nn.Linear(D, D, bias=False), "kv": nn.Linear(D, 2 * D, bias=False),
                "o": nn.Linear(D, D, bias=False),
                "mlp": nn.Sequential(nn.Linear(D, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, D)),
                "norm": nn.LayerNorm(D), "mlp_norm": nn.LayerNorm(D),
            })
            for _ in range(c.n_layers)
        )  # fmt: skip

    def forward(self, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, T, vocab) and the memories (layers, B, slots, D), advanced by one window."""
        x, after = self.embedding(tokens).to(memory.dtype), []
        for layer, past in zip(self.layers, memory, strict=True):
            assert isinstance(layer, nn.ModuleDict)
            seen = torch.cat([past, x], dim=1)
            after.append(seen[:, -self.slots :].detach())
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in (layer["q"](x), *layer["kv"](seen).chunk(2, dim=-1))
            )
            x = layer["norm"](x + layer["o"](attend(q, k, v).transpose(1, 2).flatten(2))).to(memory.dtype)
            x = layer["mlp_norm"](x + layer["mlp"](x)).to(memory.dtype)
        return self.output(x), torch.stack(after)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T of N slots, (B, H, T, K): on a GPU in half precision by the flash kernel itself.

    Its causal mask is aligned to the last slot, which `scaled_dot_product_attention` offers only through a bias object.
    """
    if q.is_cuda and q.dtype != torch.float32:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return out
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(k.shape[-2] - q.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def plain(config: RunConfig, device: torch.device) -> Subject:
    """Build the transformer without relative positions or compression."""
    model = Plain(model_of(config))
    window = torch.compile(model) if config.train.compile else model
    x, y = random_tokens(config, device), random_tokens(config, device)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    memory = torch.zeros(len(model.layers), config.train.batch, model.slots, model.width, dtype=dtype)

    def read(memory: Tensor) -> tuple[Tensor, Tensor]:
        logits, after = window(x, memory)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), after

    def forward() -> Tensor:
        nonlocal memory
        loss, memory = read(memory)
        return loss

    parameters = list(model.parameters())
    step = whole_step(read, memory.clone(), parameters, config.train.precision, device)
    return Subject(forward, [parameters], step=step)


def whole_step(
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    memory: Tensor,
    parameters: list[nn.Parameter],
    precision: Precision,
    device: torch.device,
) -> Callable[[], object]:
    """Return a step of forward, backward, clipping and Adam: on a GPU a CUDA graph, as our own step is.

    `read` reads a window after a memory and returns the loss and the next memory, which is kept in place.
    """
    on_gpu = device.type == "cuda"
    optimiser = torch.optim.Adam(parameters, lr=1e-5, fused=True, capturable=on_gpu)
    called = 0
    replay: Callable[[], object] | None = None

    def act() -> None:
        with autocast(device, precision):
            loss, after = read(memory)
        loss.backward()
        memory.copy_(after)  # after the backward pass, which may read it again
        clip_grad_norm_(parameters, 0.1)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    def step() -> None:
        nonlocal called, replay
        called += 1
        if not on_gpu or called < bench.WARM_UP:
            act()
            return
        replay = replay or cuda_graph(act)
        replay()

    return step


ROWS: dict[str, Callable[[RunConfig, torch.device], Subject]] = {
    "ours": bench.ours,
    "ours-compiled": bench.ours,
    "ctp": ctp,
    "ctp-compiled": ctp,
    "ctp-lean": partial(ctp, lean=True),
    "ctp-lean-compiled": partial(ctp, lean=True),
    "labml": labml,
    "plain": plain,
    "plain-compiled": plain,
}
"""Rows by name; ctp is compressive-transformer-pytorch, plain a model without positions or compression."""


def plot(rows: list[Row], size: str, to: Path) -> None:
    """Plot one panel per figure, with one bar per row that has it; a row that failed is named as failed."""
    from compressive import plotting as plots

    keys = [key for key in KEYS if any(key in row for row in rows)] or list(KEYS)[:1]
    shown = {key: [row for row in rows if key in row or "error" in row] for key in keys}
    heights = [len(shown[key]) for key in keys]
    fig = plots.figure(8, 0.7 + 0.8 * len(keys) + 0.34 * sum(heights))
    panels = fig.subplots(len(keys), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, key in zip(panels, keys, strict=True):
        bars = axes.barh(
            [LABELS.get(row["name"], row["name"]) for row in shown[key]],
            [row.get(key, 0) for row in shown[key]],
            color=[colour(row["name"]) for row in shown[key]],
        )
        axes.bar_label(
            bars, [f"{row[key]:,.0f}" if key in row else "failed" for row in shown[key]], padding=3, fontsize=8.5
        )
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        plots.tidy(axes, f"{KEYS[key]}{faster(rows, key)}", grid="x")
    plots.headline(fig, f"Compressive Transformers at size {size!r}, ours and others", "Longer is faster.")
    plots.save(fig, to)


def faster(rows: list[Row], key: str) -> str:
    """Return by how much our best row beats the best other implementation of the same model, as part of a title."""
    same = {row["name"]: row[key] for row in rows if key in row and not row["name"].startswith("plain")}
    ours = [value for name, value in same.items() if name.startswith("ours")]
    others = [value for name, value in same.items() if not name.startswith("ours")]
    return f": {max(ours) / max(others):.1f} times the best other" if ours and others else ""


def colour(name: str) -> str:
    """Return the bar colour of a row: ours, a peer, or the model without positions or compression."""
    return "#c8553d" if name.startswith("ours") else "#d9dee2" if name.startswith("plain") else "#8a9ba8"


if __name__ == "__main__":
    main()
