"""An agent's run on disk, as text has it: config.json, environment.jsonl, metrics.jsonl, checkpoints/."""

from pathlib import Path
from typing import Self

import torch

from compressive.config.agent import AgentRun
from compressive.rl.agent.agent import Agent
from compressive.rl.env.task import Task
from compressive.runs import checkpoint
from compressive.runs.run import Folder, read_config


class AgentFolder(Folder[AgentRun]):
    """A run's folder with its configuration."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an existing run."""
        tables = read_config(folder, "compressive rl train")
        if "task" not in tables:
            raise ValueError(f"{folder} is no agent's run, but one on text; train one: compressive rl train PRESET")
        return cls(folder, AgentRun.from_tables(tables))

    def agent(self, task: Task, device: torch.device) -> tuple[Agent, int]:
        """Build the agent for a task with the newest weights; also say of which step they are."""
        found = checkpoint.latest(self.checkpoints)
        if found is None:
            raise checkpoint.CheckpointError(f"{self.folder} holds no whole checkpoint; train it with --resume first")
        agent = Agent(self.config, task.observation_shape, task.n_actions)
        agent.load_state_dict(found.tensors("model"))
        return agent.to(device).eval(), found.step
