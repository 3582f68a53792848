"""An agent's run on disk, as text has it: config.json, environment.jsonl, metrics.jsonl, checkpoints/."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from compressive.rl.agent import Agent
from compressive.rl.config import AgentRun
from compressive.rl.task import Task
from compressive.training import checkpoint


@dataclass(frozen=True)
class AgentFolder:
    """A run's folder with its configuration."""

    folder: Path
    config: AgentRun

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an existing run."""
        try:
            tables = json.loads((folder / "config.json").read_text("utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{folder} is not a run: it holds no config.json; train one: compressive rl train PRESET --out {folder}"
            ) from None
        if "task" not in tables:
            raise ValueError(f"{folder} is no agent's run, but one on text; train one: compressive rl train PRESET")
        return cls(folder, AgentRun.from_tables(tables))

    @classmethod
    def create(cls, folder: Path, config: AgentRun) -> Self:
        """Begin a run in a folder that holds none yet, or write down what a resumed one is told."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1), "utf-8")
        return cls(folder, config)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are kept."""
        return self.folder / "checkpoints"

    def agent(self, task: Task, device: torch.device) -> tuple[Agent, int]:
        """Build the agent for a task with the newest weights; also say of which step they are."""
        found = checkpoint.latest(self.checkpoints)
        if found is None:
            raise checkpoint.CheckpointError(f"{self.folder} holds no whole checkpoint; train it with --resume first")
        agent = Agent(self.config, task.observation_shape, task.n_actions)
        agent.load_state_dict(found.tensors("model"))
        return agent.to(device).eval(), found.step
