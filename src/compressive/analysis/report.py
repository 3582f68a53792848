"""An HTML report of a run: training curves, test score, the three analyses, samples, configuration.

The page is self-contained: images are embedded, and nothing is loaded from elsewhere.
"""

import base64
import dataclasses
import html
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch

from compressive.analysis.attention import AttentionUse, measure_attention
from compressive.analysis.curves import Curves
from compressive.analysis.layers import LayerLoss, measurable, measure_layers
from compressive.analysis.memory import EVERYTHING, NO_COMPRESSED, MemoryUse, measure_memory
from compressive.analysis.reading import part
from compressive.analysis.xz import xz_bits, xz_bits_after
from compressive.config import ModelConfig, transformer
from compressive.evaluation.score import Progress, score, streams_for
from compressive.model.language_model import CompressiveLM
from compressive.plotting import require_matplotlib
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import write_atomically

if TYPE_CHECKING:
    from compressive.data.corpus import Corpus

XZ_BEFORE = 128_000_000
"""Tokens at the end of the training split that xz reads before the test text; takes one to two minutes."""
SAMPLES = 5
"""Number of training samples shown, the last one first."""


@dataclass(frozen=True)
class TestScore:
    """Test score of the model, and of xz on the same text."""

    tokens: int
    size: int  # bytes of the text
    whole: bool
    characters: bool  # whether tokens are bytes
    perplexity: float  # per token
    bits: float  # per byte of the text
    xz: float | None  # bits per byte; None if tokens are words, which do not determine the text
    xz_after_training: float | None


@dataclass(frozen=True)
class Findings:
    """All measurements of a report."""

    step: int
    parameters: int
    split: str
    curves: Curves
    test: TestScore
    memory: MemoryUse
    attention: AttentionUse
    layers: LayerLoss | None  # None if no layer compresses


def measure_run(
    run: Run,
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    which: Literal["best", "last"] = "best",
    split: str = "valid",
    tokens: int = 200_000,
    streams: int = 16,
    test_tokens: int | None = 1_000_000,
    progress: Progress | None = None,
) -> Findings:
    """Measure a run: analyses read about `tokens` tokens of `split` each; the first `test_tokens` of test are scored.

    Raises PlotError if matplotlib is missing.
    """
    require_matplotlib()  # fail before the measurements, not after them
    corpus, trained = run.corpus(data_dir), Trained.load(run, which)
    config = transformer(trained.config)
    model, text = trained.model(config, device), corpus.split(split)
    memory = measure_memory(model, text, tokens=tokens, streams=streams, progress=part(progress, 0, 0.5))
    attention = measure_attention(model, text, tokens=tokens, streams=streams, progress=part(progress, 0.5, 0.6))
    layers = None
    if any(config.compressed_sizes):
        with_loss = trained.model(measurable(config), device)
        layers = measure_layers(with_loss, text, tokens=tokens, streams=streams, progress=part(progress, 0.6, 0.7))
    return Findings(
        step=trained.step,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        split=split,
        curves=Curves.load(run.folder / "metrics.jsonl"),
        test=_score_test(model, corpus, test_tokens, part(progress, 0.7, 1)),
        memory=memory,
        attention=attention,
        layers=layers,
    )


def write_report(run: Run, found: Findings, out: Path) -> None:
    """Write the page to `out`, and its main numbers as JSON beside it."""
    write_atomically(out.with_suffix(".json"), main_numbers(found) + "\n")
    write_atomically(out, _page(run, found))


def main_numbers(found: Findings) -> str:
    """Return the main numbers as a JSON object."""
    figures = {"step": found.step, "parameters": found.parameters, "test": dataclasses.asdict(found.test)}
    if (worth := found.memory.compressed_worth) is not None:
        figures["compressed_memory_is_worth"] = dataclasses.asdict(worth)
    return json.dumps(figures, indent=1)


def summary(found: Findings) -> str:
    """Return the main numbers as a few lines of text."""
    test = found.test
    if test.xz is None or test.xz_after_training is None:
        lines = [f"test perplexity {test.perplexity:.3f}"]
    else:
        unit = "bits per character" if test.characters else "bits per byte"
        lines = [
            f"test, {test.tokens:,} tokens, {unit}:",
            f"  this model                     {test.bits:.3f}",
            f"  xz -9e of the same text        {test.xz:.3f}",
            f"  xz(train + test) - xz(train)   {test.xz_after_training:.3f}",
        ]
    if (worth := found.memory.compressed_worth) is not None:
        lines.append(f"compressed memory is worth {worth.mean:.4f} ± {worth.error:.4f} bits per token")
    return "\n".join(lines)


def _score_test(model: CompressiveLM, corpus: "Corpus", limit: int | None, progress: Progress | None) -> TestScore:
    tokens, tokenizer = corpus.split("test")[:limit], corpus.tokenizer
    nll = score(model, tokens, streams=streams_for(len(tokens)), progress=progress)
    text, lossless = tokenizer.decode(tokens), tokenizer.kind != "words"
    return TestScore(
        tokens=len(tokens),
        size=len(text),
        whole=len(tokens) == len(corpus.split("test")),
        characters=tokenizer.kind == "bytes",
        perplexity=math.exp(nll.mean()),
        bits=float(nll.sum()) / math.log(2) / len(text),
        xz=xz_bits(text) if lossless else None,
        xz_after_training=xz_bits_after(text, tokenizer.decode(corpus.split("train")[-XZ_BEFORE:]))
        if lossless
        else None,
    )


def _page(run: Run, found: Findings) -> str:
    """Return the HTML of the report."""
    name = html.escape(run.folder.resolve().name)
    sections = [
        _section(
            "Training",
            _image(found.curves.plot_loss, "loss by step"),
            _image(found.curves.plot_optimisation, "gradient norms, learning rate and speed by step"),
        )
        if found.curves.train
        else "",
        _section(
            "What memory is worth",
            _worth(found),
            _image(found.memory.plot, "loss increase without each memory, and loss since an empty memory"),
        ),
        _section("Attention by bucket", _attention(found), _image(found.attention.plot, "attention by bucket")),
        _section(
            "Compression loss by layer", _losses(found.layers), _image(found.layers.plot, "compression loss by layer")
        )
        if found.layers
        else "",
        _section("Samples from training", *_samples(run.folder / "samples")),
        _section("Configuration", _configuration(run)),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{name}</h1>
<p class="about">{html.escape(_about(run, found))}</p>
<div class="tiles">{"".join(_tiles(found))}</div>
{"".join(sections)}
</body>
</html>
"""


def _about(run: Run, found: Findings) -> str:
    model = transformer(run.config.model)
    sizes = _sizes(model)
    return (
        f"Trained on {run.config.data.corpus} for {found.step:,} steps. {found.parameters / 1e6:,.1f} million "
        f"parameters: {model.n_layers} layers of width {model.d_model}; {sizes}; temporal range "
        f"{model.temporal_range:,} tokens."
    )


def _sizes(model: ModelConfig) -> str:
    def show(size: Any) -> str:
        return str(size) if isinstance(size, int) else "/".join(map(str, size))

    text = f"window {model.window}, recent memory {show(model.memory_size)}"
    if not any(model.compressed_sizes):
        return text + ", no compressed memory"
    return (
        f"{text}, compressed memory {show(model.compressed_size)} "
        f"({model.compression} at rate {show(model.compression_rate)})"
    )


def _tiles(found: Findings) -> Iterator[str]:
    """Yield the main numbers, each next to its comparison."""
    test = found.test
    unit = "bits per character" if test.characters else "bits per byte"
    scored = f"{'all' if test.whole else 'the first'} {test.tokens:,} tokens of the test split"
    if test.xz is None or test.xz_after_training is None:
        yield _tile(f"{test.perplexity:.2f}", "perplexity", scored)
    else:
        yield _tile(f"{test.bits:.3f}", unit, scored)
        yield _tile(f"{test.xz:.3f}", f"{unit}, xz -9e", "the same text compressed on its own")
        yield _tile(f"{test.xz_after_training:.3f}", f"{unit}, xz after training text", "xz(train + test) − xz(train)")
    if (worth := found.memory.compressed_worth) is not None:
        yield _tile(f"{worth.mean:.3f}", "bits per token", f"what compressed memory is worth (± {worth.error:.3f})")


def _tile(figure: str, unit: str, note: str) -> str:
    return f"<div><b>{figure}</b><span>{html.escape(unit)}</span><small>{html.escape(note)}</small></div>"


def _worth(found: Findings) -> str:
    memory = found.memory
    text = f"Measured on {memory.tokens:,} tokens of the {found.split} split, once memories are full. "
    if (worth := memory.compressed_worth) is not None:
        seen, hidden = memory.conditions[EVERYTHING].mean, memory.conditions[NO_COMPRESSED].mean
        text += f"With compressed memory hidden the loss goes from {seen:.4f} to {hidden:.4f} bits per token: "
        clear = abs(worth.mean) > 2 * worth.error
        verdict = "it is worth" if worth.mean > 0 else "it does harm, by"
        text += (
            f"{verdict} {abs(worth.mean):.4f} ± {worth.error:.4f} bits per token. "
            if clear
            else (f"the difference, {worth.mean:+.4f} ± {worth.error:.4f}, is not significant. ")
        )
    if (worth := memory.recent_worth) is not None:
        text += f"Recent memory is worth {worth.mean:.4f} ± {worth.error:.4f}. "
    return _paragraph(
        text + "The right plot shows the loss as memories fill from empty, minus the loss of the same text with full "
        "memories."
    )


def _attention(found: Findings) -> str:
    attention = found.attention
    return _paragraph(
        f"Share of attention per bucket (six per memory, six in the window), averaged over heads, queries, layers and "
        f"{attention.sequences:,} sequences of the {found.split} split, with standard error; below, by layer (1 is the "
        "lowest). Fewer queries see the later buckets of the window, as attention is causal."
    )


def _losses(layers: LayerLoss) -> str:
    what = {
        "attention": "Mean squared difference between attention over compressed memories and over the original ones",
        "autoencoding": "Mean squared difference between memories decoded from compressed ones and the original ones",
    }[layers.kind]
    return _paragraph(f"{what}, by layer, over {layers.windows:,} windows, with standard error.")


def _samples(folder: Path) -> Iterator[str]:
    """Yield text samples from training: the last one expanded, some earlier ones collapsed."""
    paths = sorted(folder.glob("step-*.txt"))
    if not paths:
        yield _paragraph("No samples were written during training.")
        return
    kept = sorted({round(i * (len(paths) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)}, reverse=True)
    for i in kept:
        step = int(paths[i].stem.removeprefix("step-"))
        prompt, marker, text = paths[i].read_text("utf-8").removeprefix("[prompt]\n").partition("\n[sample]\n")
        body = f"<i>{html.escape(prompt)}</i>{html.escape(text)}" if marker else html.escape(prompt)
        opened = " open" if i == len(paths) - 1 else ""
        yield f"<details{opened}><summary>step {step:,}</summary><pre>{body}</pre></details>"


def _configuration(run: Run) -> str:
    text = json.dumps(dataclasses.asdict(run.config), indent=1)
    return f"<details><summary>all values</summary><pre>{html.escape(text)}</pre></details>"


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>\n"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _image(plot: Callable[[BinaryIO], None], description: str) -> str:
    """Return the figure as an embedded PNG."""
    buffer = BytesIO()
    plot(buffer)
    return f'<img alt="{description}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


STYLE = """
body { max-width: 56rem; margin: 3rem auto; padding: 0 1.5rem; color: #33393f; background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
.about { color: #66707a; margin: .2rem 0 1.5rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem; }
.tiles div { border: 1px solid #d9dee2; border-radius: 8px; padding: .8rem 1rem; }
.tiles b { display: block; font-size: 1.8rem; line-height: 1.2; }
.tiles span { display: block; font-size: .9rem; } .tiles small { color: #66707a; line-height: 1.3; display: block; }
img { width: 100%; display: block; margin: 1rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f7f8; border-radius: 8px; padding: 1rem;
  font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
pre i { font-style: normal; color: #8a949d; }
summary { cursor: pointer; color: #2f6690; }
"""
