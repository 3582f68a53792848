"""From a word on the command line to someone who plays and what is played."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from compressive.config.agent import TaskConfig
from compressive.rl.env.task import Task, build_task
from compressive.rl.policies import AgentPlayer, OraclePlayer, Player, RandomPlayer
from compressive.rl.run import AgentFolder


class Opened(NamedTuple):
    """Someone who plays, and what."""

    task: Task
    player: Player
    about: str
    comparable: bool  # with the published scores


def open_player(
    name: str,
    lanes: int,
    seed: int,
    device: torch.device,
    greedy: bool = False,
    delays: tuple[int, ...] | None = None,
    shown: bool = False,
    of: Path | None = None,
) -> Opened:
    """Open a player by name: a run, by its folder, plays its own task; `random` and `oracle` that of the run `of`.

    Those two play the full rooms where no run is named. They do not look, so they get small pictures, unless these are
    to be shown.
    """
    learnt = name not in ("random", "oracle")
    folder = Path(name) if learnt else of
    run = None if folder is None else AgentFolder.open(folder)
    config = TaskConfig() if run is None else run.config.task
    if not learnt and not shown:
        config = dataclasses.replace(config, width=4, height=3)
    one_trial = config.ends_with_choice  # stays so if other delays are asked for, none among them
    delays = config.delays if delays is None else delays
    config = dataclasses.replace(config, lanes=lanes, delays=delays, one_trial=one_trial)
    task = build_task(config, seed, device)
    if learnt and run is not None:
        agent, step = run.agent(task, device)
        player: Player = AgentPlayer(agent, task, seed, device, greedy)
        return Opened(task, player, f"{name}, step {step}", config.comparable)
    player = OraclePlayer(task) if name == "oracle" else RandomPlayer(task, seed, device)
    return Opened(task, player, name, config.comparable)
