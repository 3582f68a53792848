"""The report of a model of speech: its score beside floors without a neural network, waves coloured by surprise."""

import base64
import dataclasses
import html
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from compressive.analysis.memory import hide
from compressive.analysis.overview import Overview
from compressive.analysis.reading import Estimate, Floats, part
from compressive.analysis.report import page
from compressive.analysis.report.page import Page, Section, Tile
from compressive.analysis.report.passages import switchable, wave
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
from compressive.analysis.report.text import bars_panel, beside
from compressive.config import ModelConfig, WaveNetConfig
from compressive.data.speech.codes import RATE
from compressive.evaluation.score import Progress, Window, read_through
from compressive.model.language_model import LanguageModel
from compressive.model.memory import Memory
from compressive.plotting import require_matplotlib
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.speech.floors import floors

if TYPE_CHECKING:
    from compressive.data.corpus import Clip, Corpus

STREAMS = 16
CLIPS = 3
"""Test clips that are drawn, and samples from training that can be heard."""
SECONDS = 4
"""Seconds of a clip that are drawn, at most."""
FLOORS = {
    "unigram": "how often each value occurs",
    "bigram": "the value before",
    "linear_prediction": "linear prediction",
}


@dataclass(frozen=True)
class Findings:
    """All measurements of a report of speech."""

    step: int
    parameters: int
    samples: int
    whole: bool
    bits: Floats  # of every sample that was scored
    gains: Floats | None  # what compressed memory saved on each; None if there is none
    worth: Estimate | None  # mean over clips
    floors: dict[str, float]  # bits per sample of the same samples, lowest last

    @property
    def mean(self) -> float:
        """Bits per sample."""
        return float(self.bits.mean())

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        name = min(self.floors, key=lambda name: self.floors[name])
        return f"{self.mean:.2f} bits per sample, {beside(self.mean, self.floors[name], FLOORS[name])}"

    @property
    def numbers(self) -> dict[str, Any]:
        """The main numbers, for JSON."""
        found: dict[str, Any] = {"verdict": self.verdict, "step": self.step, "parameters": self.parameters}
        found["test"] = {"samples": self.samples, "whole": self.whole, "bits_per_sample": self.mean}
        found["floors_bits_per_sample"] = self.floors
        if self.worth is not None:
            found["compressed_memory_is_worth"] = dataclasses.asdict(self.worth)
        return found

    @property
    def lines(self) -> str:
        """The main numbers as a few lines of text."""
        lines = [self.verdict, f"test, {self.samples:,} samples, bits per sample:", f"  this model   {self.mean:.3f}"]
        lines += [f"  {FLOORS[name]}   {bits:.3f}" for name, bits in self.floors.items()]
        if self.worth is not None:
            lines.append(f"compressed memory is worth {self.worth} bits per sample")
        return "\n".join(lines)


def speech_report(overview: Overview, request: Request) -> Report:
    """Measure a run on speech and write its page; raises PlotError if matplotlib is missing."""
    require_matplotlib()
    run = Run.open(overview.folder)
    corpus = run.corpus(request.data_dir)
    found = measure(run, corpus, request)
    return Report(_page(overview, run, corpus, found), found.numbers, found.lines)


def measure(run: Run, corpus: "Corpus", request: Request) -> Findings:
    """Score the test clips and, if there is compressed memory, score them again with it hidden."""
    trained = Trained.load(run, request.which)
    model = trained.model(trained.config, request.device)
    compresses = isinstance(trained.config, ModelConfig) and any(trained.config.compressed_sizes)
    middle = 0.45 if compresses else 0.9
    bits = _bits(model, corpus, request.test_tokens, part(request.progress, 0, middle))
    gains = worth = None
    if compresses:
        gains = _bits(model, corpus, request.test_tokens, part(request.progress, 0.45, 0.9), hidden=True) - bits
        clips = [gains[clip.start : clip.end].mean() for clip in _clips(corpus, len(bits))]
        worth = Estimate.of(np.array(clips)) if len(clips) > 1 else None
    found = floors(corpus, "test", request.test_tokens)
    return Findings(
        step=trained.step,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        samples=len(bits),
        whole=len(bits) == len(corpus.split("test")),
        bits=bits,
        gains=gains,
        worth=worth,
        floors=dict(sorted(found.items(), key=lambda item: -item[1])),
    )


def _bits(
    model: LanguageModel, corpus: "Corpus", limit: int | None, progress: Progress | None, hidden: bool = False
) -> Floats:
    """Return the bits of every test sample (n,); with `hidden`, compressed memory is masked before every window."""

    def read(window: Window, memory: Memory) -> tuple[Tensor, Memory]:
        if hidden:
            everywhere = torch.ones(len(window.tokens), dtype=torch.bool, device=window.tokens.device)
            memory = hide(memory, compressed=everywhere, recent=~everywhere)
        out = model(window.tokens, memory, targets=window.targets, starts=window.starts)
        assert out.nll is not None
        return out.nll, out.memory

    tokens = corpus.split("test")
    size = min(len(tokens), limit or len(tokens))
    streams = max(1, min(STREAMS, size // (4 * model.config.window)))
    with torch.no_grad():
        nats = read_through(
            model, tokens, read, streams=streams, limit=limit, progress=progress, clips=corpus.starts("test")
        )
    return nats / math.log(2)


def _clips(corpus: "Corpus", scored: int) -> "list[Clip]":
    """Return the test clips that were scored whole."""
    return [clip for clip in corpus.clips if clip.split == "test" and clip.end <= scored]


def _page(overview: Overview, run: Run, corpus: "Corpus", found: Findings) -> Page:
    model, folder = run.config.model, shlex.quote(str(run.folder))
    sections = [
        *([memory_section(model, "samples")] if isinstance(model, ModelConfig) else []),
        Section("The score", _score(found)),
        Section("What surprised it", _waves(corpus, found)),
        training(overview),
        Section("What it says", _heard(overview.folder / "samples")),
        provenance(overview, found.step, corpus=f"{corpus.name}, {corpus.manifest.tokenizer}", **{
            "corpus checksum": corpus.fingerprint, "note": corpus.manifest.note,
        }),
        configuration(overview),
        next_commands({
            f"compressive generate {folder} --out speech.wav": "Let it speak:",
            f"compressive evaluate {folder} --split test": "Score the whole test split:",
            f"compressive compare {folder} OTHER_RUN": "Compare it with another run of speech:",
        }),
    ]  # fmt: skip
    size = (
        f"WaveNet of {model.n_layers} layers, receptive field {model.receptive_field:,} samples"
        if isinstance(model, WaveNetConfig)
        else f"{model.n_layers} layers of width {model.d_model}"
    )
    about = (
        f"Trained on {corpus.name} for {found.step:,} steps. {found.parameters / 1e6:,.2f} million parameters: {size}. "
        f"Bits per sample compare only at equal bit depth, rate and gain."
    )
    scored = f"{'all' if found.whole else 'the first'} {found.samples:,} samples of the test split"
    tiles = [Tile(f"{found.mean:.3f}", "bits per sample", scored)]
    tiles += [Tile(f"{bits:.3f}", "bits per sample", f"by {FLOORS[name]}") for name, bits in found.floors.items()]
    if found.worth is not None:
        note = f"what compressed memory is worth (± {found.worth.error:.3f}, standard error over clips)"
        tiles.append(Tile(f"{found.worth.mean:.3f}", "bits per sample", note))
    return Page(run.folder.resolve().name, found.verdict, about, tiles, sections, status(overview))


def _score(found: Findings) -> str:
    text = (
        f"{'All' if found.whole else 'The first'} {found.samples:,} samples of the test split, each scored once; "
        "memory is empty where a clip begins. The floors need no neural network and score the same samples."
    )
    if found.worth is not None:
        text += (
            f" {found.worth.verdict('compressed memory').replace('token', 'sample')} (±: standard error over clips)."
        )
    rows = {"this model": found.mean} | {FLOORS[name]: bits for name, bits in reversed(found.floors.items())}
    caption = "Lower is better. No ±: one text, scored once."
    return page.paragraph(text) + page.figures([bars_panel(found.verdict, rows, "bits per sample", caption)])


def _waves(corpus: "Corpus", found: Findings) -> str:
    """Return the waves of some test clips, spread over the split."""
    clips = _clips(corpus, found.samples)
    if not clips:
        return page.paragraph("No whole clip was scored.")
    drawn = []
    for i in sorted({round(i * (len(clips) - 1) / max(1, CLIPS - 1)) for i in range(CLIPS)}):
        clip = clips[i]
        end = min(clip.end, clip.start + SECONDS * RATE)
        samples = np.frombuffer(corpus.tokenizer.decode(corpus.split("test")[clip.start : end]), "<i2")
        gains = None if found.gains is None else found.gains[clip.start : end]
        bits = found.bits[clip.start : end]
        shown = f"{(end - clip.start) / RATE:.1f} of {clip.size / RATE:.1f} s"
        drawn.append(
            f"<h3>{html.escape(clip.source)}: {bits.mean():.2f} bits per sample ({shown})</h3><figure>"
            f"{wave(samples, bits.tolist(), None if gains is None else gains.tolist(), RATE)}</figure>"
        )
    about = "Test clips, not chosen by result. The colour is what a sample cost, mean over each column; point at one."
    return page.paragraph(about) + switchable("".join(drawn), found.gains is not None)


def _heard(folder: Path) -> str:
    """Return samples from training, to be heard; the last one first."""
    paths = sorted(folder.glob("step-*.wav"))[::-1][:CLIPS]
    if not paths:
        return page.paragraph("No samples were written during training: train with --train.sample-every.")
    players = []
    for path in paths:
        sound = base64.b64encode(path.read_bytes()).decode()
        title = f"step {int(path.stem.removeprefix('step-')):,}"
        players.append(f'<p>{title}<audio controls src="data:audio/wav;base64,{sound}"></audio></p>')
    return page.paragraph("Each begins with 256 samples of a real clip.") + "".join(players)
