"""Resources of the paper's PG-19 run on many GPUs, from the rate measured on one: the tables of docs/scaling.md.

    python experiments/scaling.py

The time of a step is that of computing or that of communication, whichever is longer, because gradients are reduced
while the backward pass runs.
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
    """What was measured on one GPU at one batch size."""

    batch: int
    tokens_per_second: float
    gib: float


@dataclass(frozen=True)
class Plan:
    """The run on a number of GPUs."""

    gpus: int
    batch: int  # per GPU
    way: str
    gib: float
    compute: float  # seconds per step
    links: float
    days: float


def rates(recompute: bool) -> list[Rate]:
    """Return the measured rows, smallest batch first."""
    rows = [row for row in json.loads(RATES.read_text())["rows"] if row["recompute"] == recompute]
    return sorted(
        (Rate(row["batch"], row["tokens_per_second"], row["peak_gib"]) for row in rows), key=lambda rate: rate.batch
    )


def plan(gpus: int, sharded: bool, recompute: bool) -> Plan:
    """Return memory, time per step and days of a run, at the measured rate of the nearest batch size."""
    config = RunConfig.from_preset("pg19")
    parameters = json.loads(RATES.read_text())["rows"][0]["parameters"]
    batch = config.train.batch // gpus
    low, high = rates(recompute)
    per_row = (high.gib - low.gib) / (high.batch - low.batch)
    # At most 2.5 GiB more than was measured: activations peak before all gradients exist.
    gib = STATE * parameters / (gpus if sharded else 1) / 2**30 + per_row * batch
    nearest = min((low, high), key=lambda rate: abs(rate.batch - batch))
    compute = batch * config.model.window / nearest.tokens_per_second
    # A ring moves (n - 1)/n of the data per pass: DDP has 2 (all-reduce), FSDP2 3 (all-gather twice, reduce-scatter).
    passes, link = 3 if sharded else 2, NVLINK if gpus <= MACHINE else NETWORK
    links = passes * 4 * parameters * (gpus - 1) / gpus / link
    steps = TOKENS / (config.train.batch * config.model.window)
    way = ("FSDP2" if sharded else "DDP") + (", recompute" if recompute else "")
    return Plan(gpus, batch, way, gib, compute, links, steps * max(compute, links) / 86400)


def table() -> str:
    """Return all plans as a Markdown table."""
    lines = ["| GPUs | batch each | how | memory per GPU | computing | links | 100 billion tokens |", "|" + "---|" * 7]
    for gpus in (8, 64, 256):
        for sharded in (False, True):
            for recompute in (False, True):
                found = plan(gpus, sharded, recompute)
                fits = "" if found.gib < 139 else " (does not fit)"
                lines.append(
                    f"| {found.gpus} | {found.batch} | {found.way} | {found.gib:.1f} GiB{fits} | {found.compute:.3f} s "
                    f"| {found.links:.3f} s | {found.days:.1f} days |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
