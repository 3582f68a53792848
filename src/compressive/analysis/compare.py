"""Runs beside each other: what differs in their configurations, scores, speed, size, and curves in one figure.

Runs that differ only in their seed are one recipe; its figures are means over seeds, with the lowest and highest.
"""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from compressive.analysis.overview import CHANCE, SPEEDS, Metric, Overview, same_but_for_the_seed
from compressive.config import AgentRun
from compressive.plotting import PALETTE, bound, figure, headline, hover, label_ends, save, tidy

if TYPE_CHECKING:
    from rich.console import RenderableType

Points = list[tuple[int, float]]

SMOOTH = 40
"""A training curve with more points than this is averaged in so many stretches."""


class Spread(NamedTuple):
    """A figure over the seeds of a recipe."""

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        """Return the spread of the values that are there; None if there are none."""
        there = [value for value in values if value is not None]
        return cls(statistics.fmean(there), min(there), max(there), len(there)) if there else None

    def show(self, how: str) -> str:
        """Return the mean, and the range if there is one."""
        text = format(self.mean, how)
        return text if self.low == self.high else f"{text} ({self.low:{how}} to {self.high:{how}})"


@dataclass(frozen=True)
class Recipe:
    """Runs that differ only in their seed."""

    name: str
    runs: tuple[Overview, ...]

    def spread(self, what: str) -> Spread | None:
        """Return one figure of the runs, such as `best`, over seeds."""
        return Spread.of([getattr(run, what) for run in self.runs])

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return sorted(run.config.train.seed for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """Recipes of one kind, best first."""

    metric: Metric
    recipes: tuple[Recipe, ...]
    differences: dict[str, tuple[Any, ...]]
    """Fields in which the recipes differ, and the value of each recipe; None where a model has no such field."""
    notes: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[Overview]) -> "Comparison":
        """Group and order runs; raise ValueError if they are of different kinds, or scored by different metrics."""
        if len({run.folder.resolve() for run in runs}) < 2:
            raise ValueError(f"{len(runs)} run{'s' * (len(runs) != 1)} given: expected at least 2 different ones")
        _require_one(runs, lambda run: run.kind, "kinds", "compare text, speech and agents each among themselves")
        _require_one(
            runs, lambda run: run.metric.name, "metrics", "their scores are in different units and cannot be compared"
        )
        groups: dict[str, list[Overview]] = {}
        for run in runs:
            groups.setdefault(repr(sorted(same_but_for_the_seed(run.config).items())), []).append(run)
        metric, names = runs[0].metric, _names(list(groups.values()))
        recipes = [Recipe(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)]
        recipes.sort(key=lambda recipe: _order(recipe, metric))
        tables = [same_but_for_the_seed(recipe.runs[0].config) for recipe in recipes]
        fields = dict.fromkeys(field for table in tables for field in table)
        rows = {field: tuple(table.get(field) for table in tables) for field in fields}
        differences = {field: values for field, values in rows.items() if len({repr(v) for v in values}) > 1}
        return cls(metric, tuple(recipes), differences, tuple(_notes(runs, metric)))

    @property
    def claim(self) -> str:
        """One sentence: which recipe is best, by how much, and whether seeds overlap."""
        found = [(recipe, best) for recipe in self.recipes if (best := recipe.spread("best")) is not None]
        if not found:
            return "No score has been recorded yet"
        (first, best), *rest = found
        text = f"{first.name}: {best.mean:.4g} {self.metric.name}"
        if not rest:
            return text
        second, other = rest[0]
        gap, side = abs(best.mean - other.mean), "above" if self.metric.higher_is_better else "below"
        text += f", {gap:.2g} {side} {second.name}"
        overlap = best.low <= other.high and other.low <= best.high
        if min(best.seeds, other.seeds) < 2:
            return text + " (one seed each)" if best.seeds == other.seeds == 1 else text
        return text + (" (seeds overlap)" if overlap else " (seeds do not overlap)")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "metric": self.metric.name.replace(" ", "_"),
            "higher_is_better": self.metric.higher_is_better,
            "notes": list(self.notes),
            "recipes": [
                {
                    "name": recipe.name,
                    "seeds": recipe.seeds,
                    "differs_in": {field: values[i] for field, values in self.differences.items()},
                    **{
                        what: None if (spread := recipe.spread(what)) is None else spread._asdict()
                        for what in ("best", "final", "test", "speed", "parameters", "steps")
                    },
                    "runs": [run.as_dict() for run in recipe.runs],
                }
                for i, recipe in enumerate(self.recipes)
            ],
        }

    def table(self) -> "RenderableType":
        """Return a table of results and one of what differs, best recipe first."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        letters = [chr(ord("A") + i) for i in range(26)] + [str(i) for i in range(27, len(self.recipes) + 1)]
        tested = any(recipe.spread("test") is not None for recipe in self.recipes)
        speed = SPEEDS[self.recipes[0].runs[0].kind]
        columns = ["", "runs", "seeds", "steps", "best", "final", *["test"] * tested, speed, "parameters"]
        several = any(len(recipe.runs) > 1 for recipe in self.recipes)
        spread = "; mean over seeds (lowest to highest)" if several else ""
        results = Table(title=f"{self.metric.name}{spread}", title_justify="left")
        for name in columns:
            results.add_column(name, justify="left" if name in ("", "runs") else "right")
        for letter, recipe in zip(letters, self.recipes, strict=False):
            scores = [_show(recipe.spread(what), ".4f") for what in ("best", "final", *["test"] * tested)]
            results.add_row(
                letter, escape(recipe.name), ", ".join(map(str, recipe.seeds)), _show(recipe.spread("steps"), ",.0f"),
                *scores, _show(recipe.spread("speed"), ",.0f"), _parameters(recipe.spread("parameters")),
            )  # fmt: skip
        if not self.differences:
            return results
        differs = Table("differs in", title="configuration", title_justify="left")
        for letter in letters[: len(self.recipes)]:
            differs.add_column(letter, justify="right")
        for field, values in self.differences.items():
            differs.add_row(field, *("–" if value is None else escape(_value(value)) for value in values))
        return Group(results, differs)

    def plot(self, to: Path | BinaryIO) -> None:
        """Plot the curves of all recipes: lines are means over seeds, bands go from the lowest seed to the highest."""
        fig = figure(10.5, 4.2)
        left, right = fig.subplots(1, 2)
        if self.metric.higher_is_better:
            self._panel(left, lambda run: run.scores, "Return", "return", self._published)
            choices = {"chance": CHANCE}
            self._panel(
                right, lambda run: _stretches(run.curves.values("choice_accuracy")), "Right choices", "share", choices
            )
        else:
            key, unit = self.metric.key, self.metric.name
            self._panel(left, lambda run: run.scores, "Validation", unit)
            self._panel(right, lambda run: _stretches(run.curves.values(key)), "Training", unit)
        band = "; band: lowest to highest seed" if any(len(recipe.runs) > 1 for recipe in self.recipes) else ""
        headline(fig, self.claim, f"lines: means over seeds{band}" if band else "one line per run")
        save(fig, to)

    def _panel(
        self,
        axes: Any,
        points: Callable[[Overview], Points],
        title: str,
        y: str,
        bounds: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        ends, late = [], []
        for colour, recipe in zip(_colours(len(self.recipes)), self.recipes, strict=True):
            curves = [found for run in recipe.runs if (found := points(run))]
            if not curves:
                continue
            steps, mean, low, high = _over_seeds(curves)
            marker = "o" if len(steps) < 15 else ""
            axes.plot(steps, mean, color=colour, linewidth=1.6, marker=marker, markersize=3.5)
            spans = zip(steps, mean, low, high, strict=True)
            texts = [
                f"{recipe.name}, step {at:,.0f}: {value:.4g}" + f" ({least:.4g} to {most:.4g})" * (len(curves) > 1)
                for at, value, least, most in spans
            ]
            hover(axes, list(zip(steps, mean, strict=True)), texts)
            if len(curves) > 1:
                axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
            ends.append((float(mean[-1]), recipe.name, colour))
            after = steps >= steps[-1] / 20
            late += [*low[after], *high[after]]
        tidy(axes, title, "environment steps" if self.metric.higher_is_better else "step", y)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=4)
        if not ends:
            axes.text(0.5, 0.5, "nothing recorded yet", ha="center", transform=axes.transAxes, fontsize=9)
            return
        margin = (
            0.06 * (max(late) - min(late)) + 1e-3
        )  # the first 5 % of steps are left out: they would flatten the rest
        axes.set_ylim(min(late) - margin, max(late) + margin)
        for name, value in bounds.items():
            bound(axes, value, name)
        label_ends(axes, ends)

    @property
    def _published(self) -> dict[str, float]:
        """Published returns of the task, if all agents were trained on it."""
        from compressive.rl.env.rooms import HUMAN, RANDOM

        configs = [run.config for recipe in self.recipes for run in recipe.runs]
        comparable = all(isinstance(config, AgentRun) and config.task.comparable for config in configs)
        return {"human, published": HUMAN, "random policy, published": RANDOM} if comparable else {}


def _require_one(runs: Sequence[Overview], key: Callable[[Overview], str], what: str, why: str) -> None:
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(str(run.folder))
    if len(found) > 1:
        listed = "; ".join(f"{name}: {', '.join(folders)}" for name, folders in found.items())
        raise ValueError(f"runs of {len(found)} {what} ({listed}): {why}")


def _names(groups: list[list[Overview]]) -> list[str]:
    """Name a recipe after its folder, without the seed at its end if there are several; all names differ."""
    folders = [group[0].folder.resolve().name for group in groups]
    names = [
        re.sub(r"[-_.]?(seed|s)?[-_]?\d+$", "", name) or name if len(group) > 1 else name
        for name, group in zip(folders, groups, strict=True)
    ]
    return names if len(set(names)) == len(names) else [str(group[0].folder) for group in groups]


def _order(recipe: Recipe, metric: Metric) -> float:
    best = recipe.spread("best")
    return float("inf") if best is None else -best.mean if metric.higher_is_better else best.mean


def _notes(runs: Sequence[Overview], metric: Metric) -> list[str]:
    notes = []
    if len(corpora := sorted({run.corpus for run in runs})) > 1:
        notes.append(f"{', '.join(corpora)}: scores on different {'tasks' if metric.higher_is_better else 'corpora'}")
    if missing := [str(run.folder) for run in runs if run.best is None]:
        notes.append(f"no score recorded yet: {', '.join(missing)}")
    if unfinished := [f"{run.folder} ({run.state})" for run in runs if run.state not in ("finished", "release")]:
        notes.append(f"not finished: {', '.join(unfinished)}")
    return notes


def _over_seeds(curves: list[Points]) -> tuple[Any, Any, Any, Any]:
    """Return steps, and mean, lowest and highest value over curves, up to the end of the shortest one."""
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    steps = np.array([step for step, _ in curves[0] if first <= step <= last] or [last], dtype=float)
    values = np.array([np.interp(steps, *np.array(curve, dtype=float).T) for curve in curves])
    return steps, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _stretches(points: Points) -> Points:
    """Average a long curve in stretches."""
    if len(points) <= SMOOTH:
        return points
    parts = np.array_split(np.array(points, dtype=float), SMOOTH)
    return [(int(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


def _colours(count: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]


def _show(spread: Spread | None, how: str) -> str:
    return "–" if spread is None else spread.show(how)


def _parameters(spread: Spread | None) -> str:
    return "–" if spread is None else f"{spread.mean / 1e6:,.2f} M"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
