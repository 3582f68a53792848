"""The curve of an agent's training: return, choices and right choices, beside a random policy and an oracle."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressive.plotting import COLOURS, bound, figure, headline, save, tidy

_NEARBY = 2
"""The smooth line is a mean of so many rows before and after each."""


def plot(rows: Sequence[Mapping[str, Any]], policies: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Plot every logged row of training over steps, and their moving mean; other policies are horizontal lines.

    `rows` are those of metrics.jsonl, `policies` evaluations as dictionaries: `agent`, and `random` and `oracle` as far
    as they are known. Raises PlotError if matplotlib is missing.
    """
    agent, rows = policies["agent"], [row for row in rows if row.get("episodes")]
    others = {name: policies[name] for name in ("random", "oracle") if name in policies}
    page = figure(10.5, 3.6)
    shown: dict[str, list[tuple[float, float]]] = {
        "return per episode": [(row["step"], row["return"]) for row in rows],
        "choices per episode": [(row["step"], row["choices"] / row["episodes"]) for row in rows],
        "share of right choices": [(row["step"], row["choice_accuracy"]) for row in rows if row["choices"]],
    }
    for axes, (name, points) in zip(page.subplots(1, len(shown)), shown.items(), strict=True):
        steps, values = [step / 1e6 for step, _ in points], [value for _, value in points]
        nearby = [statistics.mean(values[max(0, at - _NEARBY) : at + _NEARBY + 1]) for at in range(len(values))]
        axes.plot(steps, values, color=COLOURS["window"], linewidth=0.8)
        axes.plot(steps, nearby, color=COLOURS["compressed"])
        tidy(axes, name, x="million agent steps")
        axes.set_ylim(bottom=min([0, *values]))
        if name == "share of right choices":
            axes.set_ylim(0, 1)
            bound(axes, 0.5, "chance")
            if "oracle" in others:
                bound(axes, 1.0, "oracle")
            continue
        for other, found in others.items():
            value = found["return"] if name == "return per episode" else found["choices"] / found["episodes"]
            bound(axes, value, "random policy" if other == "random" else other)
    detail = f"Grey: each logged row. Red: mean of {2 * _NEARBY + 1} rows. Lines: policies that were not trained."
    if agent["published"]:
        detail += f" Humans have {agent['published']['human']:g} on the original, as published."
    headline(page, _claim(agent), detail)
    save(page, path)


def _claim(agent: Mapping[str, Any]) -> str:
    """Say what the evaluation after training found."""
    text = f"After training: return {agent['return']:.1f} ± {agent['return_margin_95']:.1f}"
    if agent["choice_accuracy"] is None:
        return f"{text}, and no choice was made"
    low, high = agent["choice_accuracy_interval"]
    chance = "at chance" if low <= 0.5 <= high else "above chance" if low > 0.5 else "below chance"
    per_episode = agent["choices"] / agent["episodes"]
    return f"{text}, {per_episode:.1f} choices per episode, {agent['choice_accuracy']:.1%} right: {chance}"
