"""The report of an agent: returns and right choices beside chance, an oracle and humans, and one episode to watch."""

import base64
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressive.analysis.overview import CHANCE, Overview
from compressive.analysis.reading import part
from compressive.analysis.report import page
from compressive.analysis.report.page import Page, Section, Tile
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
from compressive.config import AgentRun
from compressive.plotting import COLOURS, INK, Panel, require_matplotlib, tidy, tip
from compressive.rl.env.rooms import HUMAN, RANDOM
from compressive.rl.evaluate import Evaluation, compare
from compressive.rl.policies import load_policy
from compressive.rl.run import AgentFolder
from compressive.rl.video import frame_time, watch, write

ENVS = 64
"""Environments stepped side by side."""
SEED = 1_000_000
"""Seed of evaluations, far from those of training."""
FRAMES = 200
"""Frames of the episode that is shown, at most."""


@dataclass(frozen=True)
class Findings:
    """All measurements of a report of an agent."""

    step: int
    policies: dict[str, Evaluation]  # agent, random and, in the rooms, oracle
    episode: bytes | None  # as a GIF
    unseen: str  # why there is none

    @property
    def agent(self) -> Evaluation:
        """The agent's own."""
        return self.policies["agent"]

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        found, chance = self.agent, self.policies["random"]
        text = f"Return {found.mean:.2f} ± {found.margin:.2f}, a random policy {chance.mean:.2f}"
        if found.accuracy is not None:
            text += f"; {found.accuracy[0]:.0%} right choices, chance {CHANCE:.0%}"
        return text

    @property
    def bounds(self) -> dict[str, float]:
        """Mean returns of the other policies."""
        return {f"{name} policy": e.mean for name, e in self.policies.items() if name != "agent"}

    @property
    def numbers(self) -> dict[str, Any]:
        """The main numbers, for JSON."""
        policies = {name: evaluation.as_dict() for name, evaluation in self.policies.items()}
        return {"verdict": self.verdict, "step": self.step, "policies": policies}


def agent_report(overview: Overview, request: Request) -> Report:
    """Measure an agent and write its page; raises PlotError if matplotlib is missing."""
    require_matplotlib()
    run = AgentFolder.open(overview.folder)
    found = measure(run, request)
    lines = [found.verdict, f"{len(found.agent.returns)} episodes; ± is the 95 % interval"]
    lines += [f"  {name:<8} return {e.mean:.3f} ± {e.margin:.3f}" for name, e in found.policies.items()]
    return Report(_page(overview, run, found), found.numbers, "\n".join(lines), found.bounds)


def measure(run: AgentFolder, request: Request) -> Findings:
    """Evaluate the agent, a random policy and, in the rooms, an oracle; record one episode of the agent."""
    device, folder = torch.device(request.device), str(run.folder)
    progress = part(request.progress, 0, 3 / 4)
    loaded, found = compare(folder, request.episodes, ENVS, SEED, device, progress=progress)
    step = int(loaded.description.rpartition("step ")[2])
    episode, unseen = _episode(folder, device)
    return Findings(step, found, episode, unseen)


def _episode(folder: str, device: torch.device) -> tuple[bytes | None, str]:
    """Return one episode as a GIF, or why that is not possible."""
    try:
        loaded = load_policy(folder, 1, SEED, device)
        frames, _ = watch(loaded.task, loaded.policy, SEED)
    except ValueError as error:  # observations that are no images, or no Pillow
        return None, str(error)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "episode.gif"
        write(frames[:FRAMES], path, frame_time(loaded.task))
        return path.read_bytes(), ""


def _page(overview: Overview, run: AgentFolder, found: Findings) -> Page:
    config, folder = run.config, shlex.quote(str(run.folder))
    remembers = config.agent.core in ("compressive", "txl")
    sections = [
        *([memory_section(config.memory, "steps")] if remembers else []),
        Section("The score", _score(config, found)),
        Section("An episode", _watched(found)),
        training(overview, found.bounds),
        provenance(overview, found.step, task=config.task.name),
        configuration(overview),
        next_commands({
            f"compressive rl watch {folder} --out episode.gif": "Watch another episode:",
            f"compressive rl evaluate {folder} --episodes 4096": "Evaluate it on more episodes:",
            f"compressive rl train --resume {folder} --train.steps {2 * config.train.steps}": "Train it longer:",
            f"compressive compare {folder} OTHER_RUN": "Compare it with another agent:",
        }),
    ]  # fmt: skip
    about = (
        f"An agent with core {config.agent.core}, trained on {config.task.name} for {found.step:,} environment steps."
    )
    return Page(run.folder.resolve().name, found.verdict, about, _tiles(found), sections, status(overview))


def _tiles(found: Findings) -> list[Tile]:
    episodes = f"{len(found.agent.returns)} episodes"
    tiles = [Tile(f"{found.agent.mean:.2f}", "return", f"{episodes}, ± {found.agent.margin:.2f}, 95 % interval")]
    if found.agent.human_normalised is not None:
        note = f"0 is a random policy, 100 % humans ({HUMAN} as published)"
        tiles.append(Tile(f"{found.agent.human_normalised:.0%}", "human-normalised", note))
    for name in ("random", "oracle"):
        if (other := found.policies.get(name)) is not None:
            what = "a policy that acts at random" if name == "random" else "a policy that sees everything"
            tiles.append(Tile(f"{other.mean:.2f}", "return", f"{what}, ± {other.margin:.2f}"))
    if found.agent.accuracy is not None:
        share, low, high = found.agent.accuracy
        note = f"of {found.agent.choices:,} choices; 95 % interval {low:.1%} to {high:.1%}; chance {CHANCE:.0%}"
        tiles.append(Tile(f"{share:.1%}", "right choices", note))
    return tiles


def _score(config: AgentRun, found: Findings) -> str:
    rows = {name: (e.mean, e.margin) for name, e in found.policies.items()}
    note = "Whole episodes with seeds far from those of training; actions are sampled. "
    if config.task.comparable:
        note += f"Published: humans {HUMAN}, a random policy {RANDOM}."

    def draw(axes: Any) -> None:
        for i, (name, (mean, margin)) in enumerate(rows.items()):
            colour = COLOURS["window"] if i else COLOURS["compressed"]
            (bar,) = axes.barh(-i, mean, 0.45, xerr=margin, color=colour, ecolor=INK, capsize=3)
            tip(bar, f"{name}: {mean:.3f} ± {margin:.3f}")
            axes.text(0, 0.28 - i, f"{name}: {mean:.2f} ± {margin:.2f}", fontsize=8.5, color=INK, fontweight="bold")
        tidy(axes, "", "return of an episode", grid="x")
        axes.set_yticks([])
        axes.margins(x=0.1, y=0.25)

    caption = f"±: 95 % interval of the mean, over {len(found.agent.returns)} episodes each. Higher is better."
    return page.paragraph(note) + page.figures([Panel(found.verdict, draw, caption, height=1.9)])


def _watched(found: Findings) -> str:
    if found.episode is None:
        return page.paragraph(f"It cannot be shown: {found.unseen}.")
    image = base64.b64encode(found.episode).decode()
    text = "One episode, not chosen: what the agent sees, and a map that it does not see."
    return page.paragraph(text) + f'<img class="episode" alt="an episode" src="data:image/gif;base64,{image}">'
