"""Evaluate one checkpoint with one memory or several: supplement B's tables, and a plot."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compressive.config import EmptyMemory, PerLayer, Precision, transformer
from compressive.distributed import World
from compressive.evaluation.dynamic import dynamic_score
from compressive.evaluation.metrics import Metrics, Split, summarise
from compressive.evaluation.score import lanes_for, score
from compressive.plotting import require_matplotlib
from compressive.runs.trained import Setting, Trained

if TYPE_CHECKING:
    from compressive.data.corpus import Corpus


@dataclass(frozen=True)
class Reading:
    """How a text is read."""

    split: Split = "test"
    lanes: int = 0
    """Stretches read side by side; 0 takes one, or some for a long text."""
    limit: int | None = None
    """Score so many tokens only, from the beginning."""
    precision: Precision = "fp32"
    dynamic: float | None = None
    """Learning rate of dynamic evaluation; None for none."""
    clip: float = 0.1
    """Largest gradient norm of dynamic evaluation."""

    def __post_init__(self) -> None:
        if self.split not in ("train", "valid", "test"):
            raise ValueError(f"split={self.split!r}: expected one of train, valid, test")
        if self.lanes < 0:
            raise ValueError(f"lanes={self.lanes}: expected at least 1, or 0 to choose by the length of the text")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit}: expected at least 1; leave it out to score the whole split")


@dataclass(frozen=True)
class Result:
    """What one evaluation found."""

    setting: Setting
    metrics: Metrics
    lanes: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """How fast it went."""
        return self.metrics.tokens / max(self.seconds, 1e-9)

    @property
    def headline(self) -> float:
        """The figure to compare by; lower is better."""
        value: float = getattr(self.metrics, self.metrics.headline)
        return value

    def as_dict(self) -> dict[str, Any]:
        """Write it as plain values."""
        names = ("memory_size", "compressed_size", "empty_memory")  # of which a baseline has none
        return {
            **{name: getattr(self.setting.config, name, None) for name in names},
            "empty_memory_reason": self.setting.reason,
            **dataclasses.asdict(self.metrics),
            "lanes": self.lanes,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def combinations(
    trained: Trained,
    memory_size: str | None = None,
    compressed_size: str | None = None,
    empty_memory: EmptyMemory | Literal["auto"] = "auto",
) -> list[Setting]:
    """Every combination of the sizes in two comma lists; no list stands for the size in training."""
    return [
        trained.setting(memory, compressed, empty_memory)
        for memory in parse_sizes("memory_size", memory_size)
        for compressed in parse_sizes("compressed_size", compressed_size)
    ]


def parse_sizes(name: str, text: str | None) -> list[int] | list[None]:
    """Read a comma list of sizes, each once."""
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{name}={text!r}: expected whole numbers of at least 0, such as 512 or 512,1024,2048")
    return list(dict.fromkeys(int(part) for part in parts))


def sweep(
    trained: Trained,
    corpus: "Corpus",
    settings: list[Setting],
    reading: Reading,
    world: World | None = None,
    progress: Callable[[Setting, int, int], None] | None = None,
) -> Iterator[Result]:
    """Evaluate with one memory after the other; `progress` hears of each how many tokens are read, of how many."""
    if corpus.vocab_size > trained.config.vocab_size:
        raise ValueError(
            f"vocab_size={corpus.vocab_size} of {corpus.name}: expected at most the model's, "
            f"{trained.config.vocab_size}; the corpus has changed since training: prepare it as it was, or give the "
            "--data-dir that was trained from"
        )
    tokens = corpus.split(reading.split)
    if len(tokens) == 0:
        raise ValueError(f"split={reading.split!r} of {corpus.name} holds no tokens; choose another split")
    world = world or World()
    if reading.dynamic is not None and world.size > 1:
        raise ValueError(f"dynamic evaluation trains one model as it reads: expected one process, not {world.size}")
    lanes = max(reading.lanes or lanes_for(min(len(tokens), reading.limit or len(tokens))), world.size)
    for setting in settings:
        model = trained.model(setting.config, world.device)

        def tell(done: int, total: int, setting: Setting = setting) -> None:
            if progress is not None:
                progress(setting, done, total)

        how: dict[str, Any] = {"lanes": lanes, "precision": reading.precision, "limit": reading.limit, "progress": tell}
        how["clips"] = corpus.starts(reading.split)
        began = time.monotonic()
        if reading.dynamic is None:
            nll = score(model, tokens, world=world, **how)
        else:
            nll = dynamic_score(model, tokens, learning_rate=reading.dynamic, clip=reading.clip, **how)
        seconds = time.monotonic() - began
        yield Result(setting, summarise(nll, corpus, reading.split), lanes, seconds)


def plot(results: list[Result], path: Path) -> None:
    """Draw the figure by compressed size, one line per memory size; by memory size where nothing else varies."""
    figure_type = require_matplotlib()
    figure = figure_type(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    configs = [transformer(result.setting.config) for result in results]
    sizes = [(slots(config.memory_size), slots(config.compressed_size)) for config in configs]
    kinds, across = ("memory", "compressed"), 1  # which of the two sizes the horizontal axis shows
    if len({compressed for _, compressed in sizes}) == 1 and len({memory for memory, _ in sizes}) > 1:
        across = 0
    for line in sorted({size[1 - across] for size in sizes}):
        points = sorted(
            (size[across], r.headline) for size, r in zip(sizes, results, strict=True) if size[1 - across] == line
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{kinds[1 - across]} size {line:g}")
    axes.set_xlabel(f"{kinds[across]} size (slots per layer)")
    axes.set_ylabel(results[0].metrics.headline.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def slots(size: PerLayer) -> float:
    """Slots per layer, on average where layers differ."""
    return size if isinstance(size, int) else sum(size) / len(size)
