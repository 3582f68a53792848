"""Tiny agents and tasks for the tests of the agent."""

from typing import Any

import torch
from torch import Tensor

from compressive.config.agent import AgentRun
from compressive.rl.acting import Actor
from compressive.rl.agent.agent import Agent
from compressive.rl.env.build import build_task
from compressive.rl.env.rooms import Rooms
from compressive.rl.env.task import Task

CPU = torch.device("cpu")
COMPRESSIONS = ["max", "mean", "conv", "dilated", "most_used", "gru", "attention"]


def tiny_agent_run(**tables: dict[str, Any]) -> AgentRun:
    """A run whose episodes are shorter than its windows, so that episodes end inside them."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "window": 16, "memory_size": 16,
            "compressed_size": 8, "compression_rate": 4,
        },
        "task": {"envs": 6, "width": 16, "height": 12, "objects": 4, "seconds": 1.7, "speed": 960.0},
        "agent": {"channels": (4, 8), "blocks": 1, "features": 12},
        "train": {"batch": 6, "steps": 6 * 16 * 4, "log_every": 2, "checkpoint_every": 2, "device": "cpu"},
    }  # fmt: skip
    return AgentRun.from_tables({name: values[name] | tables.get(name, {}) for name in values})


def build(run: AgentRun, seed: int = 0, device: torch.device = CPU) -> tuple[Task, Agent, Actor]:
    """A task, an agent whose every parameter is random, so that its logits are far from uniform, and its actor."""
    torch.manual_seed(seed)
    task = build_task(run.task, seed, device, run.train.compile)
    agent = Agent(run, task.observation_shape, task.n_actions)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    agent = agent.to(device)
    return task, agent, Actor(task, agent, run.train, device, seed + 1)


def place(task: Rooms, **values: float) -> None:
    """Set fields of every environment's state."""
    import dataclasses

    old = task.state
    new = {name: torch.full_like(getattr(old, name), value) for name, value in values.items()}
    task.state = dataclasses.replace(old, **new)


def actions(*numbers: int) -> Tensor:
    return torch.tensor(numbers)
