"""The folder of an agent's run, laid out as for text: config.json, environment.jsonl, metrics.jsonl, checkpoints/.

A release (`release.py`) is opened in the same way; it has weights in place of checkpoints.
"""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from compressive.config.agent import AgentRun
from compressive.rl.agent.agent import Agent
from compressive.rl.env.task import Task
from compressive.runs import checkpoint
from compressive.runs.run import RELEASE, Folder, naming, read_config, read_json
from compressive.runs.shipped import shipped, spelled
from compressive.runs.weights import read_weights


class AgentFolder(Folder[AgentRun]):
    """The folder of an agent's run, with its configuration."""

    fixed = ("model", "task", "agent", "train.seed", "train.optimiser")

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an existing run, or a shipped agent by its name.

        Raises FileNotFoundError if there is none, ValueError if it is no agent's run.
        """
        folder = shipped(folder)
        tables = read_config(folder, "compressive rl train")
        if "task" not in tables:
            name = spelled(folder)
            raise ValueError(
                f"{name} is no agent's run, but one of text or audio: use compressive evaluate {name}, or train an "
                "agent: compressive rl train PRESET"
            )
        with naming(folder / "config.json"):
            return cls(folder, AgentRun.from_tables(tables))

    def weights(self) -> tuple[dict[str, Tensor], int]:
        """Read the newest weights; return them with their step.

        Raises CheckpointError if there is no complete checkpoint.
        """
        if (self.folder / RELEASE).is_file():
            return read_weights(self.folder), read_json(self.folder / RELEASE, ("step",))["step"]
        found = checkpoint.latest(self.checkpoints)
        if found is None:
            raise checkpoint.CheckpointError(
                f"{self.folder} holds no checkpoint yet: compressive rl train --resume {self.folder}"
            )
        return found.tensors("model"), found.step

    def agent(self, task: Task, device: torch.device) -> tuple[Agent, int]:
        """Build the agent for a task and load its newest weights; return it with their step.

        Raises CheckpointError if there is no complete checkpoint.
        """
        weights, step = self.weights()
        agent = Agent(self.config, task.observation_shape, task.n_actions)
        agent.load_state_dict(weights)
        return agent.to(device).eval(), step
