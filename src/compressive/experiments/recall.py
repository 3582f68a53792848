"""Recall: how far back a model can look, measured and beside the formula l × (n_m + c·n_cm). Ours, not the paper's.

The corpus is made for it, a stream of four kinds of bytes:

    1kkkkvvv    a pair: key k has value v; it stands in the stream once
    64 + k      the question: what is the value of k?
    80 + v      the answer, right after the question
    0           filler, everywhere else

A question comes d bytes after its pair. No other pair of its key is near enough for any model to see. Models are
trained on the next byte, all bytes alike, as `compressive train` trains. Only the byte after a question is measured:
only a model that still sees the pair can know it. Key and value share a byte because a slot of the first layer's memory
is the embedding of one byte: to bind two, a second layer is needed.

A question at offset t of its window sees its pair if d <= t + n_m + c·n_cm. So accuracy should be 1 up to the formula,
and fall to chance within one window.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from compressive.config import DataConfig, ModelConfig, RunConfig, TrainConfig, transformer
from compressive.data.corpus import write_corpus
from compressive.data.tokenizer import ByteTokenizer
from compressive.experiments.experiment import Comparison, Experiment, Measured, Row, Scale, figure_of, markdown
from compressive.plotting import INK, figure, save, tidy
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.runtime import autocast, pick_device

KEYS, VALUES = 16, 8
QUESTION, ANSWER, PAIR = 64, 80, 128
CHANCE = 1 / VALUES
RATES = (1, 2, 4, 8)
PANELS = (
    ("txl", *(f"rate{rate}" for rate in RATES)),
    (f"rate{max(RATES)}", "most-used", "max", "mean", "autoencoding"),
    ("txl", "txl-2-layers"),
)
"""Rows that are compared, with the first of them: rates, ways to compress at the highest rate, layers."""

Ints = npt.NDArray[np.int64]


class Sizes(NamedTuple):
    """The models of a scale."""

    slots: int  # of the window, of recent memory and of compressed memory
    d_model: int
    n_heads: int
    batch: int
    steps: int
    learning_rate: float
    test_bytes: int

    @property
    def reach(self) -> int:
        """The longest reach of any model: that of the highest rate, for the last byte of a window."""
        return self.slots + max(RATES) * self.slots + self.slots - 1

    @property
    def furthest(self) -> int:
        """The longest distance of a question, beyond every reach."""
        return self.reach + self.slots


SIZES: Mapping[Scale, Sizes] = {
    "tiny": Sizes(16, 128, 4, 64, 1_000, 2e-3, 500_000),
    "small": Sizes(128, 256, 4, 64, 6_000, 1e-3, 4_000_000),
    "paper": Sizes(512, 1024, 16, 32, 20_000, 3e-4, 8_000_000),
}
"""No scale is the paper's, which has no such experiment: `paper` has windows and memories of its WikiText-103 model."""


def stream(length: int, sizes: Sizes, seed: int | Sequence[int]) -> bytes:
    """Return a stream of bytes; the same for the same arguments.

    Distances are uniform in their logarithm, from 1 to `sizes.furthest`, so that models of short reach are also asked
    often enough what they can know.
    """
    rng = np.random.default_rng(seed)
    every = math.ceil(sizes.reach / KEYS)  # bytes from pair to pair, so that a key is free when it is needed
    size = length + every + sizes.furthest + 2
    data = np.zeros(size, np.uint8)
    ready = [0] * KEYS  # from where on each key may have a pair again
    starts = np.arange(0, length, every)
    places = starts + rng.integers(0, every, len(starts))
    distances = np.exp(rng.uniform(0, math.log(sizes.furthest + 1), len(starts))).astype(np.int64)
    values, choices = rng.integers(0, VALUES, len(starts)), rng.random(len(starts))
    for place, distance, value, choice in zip(
        places.tolist(), distances.tolist(), values.tolist(), choices.tolist(), strict=True
    ):
        asked = place + distance
        free = [key for key in range(KEYS) if ready[key] <= place]
        if not free or data[place] or data[asked] or data[asked + 1]:
            continue
        key = free[int(choice * len(free))]
        data[[place, asked, asked + 1]] = PAIR + VALUES * key + value, QUESTION + key, ANSWER + value
        ready[key] = max(asked + 2, place + sizes.reach)
    return data[:length].tobytes()


def questions(data: npt.NDArray[np.uint8]) -> tuple[Ints, Ints]:
    """Return where the questions of a stream (n,) are, and how far back the pair of each is.

    Questions whose pair, or whose answer, is not in the stream are left out.
    """
    last, places, distances = [-1] * KEYS, [], []
    events = np.flatnonzero((data >= PAIR) | ((data >= QUESTION) & (data < ANSWER)))
    for place, byte in zip(events.tolist(), data[events].tolist(), strict=True):
        if byte >= PAIR:
            last[(byte - PAIR) // VALUES] = place
        elif last[byte - QUESTION] >= 0 and place + 1 < len(data):
            places.append(place)
            distances.append(place - last[byte - QUESTION])
    return np.array(places, np.int64), np.array(distances, np.int64)


class Answers(NamedTuple):
    """One entry per question."""

    distance: Ints
    offset: Ints  # of the question in its window
    right: npt.NDArray[np.bool_]


@torch.no_grad()
def ask(run: Run, sizes: Sizes, streams: int) -> Answers:
    """Read the test split in streams, memory carried; return the answers once every memory is full."""
    trained = Trained.load(run, "last")
    device, config = pick_device(run.config.train.device), transformer(trained.config)
    model, window = trained.model(config, device), config.window
    data = np.asarray(run.corpus().split("test"))
    length = len(data) // streams // window * window
    rows = np.stack([data[i * length : (i + 1) * length] for i in range(streams)])
    best = np.empty_like(rows)
    memory = model.initial_memory(streams)
    for start in range(0, length, window):
        tokens = torch.from_numpy(rows[:, start : start + window].astype(np.int64)).to(device)
        with autocast(device, run.config.train.precision):
            out = model(tokens, memory)
        assert out.logits is not None
        memory, best[:, start : start + window] = out.memory, out.logits.argmax(dim=-1).cpu().numpy()
    answers = []
    for row, said in zip(rows, best, strict=True):
        places, distances = questions(row)
        counts = places >= sizes.furthest
        places, distances = places[counts], distances[counts]
        answers.append((distances, places % window, said[places] == row[places + 1]))
    return Answers(*(np.concatenate(parts) for parts in zip(*answers, strict=True)))


def summarise(answers: Answers, config: ModelConfig, furthest: int) -> dict[str, Any]:
    """Return accuracy by distance and by the place where the pair is, and the measured reach.

    The measured reach is the number of distances that a model which either knows or guesses would have to know to be
    right as often, less (n_s - 1) / 2, which the window adds on average. A model that knows all it sees has the
    formula's.
    """
    distance, offset, right = answers
    recent, seen, window = config.memory_sizes[0], config.memory_span, config.window
    width = max(1, window // 2)
    curve = [
        {"first": first, "last": first + width - 1, **_share(right[(distance >= first) & (distance < first + width)])}
        for first in range(1, furthest - width + 2, width)
    ]
    known = sum(width * (part["accuracy"] - CHANCE) / (1 - CHANCE) for part in curve if part["questions"])
    before_window = distance - offset
    return {
        "formula": config.temporal_range,
        "reach": known - (window - 1) / 2,
        "uncompressed": _share(right[before_window <= recent]),
        "compressed": _share(right[(before_window > recent) & (before_window <= seen)]),
        "gone": _share(right[before_window > seen]),
        "curve": curve,
    }


def _share(right: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """The share of right answers, with its standard error; None where nothing was asked."""
    count = len(right)
    if not count:
        return {"accuracy": None, "error": None, "questions": 0}
    share = float(right.mean())
    return {"accuracy": share, "error": math.sqrt(share * (1 - share) / count), "questions": count}


class Recall(Experiment):
    """Accuracy over distance: rates at equal slots, other ways to compress at the highest rate, two layers."""

    name = "recall"
    source = "ours"
    claim = "A layer looks back n_m + c·n_cm tokens, l layers l times as far."
    seeds: ClassVar[Mapping[Scale, tuple[int, ...]]] = {"tiny": (0, 1), "small": (0, 1, 2), "paper": (0,)}

    def rows(self, scale: Scale) -> Sequence[Row]:
        """Return TransformerXL, the rates, the other compressors, and a TransformerXL of two layers."""
        base = _base(scale)
        model = transformer(base.model)
        slots, highest = model.window, max(RATES)

        def row(name: str, title: str, **changes: Any) -> Row:
            return Row(f"recall-{name}", title, dataclasses.replace(base, model=dataclasses.replace(model, **changes)))

        recent: dict[str, Any] = {"memory_size": 2 * slots, "compressed_size": 0}
        return [
            row("txl", "TransformerXL", **recent),
            *(row(f"rate{rate}", f"rate {rate}", compression_rate=rate) for rate in RATES),
            row("mean", f"rate {highest}, mean", compression="mean"),
            row("max", f"rate {highest}, max", compression="max"),
            row("most-used", f"rate {highest}, most-used", compression="most_used"),
            row("autoencoding", f"rate {highest}, conv auto-encoding", compression_loss="autoencoding"),
            row("txl-2-layers", "TransformerXL, 2 layers", n_layers=2, **recent),
        ]

    def prepare(self, scale: Scale, data_dir: Path) -> None:
        """Write the stream, as a corpus of bytes, unless it is there."""
        base, sizes = _base(scale), SIZES[scale]
        folder = data_dir / base.data.corpus
        settings = {"sizes": str(tuple(sizes))}
        if (folder / "manifest.json").exists():
            kept = json.loads((folder / "manifest.json").read_text("utf-8")).get("settings")
            if kept != settings:
                raise ValueError(f"{folder} has {kept}: expected {settings}; remove the folder, to make it anew")
            return
        window = base.train.batch * sizes.slots
        lengths = {"train": (base.train.steps + 1) * window, "valid": 10 * window, "test": sizes.test_bytes}
        splits = {name: [stream(n, sizes, [0, i])] for i, (name, n) in enumerate(lengths.items())}
        write_corpus(folder, folder.name, ByteTokenizer(), splits, {}, settings=settings)

    def measure(self, run: Run, scale: Scale) -> dict[str, Any]:
        """Answer the questions of the test split."""
        answers = ask(run, SIZES[scale], streams=run.config.train.batch)
        return summarise(answers, transformer(run.config.model), SIZES[scale].furthest)

    def table(self, rows: Sequence[Measured]) -> str:
        """Return reach by the formula and measured, and accuracy by where the pair is."""
        heading = ["model", "memory slots", "formula", "measured reach", "uncompressed", "compressed", "gone"]
        lines = []
        for found in rows:
            model = transformer(found.row.config.model)
            compressed = f" + {model.compressed_sizes[0]} at rate {model.compression_rates[0]}"
            lines.append([
                found.row.title, f"{model.memory_sizes[0]}{compressed * any(model.compressed_sizes)}",
                f"{model.temporal_range:,}", figure_of(found.values("reach"), 1),
                *(_accuracy(found, place) for place in ("uncompressed", "compressed", "gone")),
            ])  # fmt: skip
        return markdown(heading, lines)

    def verdicts(self, rows: Sequence[Measured]) -> Sequence[str]:
        """Compare the measured reach of every row with that of the first row of its panel, by the panel's spread."""
        found, sentences = _by_name(rows), []
        for names in PANELS:
            first, *others = (found[name] for name in names)
            reaches = [row.values("reach") for row in (first, *others)]
            sentences += [
                Comparison.of(row.values("reach"), *reaches).sentence(
                    row.row.title, first.row.title, "bytes of reach", 1
                )
                for row in others
            ]
        return sentences

    def plot(self, rows: Sequence[Measured], to: Path) -> None:
        """Plot accuracy over distance: the rates, the ways to compress at the highest rate, and one and two layers."""
        found = {name: row for name, row in _by_name(rows).items() if row.runs}
        fig = figure(14, 4.4)
        rates, compressors, layers = PANELS
        txl, highest = _reach(found, "txl"), _reach(found, rates[-1])
        titles = (
            f"TransformerXL reaches {txl} bytes, rate {max(RATES)} {highest}",
            f"At rate {max(RATES)} conv reaches {highest} bytes,\nby auto-encoding {_reach(found, compressors[-1])}",
            f"One layer reaches {txl} bytes,\ntwo reach {_reach(found, layers[-1])}",
        )
        places = fig.subplots(1, len(titles), sharey=True, width_ratios=(1.35, 1.2, 1))
        for axes, title, names in zip(places, titles, PANELS, strict=True):
            shown = {name: found[name] for name in names if name in found}
            for name, row in shown.items():
                _curve(axes, row, COLOURS[name], 4.5 if name == "txl" else 2)  # others may lie on top of it
            last = max((row.values("curve")[0][-1]["last"] for row in shown.values()), default=1)
            axes.hlines(CHANCE, 0, last, color=INK, linewidth=0.8, linestyle="--")
            tidy(axes, title, "bytes from pair to question", "share of right answers" if axes is places[0] else "")
            axes.set_xlim(0, last + 1)
            axes.set_ylim(0, TOP)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
            _formulas(axes, shown)
        places[0].text(1, CHANCE - 0.02, "chance", fontsize=8, color=INK, va="top")
        _plateaus(places[1], {name: found[name] for name in compressors if name in found})
        save(fig, to)


COLOURS = {
    "txl": "#2f6690", "rate1": "#e9b44c", "rate2": "#dd8a3e", "rate4": "#c8553d", "rate8": "#7d2a1b",
    "most-used": "#6a4c93", "max": "#4f7a4a", "mean": "#8a9ba8", "autoencoding": "#b8860b", "txl-2-layers": "#63a4d4",
}  # fmt: skip
"""One colour per row."""
TOP = 1.28
"""Upper end of the axis, with space for names above 1."""


def _base(scale: Scale) -> RunConfig:
    """The model of the highest rate, which every row is a change of."""
    slots, width, heads, batch, steps, rate, _ = SIZES[scale]
    model = ModelConfig(
        n_layers=1, d_model=width, n_heads=heads, d_ff=2 * width, window=slots, memory_size=slots,
        compressed_size=slots, compression_rate=max(RATES),
    )  # fmt: skip
    warmup = steps // 20
    train = TrainConfig(
        steps=steps, batch=batch, learning_rate=rate, warmup_steps=warmup, decay_steps=steps - warmup, clip=1.0,
        update_every=1, eval_every=0, sample_every=0,
    )  # fmt: skip
    return RunConfig(model, DataConfig(f"recall-{scale}"), train)


def _by_name(rows: Sequence[Measured]) -> dict[str, Measured]:
    return {row.row.name.removeprefix("recall-"): row for row in rows}


def _accuracy(found: Measured, place: str) -> str:
    """The accuracy in a place, over seeds; a dash where the model has no such place."""
    values = found.values(place, "accuracy")
    return "–" if None in values else figure_of(values, 3)


def _reach(found: Mapping[str, Measured], name: str) -> str:
    """The mean of the measured reach, for a title."""
    return f"{statistics.mean(found[name].values('reach')):,.0f}" if name in found else "–"


def _curve(axes: Any, row: Measured, colour: str, linewidth: float) -> None:
    """Draw the mean over seeds; the band covers every seed with one standard error of its questions."""
    curves = row.values("curve")
    middle = [(part["first"] + part["last"]) / 2 for part in curves[0]]
    shares = np.array([[part["accuracy"] for part in curve] for curve in curves], float)
    errors = np.array([[part["error"] for part in curve] for curve in curves], float)
    axes.plot(middle, shares.mean(axis=0), color=colour, linewidth=linewidth)
    axes.fill_between(middle, (shares - errors).min(axis=0), (shares + errors).max(axis=0), color=colour, alpha=0.2,
                      linewidth=0)  # fmt: skip


def _formulas(axes: Any, shown: Mapping[str, Measured]) -> None:
    """Mark the formula's reach of every row, rows with the same reach together, and name them there."""
    together: dict[int, list[str]] = {}
    for name, row in shown.items():
        together.setdefault(transformer(row.row.config.model).temporal_range, []).append(name)
    for place, (formula, names) in enumerate(sorted(together.items())):
        colour = COLOURS[names[0]]
        axes.axvline(formula, ymax=1.04 / TOP, color=colour, linewidth=1, linestyle=":")
        text = "\n".join([*(shown[name].row.title for name in names), f"formula {formula:,}"])
        text = text if len(names) < 3 else f"formula {formula:,}"
        axes.text(formula, 1.05, text, fontsize=7.5, color=colour, va="bottom", ha="center" if place else "right")


def _plateaus(axes: Any, shown: Mapping[str, Measured]) -> None:
    """Name curves of the same reach at their right, at the height that they have in compressed memory."""
    heights = {name: statistics.mean(row.values("compressed", "accuracy")) for name, row in shown.items()}
    right = axes.get_xlim()[1]
    axes.set_xticks([tick for tick in axes.get_xticks() if tick < right])
    axes.set_xlim(right=1.4 * right)
    above = math.inf
    for name, height in sorted(heights.items(), key=lambda item: -item[1]):
        above = min(height, above - 0.07)
        title = (
            shown[name].row.title.removeprefix(f"rate {max(RATES)}, ").replace(f"rate {max(RATES)}", "conv attention")
        )
        axes.text(1.02 * right, above, f"{title} {height:.2f}", fontsize=7.5, color=COLOURS[name], va="center")
