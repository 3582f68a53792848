"""The report of a model of text: its score beside xz, what its memories are worth, and what surprised it."""

import dataclasses
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressive.analysis import xz
from compressive.analysis.attention import AttentionUse, measure_attention
from compressive.analysis.layers import LayerLoss, measurable, measure_layers
from compressive.analysis.memory import MemoryUse, measure_memory
from compressive.analysis.overview import Overview
from compressive.analysis.reading import part
from compressive.analysis.report import page
from compressive.analysis.report.page import Page, Section, Tile
from compressive.analysis.report.passages import coloured_text
from compressive.analysis.report.run import (
    Report,
    Request,
    configuration,
    memory_section,
    next_commands,
    provenance,
    status,
    training,
)
from compressive.config import ModelConfig, transformer
from compressive.console import note
from compressive.evaluation.score import Progress, score
from compressive.model.language_model import CompressiveLM
from compressive.plotting import COLOURS, INK, Panel, require_matplotlib, tidy, tip
from compressive.runs.run import Run
from compressive.runs.trained import Trained

if TYPE_CHECKING:
    from compressive.data.corpus import Corpus

SAMPLES = 5
"""Number of training samples shown, the last one first."""
STREAMS, LEAST = 16, 20
"""Streams that the test text is scored in, at most; each is at least so many times as long as what fills memory."""
LONG = 20_000_000
"""Bytes of training text from which on xz takes so long that it is worth a note."""


@dataclass(frozen=True)
class TestScore:
    """Test score of the model, and of xz on the same text."""

    tokens: int
    size: int  # bytes of the text
    whole: bool
    characters: bool  # whether tokens are bytes
    perplexity: float  # per token
    bits: float  # per byte of the text
    xz: float | None  # bits per byte; None if it was left out, or if tokens are words, which do not determine the text
    xz_after_training: float | None
    streams: int
    scored_by: str  # this report, or the file of an earlier evaluation

    @property
    def unit(self) -> str:
        """Unit of `bits`."""
        return "bits per character" if self.characters else "bits per byte"


@dataclass(frozen=True)
class Findings:
    """All measurements of a report."""

    step: int
    parameters: int
    split: str
    lossless: bool  # whether tokens determine the text
    test: TestScore
    memory: MemoryUse
    attention: AttentionUse
    layers: LayerLoss | None  # None if no layer compresses

    @property
    def verdict(self) -> str:
        """The result in one sentence, beside xz where that is possible."""
        test = self.test
        if not self.lossless:
            return f"Perplexity {test.perplexity:,.2f} on the test text"
        text = f"{test.bits:.2f} {test.unit}"
        if test.xz is not None and test.xz_after_training is not None:
            text += f", {beside(test.bits, test.xz, 'xz')}, "
            text += beside(test.bits, test.xz_after_training, "xz that has seen the training text")
        return text

    @property
    def numbers(self) -> dict[str, Any]:
        """The main numbers, for JSON."""
        found: dict[str, Any] = {"verdict": self.verdict, "step": self.step, "parameters": self.parameters}
        found["test"] = dataclasses.asdict(self.test) | ({} if self.lossless else {"bits": None})
        if (worth := self.memory.compressed_worth) is not None:
            found["compressed_memory_is_worth"] = dataclasses.asdict(worth)
        return found

    @property
    def lines(self) -> str:
        """The main numbers as a few lines of text."""
        test = self.test
        lines = [self.verdict, f"test, {test.tokens:,} tokens, {test.unit if self.lossless else 'perplexity'}:"]
        lines.append(f"  this model                     {test.bits if self.lossless else test.perplexity:.3f}")
        if test.xz is not None and test.xz_after_training is not None:
            lines.append(f"  xz -9e of the same text        {test.xz:.3f}")
            lines.append(f"  xz(train + test) - xz(train)   {test.xz_after_training:.3f}")
        if (worth := self.memory.compressed_worth) is not None:
            lines.append(f"compressed memory is worth {worth.mean:.4f} ± {worth.error:.4f} bits per token")
        return "\n".join(lines)


def text_report(overview: Overview, request: Request) -> Report:
    """Measure a run and write its page; raises PlotError if matplotlib is missing."""
    require_matplotlib()  # fail before the measurements, not after them
    run = Run.open(overview.folder)
    corpus = run.corpus(request.data_dir)
    found = measure(run, corpus, request)
    return Report(_page(overview, run, corpus, found), found.numbers, found.lines)


def measure(run: Run, corpus: "Corpus", request: Request) -> Findings:
    """Measure a run; xz works on the other core meanwhile, unless its result is known."""
    trained = Trained.load(run, request.which)
    config = transformer(trained.config)
    model, text = trained.model(config, request.device), corpus.split(request.split)
    lossless = corpus.tokenizer.kind != "words"
    tested = _evaluated(run, trained.step, config, request)
    count = len(corpus.split("test")[: request.test_tokens]) if tested is None else tested["tokens"]
    compressed = xz.in_background(lambda: _xz(corpus, count) if request.xz and lossless else None)
    sizes: dict[str, Any] = {"tokens": request.tokens, "streams": request.streams}
    progress = request.progress
    memory = measure_memory(model, text, **sizes, progress=part(progress, 0, 0.5))
    attention = measure_attention(model, text, **sizes, progress=part(progress, 0.5, 0.65))
    layers = None
    if any(config.compressed_sizes):
        with_loss = trained.model(measurable(config), request.device)
        layers = measure_layers(with_loss, text, **sizes, progress=part(progress, 0.65, 0.75))
    test = _score_test(model, corpus, count, tested, part(progress, 0.75, 1))
    bits = compressed()
    if bits is not None:
        test = dataclasses.replace(test, xz=bits.alone, xz_after_training=bits.after_training)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Findings(trained.step, parameters, request.split, lossless, test, memory, attention, layers)


def _xz(corpus: "Corpus", tokens: int) -> xz.XzBits:
    if xz.known(corpus, tokens) is None and corpus.bytes("train") > LONG:
        note("xz reads the training text, once for this corpus: this takes minutes; --no-xz leaves it out")
    return xz.compute(corpus, tokens)


def _evaluated(run: Run, step: int, config: ModelConfig, request: Request) -> dict[str, Any] | None:
    """Return an evaluation of the whole test split that `compressive evaluate` kept for this very model, if any."""
    wanted = {
        "split": "test", "checkpoint": request.which, "step": step, "whole_split": True, "precision": "fp32",
        "dynamic_learning_rate": None, "memory_size": config.memory_size, "compressed_size": config.compressed_size,
        "empty_memory": config.empty_memory,
    }  # fmt: skip
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as in the files
    paths = (run.folder / "evaluation").glob("test*.json")
    for path in sorted(paths, key=lambda path: (path.name != "test.json", path.name)):
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(found, dict):
            continue
        if path.name == "test.json":  # scored as trained; an old file may not say so
            found.setdefault("empty_memory", config.empty_memory)
        if all(found.get(key, ...) == value for key, value in wanted.items()):
            return found | {"path": str(Path("evaluation") / path.name)}
    return None


def _score_test(
    model: CompressiveLM, corpus: "Corpus", count: int, kept: dict[str, Any] | None, progress: Progress | None
) -> TestScore:
    """Score the first tokens of the test split, unless a score of all of them is kept."""
    tokens, tokenizer = corpus.split("test")[:count], corpus.tokenizer
    size = len(tokenizer.decode(tokens))
    # Streams are much faster than one row. Each fills its memory again, which is a small part of its length.
    streams = max(1, min(STREAMS, len(tokens) // (LEAST * (model.config.memory_span + model.config.window))))
    if kept is None:
        nats = float(score(model, tokens, streams=streams, progress=progress).sum())
    else:
        nats, streams = float(kept["nats"]), kept["streams"]
    return TestScore(
        tokens=len(tokens),
        size=size,
        whole=len(tokens) == len(corpus.split("test")),
        characters=tokenizer.kind == "bytes",
        perplexity=math.exp(nats / len(tokens)),
        bits=nats / math.log(2) / size,
        xz=None,
        xz_after_training=None,
        streams=streams,
        scored_by="this report" if kept is None else kept["path"],
    )


def _page(overview: Overview, run: Run, corpus: "Corpus", found: Findings) -> Page:
    model = transformer(run.config.model)
    split = f"the {'validation' if found.split == 'valid' else found.split} split"
    sections = [
        memory_section(model),
        Section("The score", _score(found)),
        Section(
            "What memory is worth",
            page.paragraph(
                f"Measured on {found.memory.tokens:,} tokens of {split}. Memories are hidden after training: "
                "a model trained without one may do better than this one does with it hidden."
            )
            + page.figures(found.memory.panels()),
        ),
        Section(
            "Where it looks, and what compression loses",
            page.figures([*found.attention.panels(), *(found.layers.panels() if found.layers else [])]),
        ),
        Section(
            "What surprised it",
            page.paragraph(
                f"Passages of {split}, read with full memories. The colour of a character is what it cost: -log₂ p, in "
                "bits. Point at one for its value."
            )
            + coloured_text(found.memory.passages, corpus.tokenizer),
        ),
        training(overview),
        Section("What it writes", _samples(overview.folder / "samples")),
        provenance(overview, found.step, corpus=f"{corpus.name}, {corpus.manifest.tokenizer}", **{
            "corpus checksum": corpus.fingerprint, "note": corpus.manifest.note,
        }),
        configuration(overview),
        next_commands(_next(run, found)),
    ]  # fmt: skip
    return Page(
        name=run.folder.resolve().name,
        verdict=found.verdict,
        about=_about(run, found),
        tiles=list(_tiles(found)),
        sections=sections,
        status=status(overview),
    )


def _about(run: Run, found: Findings) -> str:
    model = transformer(run.config.model)
    return (
        f"Trained on {run.config.data.corpus} for {found.step:,} steps. {found.parameters / 1e6:,.2f} million "
        f"parameters: {model.n_layers} layers of width {model.d_model}; {_sizes(model)}."
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


def _tiles(found: Findings) -> list[Tile]:
    """Return the main numbers, each next to its comparison."""
    test = found.test
    scored = f"{'all' if test.whole else 'the first'} {test.tokens:,} tokens of the test split"
    if not found.lossless:
        tiles = [Tile(f"{test.perplexity:,.2f}", "perplexity", scored)]
    else:
        tiles = [Tile(f"{test.bits:.3f}", test.unit, scored)]
    if test.xz is not None and test.xz_after_training is not None:
        tiles.append(Tile(f"{test.xz:.3f}", f"{test.unit}, xz -9e", "the same text compressed on its own"))
        tiles.append(
            Tile(
                f"{test.xz_after_training:.3f}", f"{test.unit}, xz after training text", "xz(train + test) − xz(train)"
            )
        )
    if (worth := found.memory.compressed_worth) is not None:
        note = f"what compressed memory is worth (± {worth.error:.3f}, standard error over streams)"
        tiles.append(Tile(f"{worth.mean:.3f}", "bits per token", note))
    return tiles


def _score(found: Findings) -> str:
    test = found.test
    scored = "all" if test.whole else "the first"
    text = f"{scored.capitalize()} {test.tokens:,} tokens of the test split, {test.size:,} bytes. "
    streams = f"{test.streams} streams, each from empty memory" if test.streams > 1 else "one stream"
    text += f"Scored by {test.scored_by} in {streams}. "
    if not found.lossless:
        text += "Tokens are words, which do not determine the text: there is no score per byte."
        return page.paragraph(text)
    rows = {"this model": test.bits}
    if test.xz is not None and test.xz_after_training is not None:
        rows |= {"xz that has seen the training text": test.xz_after_training, "xz": test.xz}
        text += "xz -9e compresses the same text on its own, and after the training text: xz(train + test) − xz(train)."
    else:
        text += "xz was left out."
    caption = "Lower is better. No ±: one text, scored once. Uniform guessing has 8 bits per byte."
    return page.paragraph(text) + page.figures([bars_panel(found.verdict, rows, test.unit, caption)])


def bars_panel(claim: str, rows: dict[str, float], unit: str, caption: str) -> Panel:
    """Return a panel that puts the first row, this model, beside others."""

    def draw(axes: Any) -> None:
        for i, (name, bits) in enumerate(rows.items()):
            colour = COLOURS["window"] if i else COLOURS["compressed"]
            (bar,) = axes.barh(-i, bits, 0.45, color=colour)
            tip(bar, f"{name}: {bits:.4f} {unit}")
            axes.text(0, 0.28 - i, f"{name}: {bits:.3f}", fontsize=8.5, color=INK, fontweight="bold")
        tidy(axes, "", unit, grid="x")
        axes.set_yticks([])
        axes.margins(x=0.1, y=0.25)
        axes.set_xlim(left=0)

    return Panel(claim, draw, caption, height=0.7 + 0.4 * len(rows))


def beside(bits: float, other: float, name: str) -> str:
    """Say how far a score is below another one, or above it."""
    return f"{abs(other - bits):.2f} {'below' if bits <= other else 'above'} {name}"


def _samples(folder: Path) -> str:
    """Return text samples from training: the last one expanded, some earlier ones collapsed."""
    import html

    paths = sorted(folder.glob("step-*.txt"))
    if not paths:
        return page.paragraph("No samples were written during training.")
    shown = []
    for i in sorted({round(i * (len(paths) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)}, reverse=True):
        step = int(paths[i].stem.removeprefix("step-"))
        prompt, marker, text = paths[i].read_text("utf-8").removeprefix("[prompt]\n").partition("\n[sample]\n")
        body = f"<i>{html.escape(prompt)}</i>{html.escape(text)}" if marker else html.escape(prompt)
        shown.append(page.details(f"step {step:,}", f"<pre>{body}</pre>", is_open=i == len(paths) - 1))
    about = "Sampled during training, as the continuation of the text in grey."
    return page.paragraph(about) + "".join(shown)


def _next(run: Run, found: Findings) -> dict[str, str]:
    folder = shlex.quote(str(run.folder))
    lines = {f'compressive generate {folder} --prompt "Once upon a time"': "Let it write:"}
    model = transformer(run.config.model)
    if any(model.compressed_sizes):
        size = max(model.compressed_sizes)
        sweep = ",".join(str(n) for n in (0, size, 2 * size, 4 * size))
        lines[f"compressive evaluate {folder} --split valid --compressed-size {sweep}"] = (
            "See whether more compressed memory helps, without training again:"
        )
    if not found.test.whole:
        lines[f"compressive evaluate {folder} --split test"] = "Score the whole test split; the next report uses it:"
    lines[f"compressive compare {folder} OTHER_RUN"] = "Compare it with another run:"
    return lines
