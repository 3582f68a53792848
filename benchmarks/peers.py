"""Our Compressive Transformer beside other people's, in one run: training and generation at the same sizes.

    python benchmarks/peers.py --size base --json peers.json --plot peers.png

The others come from PyPI: pip install 'compressive[peers]', or with --no-deps into a folder on PYTHONPATH. They are
called as their documentation says, with the same optimiser and clipping as ours, on random tokens, from full memories,
in bf16 on a GPU and fp32 on a CPU. Every row is measured in a process of its own, `--rounds` times in turns, and shows
medians; a row that fails says why.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from compressive import bench
from compressive.bench import Row, Subject, prompt_windows, random_tokens
from compressive.config import ModelConfig, RunConfig, TrainConfig
from compressive.runtime import pick_device

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
"""Model and batch."""
OTHERS_DRAW = 32
KEYS = "tokens per second", "drawn per second, batch 1", "drawn per second, batch 32"


def main() -> None:
    """Measure and print; as a child, measure one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rows", default=",".join(ROWS), help="which of them, with commas (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="lanes in training, if not the size's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="how often every row is measured")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    batch = options.batch or SIZES[options.size][1]
    if options.child is not None:
        print(json.dumps(measure(options.child, options.size, batch, options.steps)))
        return
    names = options.rows.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; choose from {', '.join(ROWS)}")
    rows = side_by_side(names, options.size, batch, options.steps, options.rounds)
    bench.print_table(rows, f"side by side, {options.size}")
    for key, ratio in (ratios := against_peers(rows)).items():
        print(f"ours against the best peer, {key}: {ratio:.2f}×")
    if options.json:
        what = f"Compressive Transformers side by side, {options.size}; on a CPU memory is that of the process"
        bench.write_results(options.json, what, " ".join(["python", *sys.argv]), rows, ours_to_best_peer=ratios)
    if options.plot:
        plot(rows, options.size, options.plot)


def side_by_side(names: list[str], size: str, batch: int, steps: int, rounds: int) -> list[Row]:
    """Measure rows in turns, so that a machine's moods fall on all, and give medians."""
    found: dict[str, list[Row]] = {name: [] for name in names}
    work = [__file__, "--size", size, "--batch", str(batch), "--steps", str(steps), "--child"]
    for _ in range(rounds):
        for name in names:
            print(f"measuring {name}", file=sys.stderr)
            found[name].append(bench.in_own_process([*work, name]))
    return [{"name": name, "batch": batch} | merge(found[name]) for name in names]


def merge(rounds: list[Row]) -> Row:
    """The median of every figure, or the first error."""
    for row in rounds:
        if "error" in row:
            return row
    return {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}


def against_peers(rows: list[Row]) -> dict[str, float]:
    """Our best row's figures over those of the best peer."""
    found = {}
    for key in KEYS:
        own = [row[key] for row in rows if key in row and row["name"].startswith("ours")]
        peers = [row[key] for row in rows if key in row and row["name"].startswith(("ctp", "labml"))]
        if own and peers:
            found[key] = max(own) / max(peers)
    return found


def measure(name: str, size: str, batch: int, steps: int) -> Row:
    """Measure one row in this process."""
    device, (model, _) = pick_device("auto"), SIZES[size]
    precision = "bf16" if device.type == "cuda" else "fp32"
    config = RunConfig(model=model, train=TrainConfig(batch=batch, precision=precision, compile="compiled" in name))
    torch.manual_seed(0)
    with torch.device(device):
        subject = ROWS[name](config, device)
    # Drawing runs the same code in a row that is compiled as in the one that is not. Of others' texts a few tokens will
    # do: they compute the same for every token, whatever its position.
    drawn = 0 if size == "paper" or config.train.compile else None if name == "ours" else OTHERS_DRAW
    return bench.measure(subject, config, device, steps, drawn)


def ctp(config: RunConfig, device: torch.device, lean: bool = False) -> Subject:
    """compressive-transformer-pytorch as it comes.

    Lean: its extras, gated residuals and recurrence from the layer above, are off, and its key and value projection,
    which it freezes for good in its first compression, is trained.
    """
    from compressive_transformer_pytorch import AutoregressiveWrapper, CompressiveTransformer

    c, batch = config.model, config.train.batch
    extras = {"gru_gated_residual": False, "enhanced_recurrence": False} if lean else {}
    net = CompressiveTransformer(
        num_tokens=c.vocab_size, dim=c.d_model, seq_len=c.window, depth=c.n_layers, heads=c.n_heads,
        mem_len=c.memory_size, cmem_len=c.compressed_size, cmem_ratio=c.compression_rate, **extras,
    )  # fmt: skip
    for layer in net.ff_layers:  # its MLPs are always four times as wide as the model
        mlp = layer.fn.fn
        mlp.w1, mlp.w2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
    frozen = [module.to_kv.weight for module in net.modules() if hasattr(module, "to_kv")] if lean else []
    window = torch.compile(net) if config.train.compile else net
    x, y = random_tokens(config, device), random_tokens(config, device)
    memory = tuple(torch.zeros(c.n_layers, batch, n, c.d_model) for n in (c.memory_size, c.compressed_size))

    def forward() -> Tensor:
        nonlocal memory
        logits, memory, compression_loss = window(x, memories=memory)
        for weight in frozen:
            weight.requires_grad_()
        return F.cross_entropy(logits.transpose(1, 2), y) + compression_loss.sum()

    def draw(batch: int, length: int) -> None:
        AutoregressiveWrapper(net).generate(x[:1].repeat(batch, prompt_windows(config)), length)

    return Subject(forward, [list(net.parameters())], draw)


class Labml(nn.Module):
    """labml-nn's Compressive Transformer over tokens (T, B), with the memory that its documentation describes."""

    def __init__(self, c: ModelConfig) -> None:
        from labml_nn.transformers.compressive import CompressiveTransformer, CompressiveTransformerLayer
        from labml_nn.transformers.compressive import Conv1dCompression as Compression
        from labml_nn.transformers.feed_forward import FeedForward
        from labml_nn.transformers.xl import RelativeMultiHeadAttention as Attention

        super().__init__()
        layer = CompressiveTransformerLayer(
            d_model=c.d_model, self_attn=Attention(c.n_heads, c.d_model, 0.0), dropout_prob=0.0,
            feed_forward=FeedForward(c.d_model, c.d_ff, 0.0), compress=Compression(c.compression_rate, c.d_model),
        )  # fmt: skip
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.transformer = CompressiveTransformer(layer, c.n_layers)
        self.output = nn.Linear(c.d_model, c.vocab_size)

    def initial_memory(self, batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """Full memories, all zeros: recent, then compressed, one tensor per layer."""
        c, parameter = self.config, self.output.weight
        recent, compressed = (parameter.new_zeros(n, batch, c.d_model) for n in (c.memory_size, c.compressed_size))
        return [recent] * c.n_layers, [compressed] * c.n_layers

    def forward(self, x: Tensor, recent: list[Tensor], compressed: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Give logits, and what each layer has read."""
        slots, length = len(recent[0]) + len(compressed[0]), len(x)
        mask = torch.ones(length, slots + length, 1, dtype=torch.bool, device=x.device).tril(slots)
        hidden, read = self.transformer(self.embedding(x), recent, compressed, mask)
        return self.output(hidden), read

    @torch.no_grad()
    def push(
        self, read: list[Tensor], recent: list[Tensor], compressed: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Give what is evicted, and both memories as they are then; whole groups are compressed."""
        c, queue = self.config, [torch.cat(pair) for pair in zip(recent, read, strict=True)]
        count = -(-max(0, len(queue[0]) - c.memory_size) // c.compression_rate) * c.compression_rate
        old = [tensor[:count] for tensor in queue]
        if count:
            fresh = [layer.compress(part) for layer, part in zip(self.transformer.layers, old, strict=True)]
            joined = zip(compressed, fresh, strict=True)
            compressed = [torch.cat(pair)[-c.compressed_size :] for pair in joined]
        return old, [tensor[count:] for tensor in queue], compressed


def labml(config: RunConfig, device: torch.device) -> Subject:
    """labml-nn as it comes."""
    from labml_nn.transformers.compressive import AttentionReconstructionLoss

    model = Labml(config.model)
    reconstruction = AttentionReconstructionLoss(model.transformer.layers)
    x, y = random_tokens(config, device).T, random_tokens(config, device).T
    recent, compressed = model.initial_memory(config.train.batch)

    def forward() -> Tensor:
        nonlocal recent, compressed
        logits, read = model(x, recent, compressed)
        old, recent, compressed = model.push(read, recent, compressed)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + reconstruction(read, old)

    @torch.no_grad()
    def draw(batch: int, length: int) -> None:
        memory, tokens = model.initial_memory(batch), x[:, :1].repeat(1, batch)
        for i in range(prompt_windows(config) + length - 1):
            logits, read = model(tokens, *memory)
            _, *memory = model.push(read, *memory)
            if i >= prompt_windows(config) - 1:
                tokens = logits[-1:].argmax(-1)  # its example draws like this, one token and its memory at a time

    return Subject(forward, [list(model.parameters())], draw)


class Plain(nn.Module):
    """A bound: torch's own attention over as many slots, without relative positions and without compression."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        D = c.d_model
        self.heads, self.slots = c.n_heads, c.memory_size + c.compressed_size
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

    def forward(self, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Give logits, and memories moved on by a window."""
        x, after = self.embedding(tokens), []
        for layer, past in zip(self.layers, memory, strict=True):
            seen = torch.cat([past, x], dim=1)
            after.append(seen[:, -self.slots :].detach())
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in (layer["q"](x), *layer["kv"](seen).chunk(2, dim=-1))
            )
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[-2], k.shape[-2]))
            x = layer["norm"](x + layer["o"](heads.transpose(1, 2).flatten(2)))
            x = layer["mlp_norm"](x + layer["mlp"](x))
        return self.output(x), after


def plain(config: RunConfig, device: torch.device) -> Subject:
    """What a transformer without all that makes ours one costs."""
    model = Plain(config.model)
    window = torch.compile(model) if config.train.compile else model
    x, y = random_tokens(config, device), random_tokens(config, device)
    memory = [torch.zeros(config.train.batch, model.slots, config.model.d_model)] * config.model.n_layers

    def forward() -> Tensor:
        nonlocal memory
        logits, memory = window(x, memory)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return Subject(forward, [list(model.parameters())])


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
"""Rows by name; ctp is compressive-transformer-pytorch, plain a bound."""


def plot(rows: list[Row], size: str, to: Path) -> None:
    """Draw a bar for every row and figure."""
    from compressive import plotting as plots

    keys = [key for key in KEYS if any(key in row for row in rows)]
    drawn = plots.figure(4.2 * len(keys), 0.9 + 0.32 * len(rows))
    for axes, key in zip(drawn.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        colours = ["#c8553d" if row["name"].startswith("ours") else "#8a9ba8" for row in rows]
        bars = axes.barh([row["name"] for row in rows], [row.get(key, 0) for row in rows], color=colours)
        axes.bar_label(bars, [f"{row[key]:,.0f}" if key in row else "–" for row in rows], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        plots.tidy(axes, f"{size}: {key}", grid="x")
    plots.save(drawn, to)


if __name__ == "__main__":
    main()
