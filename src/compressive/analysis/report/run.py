"""What the reports of all kinds of runs share: how they are asked for, provenance, configuration, next commands."""

import dataclasses
import json
import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

import compressive
from compressive.analysis.curves import Line, lines_panel
from compressive.analysis.overview import CHANCE, Overview
from compressive.analysis.report import page
from compressive.analysis.report.drawing import memory_drawing, sentence
from compressive.analysis.report.page import Page, Section
from compressive.config import AgentRun, ModelConfig
from compressive.evaluation.score import Progress
from compressive.plotting import PALETTE, Panel
from compressive.runtime import write_atomically
from compressive.training.recorder import clock


@dataclass(frozen=True)
class Request:
    """How much a report measures, and on what."""

    data_dir: Path | None = None
    """Folder of prepared corpora, if not the one used in training."""
    device: torch.device | str = "cpu"
    which: Literal["best", "last"] = "best"
    split: str = "valid"
    """Split that the analyses of text read."""
    tokens: int = 50_000
    """Tokens that each analysis of text measures on, about."""
    streams: int = 16
    test_tokens: int | None = 250_000
    """Tokens, or audio samples, of the test split that are scored; None for all."""
    xz: bool = True
    """Whether to compare with xz, which reads all of the training text once."""
    episodes: int = 128
    """Episodes of an agent."""
    progress: Progress | None = None


@dataclass(frozen=True)
class Report:
    """A report: its page, its main numbers and what is printed."""

    page: Page
    numbers: dict[str, Any]
    lines: str
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Scores that training curves are compared with, by name."""

    def write(self, out: Path) -> None:
        """Write the page to `out`, and its main numbers as JSON beside it."""
        write_atomically(out.with_suffix(".json"), self.json() + "\n")
        write_atomically(out, self.page.html())

    def json(self) -> str:
        """Return the main numbers as a JSON object."""
        return json.dumps(self.numbers, indent=1)


def status(run: Overview) -> str:
    """Return a line about a run that still trains; nothing if it does not."""
    if run.state != "training":
        return ""
    done, planned, seconds = run.steps, run.config.train.steps, run.seconds or 0.0
    left = f", about {clock(seconds / done * (planned - done))} left" if done else ""
    return f"This run is training: step {done:,} of {planned:,}{left}. Reported at {_now()}."


def memory_section(config: ModelConfig, unit: str = "tokens") -> Section:
    """Return the section with the drawing of the memories."""
    title = "What compressed memory is" if any(config.compressed_sizes) else "What this model remembers"
    return Section(title, page.paragraph(sentence(config, unit)) + memory_drawing(config, unit))


def training(run: Overview, bounds: Mapping[str, float] = MappingProxyType({})) -> Section:
    """Return the section with the curves of a run; `bounds` are drawn beside its main score."""
    if isinstance(run.config, AgentRun):
        panels = _agent_panels(run, bounds)
    else:
        vocab_size = run.config.model.vocab_size
        chance = math.log2(vocab_size) if run.metric.key == "bits" else float(vocab_size)
        unit = "samples per second" if run.kind == "speech" else "tokens per second"
        panels = run.curves.loss_panels(run.metric.name, run.metric.key, bounds, chance)
        panels += run.curves.optimisation_panels(unit=unit)
    return Section("Training", page.figures(panels) or page.paragraph("No metrics have been written yet."))


def _agent_panels(run: Overview, bounds: Mapping[str, float]) -> list[Panel]:
    x, curves, panels = "environment steps", run.curves, []
    if scores := run.scores:
        first, last = scores[0][1], scores[-1][1]
        claim = f"Return rose from {first:.2f} to {last:.2f}"
        if last <= first:
            claim = f"Return did not rise: {first:.2f} to {last:.2f}"
        caption = "Mean over the episodes of the last tenth of training before each point."
        line = Line("", scores, PALETTE[0])
        panels.append(lines_panel(claim, [line], "return", x=x, bounds=bounds, zero=True, caption=caption))
    if choices := curves.values("choice_accuracy"):
        claim = f"Right choices: {choices[-1][1]:.1%} at the end"
        line, chance = Line("", choices, PALETTE[0]), {"chance": CHANCE}
        panels.append(lines_panel(claim, [line], "share of right choices", x=x, bounds=chance))
    if entropy := curves.values("entropy"):
        claim = f"The policy's entropy ended at {entropy[-1][1]:.2f} nats"
        panels.append(lines_panel(claim, [Line("", entropy, PALETTE[1])], "nats", x=x, zero=True))
    if losses := curves.values("baseline_loss"):
        claim = f"The value loss ended at {losses[-1][1]:.3g}"
        panels.append(lines_panel(claim, [Line("", losses, PALETTE[1])], "loss", x=x, log=True))
    return [*panels, *curves.optimisation_panels("steps_per_second", "steps per second", x)]


def provenance(run: Overview, step: int, **more: str) -> Section:
    """Return the section that says where the run comes from."""
    first = run.environments[0] if run.environments else {}
    machine = ", ".join(
        str(part)
        for part in (
            first.get("gpu"),
            f"{first['cpu_cores']} CPU cores" if first.get("cpu_cores") else None,
            f"{first['threads']} threads" if first.get("threads") else None,
            first.get("platform"),
        )
        if part
    )
    versions = [f"{name} {first[name]}" for name in ("python", "torch", "cuda") if first.get(name)]
    resumed = len(run.environments) - 1
    rows = {
        "started": (run.started or "").replace("T", " ").replace("Z", " UTC"),
        "trained for": f"{clock(run.seconds)}, {run.steps:,} of {run.config.train.steps:,} steps"
        if run.seconds
        else "",
        "resumed": f"{resumed} time{'s' * (resumed > 1)}" if resumed > 0 else "",
        "state": run.state,
        "command": shlex.join(str(word) for word in first.get("command", [])),
        "preset": run.preset or "",
        "seed": str(run.config.train.seed),
        "machine": machine,
        "commit": first.get("commit") or "",
        "versions": ", ".join(versions),
        "checkpoint": f"step {step:,}",
        **more,
        "report made": f"{_now()}, compressive {compressive.__version__}",
    }
    body = page.table(rows)
    if not run.environments:
        body += page.paragraph("This run has no environment.jsonl: command, machine and commit are not known.")
    return Section("Where it comes from", body)


def configuration(run: Overview) -> Section:
    """Return the section with all values."""
    text = json.dumps(dataclasses.asdict(run.config), indent=1)
    return Section("Configuration", page.details("all values", page.preformatted(text)))


def next_commands(lines: dict[str, str]) -> Section:
    """Return the section with what to do next, commands and what they do."""
    return Section("Next", page.commands(lines))


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
