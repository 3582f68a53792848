"""What the paper's PG-19 run needs on many GPUs, computed from the rate measured on one: the tables of docs/scaling.md.

    python experiments/scaling.py

Time is that of computing or of the links, whichever is longer, as gradients travel while the backward pass goes on.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from compressive.config import RunConfig

RATES = Path(__file__).with_name("results") / "pg19-rate" / "2026-11-15-h200.json"
TOKENS = 100e9  # section 5.1: "around 100 billion subword tokens"
MACHINE = 8  # GPUs with NVLink between them
NVLINK, NETWORK = 450e9, 50e9  # bytes per second and direction for one GPU: NVLink 4, and 400 Gb/s of InfiniBand
STATE = 16  # bytes per parameter: weight, gradient and Adam's two moments, all float32


@dataclass(frozen=True)
class Rate:
    """What was measured on one GPU with so many lanes."""

    lanes: int
    tokens_per_second: float
    gib: float


@dataclass(frozen=True)
class Plan:
    """The run on so many GPUs."""

    gpus: int
    lanes: int
    way: str
    gib: float
    compute: float  # seconds per step
    links: float
    days: float


def rates(recompute: bool) -> list[Rate]:
    """The measured rows, fewest lanes first."""
    rows = [row for row in json.loads(RATES.read_text())["rows"] if row["recompute"] == recompute]
    return sorted(
        (Rate(row["batch"], row["tokens per second"], row["peak GiB"]) for row in rows), key=lambda rate: rate.lanes
    )


def plan(gpus: int, sharded: bool, recompute: bool) -> Plan:
    """Put together what a step takes: the rate is that of the nearest number of lanes that was measured."""
    config = RunConfig.from_preset("pg19")
    parameters = json.loads(RATES.read_text())["rows"][0]["parameters"]
    lanes = config.train.batch // gpus
    low, high = rates(recompute)
    per_lane = (high.gib - low.gib) / (high.lanes - low.lanes)
    # A little more than was measured, at most 2.5 GiB, as not all gradients are there when activations are most.
    gib = STATE * parameters / (gpus if sharded else 1) / 2**30 + per_lane * lanes
    nearest = min((low, high), key=lambda rate: abs(rate.lanes - lanes))
    compute = lanes * config.model.window / nearest.tokens_per_second
    # A ring passes (n - 1)/n of the data: twice to sum gradients, three times to gather weights twice and scatter sums.
    passes, link = 3 if sharded else 2, NVLINK if gpus <= MACHINE else NETWORK
    links = passes * 4 * parameters * (gpus - 1) / gpus / link
    steps = TOKENS / (config.train.batch * config.model.window)
    way = ("FSDP2" if sharded else "DDP") + (", recompute" if recompute else "")
    return Plan(gpus, lanes, way, gib, compute, links, steps * max(compute, links) / 86400)


def table() -> str:
    """All plans, as Markdown."""
    lines = ["| GPUs | lanes each | how | memory per GPU | computing | links | 100 billion tokens |", "|" + "---|" * 7]
    for gpus in (8, 64, 256):
        for sharded in (False, True):
            for recompute in (False, True):
                found = plan(gpus, sharded, recompute)
                fits = "" if found.gib < 139 else " (does not fit)"
                lines.append(
                    f"| {found.gpus} | {found.lanes} | {found.way} | {found.gib:.1f} GiB{fits} | {found.compute:.3f} s "
                    f"| {found.links:.3f} s | {found.days:.1f} days |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
