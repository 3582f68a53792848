"""Evaluate a checkpoint with one or several memory sizes: the tables of supplement B, and a plot."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from compressive.config import AnyModelConfig, EmptyMemory, ModelConfig, PerLayer, Precision, transformer
from compressive.distributed import World
from compressive.evaluation.dynamic import dynamic_score
from compressive.evaluation.metrics import Metrics, Split, summarise
from compressive.evaluation.score import Nats, require_memory, score, streams_for
from compressive.plotting import PALETTE, figure, headline, hover, label_ends, save, tidy
from compressive.runs.trained import EvalConfig, Trained

if TYPE_CHECKING:
    from compressive.data.corpus import Corpus


COMPARED = 100_000
"""Tokens that are read in bf16 and in fp32 to compare the two."""


@dataclass(frozen=True)
class Reading:
    """Which text is scored, and how it is read."""

    split: Split = "test"
    streams: int = 0
    """Streams that the text is cut into; 0 chooses by its length, see `streams_for`."""
    limit: int | None = None
    """Score only the first `limit` tokens."""
    precision: Precision = "fp32"
    dynamic: float | None = None
    """Learning rate of dynamic evaluation; None switches it off."""
    clip: float = 0.1
    """Gradient norm at which dynamic evaluation clips."""

    def __post_init__(self) -> None:
        if self.split not in ("train", "valid", "test"):
            raise ValueError(f"split={self.split!r}: expected one of train, valid, test")
        if self.streams < 0:
            raise ValueError(f"streams={self.streams}: expected at least 1, or 0 to choose by the length of the text")
        if self.limit is not None and self.limit < 2:  # the first token is not predicted
            raise ValueError(f"limit={self.limit}: expected at least 2; leave it out to score the whole split")


@dataclass(frozen=True)
class Result:
    """The result of one evaluation."""

    config: EvalConfig
    metrics: Metrics
    streams: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens scored per second."""
        return self.metrics.tokens / max(self.seconds, 1e-9)

    @property
    def headline(self) -> float:
        """Value of the main metric; lower is better."""
        value: float = getattr(self.metrics, self.metrics.headline)
        return value

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names = ("memory_size", "compressed_size", "empty_memory")  # a WaveNet has none of them
        return {
            **{name: getattr(self.config.model, name, None) for name in names},
            "empty_memory_reason": self.config.reason,
            **dataclasses.asdict(self.metrics),
            "streams": self.streams,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def combinations(
    trained: Trained,
    memory_size: str | None = None,
    compressed_size: str | None = None,
    empty_memory: EmptyMemory | Literal["auto"] = "auto",
) -> list[EvalConfig]:
    """Return every combination of the sizes in two comma-separated lists; None stands for the size in training."""
    return [
        trained.eval_config(memory, compressed, empty_memory)
        for memory in parse_sizes("memory_size", memory_size)
        for compressed in parse_sizes("compressed_size", compressed_size)
    ]


def parse_sizes(name: str, text: str | None) -> list[int] | list[None]:
    """Parse a comma-separated list of sizes, without duplicates."""
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{name}={text!r}: expected whole numbers of at least 0, such as 512 or 512,1024,2048")
    return list(dict.fromkeys(int(part) for part in parts))


def sweep(
    trained: Trained,
    corpus: "Corpus",
    configs: list[EvalConfig],
    reading: Reading,
    world: World | None = None,
    progress: Callable[[EvalConfig, int, int], None] | None = None,
    scored: Callable[[Nats], object] | None = None,
) -> Iterator[Result]:
    """Evaluate with each configuration in turn; `progress` is called with it, the tokens read and their total.

    `scored` is called with the nats of every token, (n,), before their result is yielded.

    Raises ValueError, before anything is read, if the corpus does not fit the model, if the text has fewer windows than
    streams are asked for, if a memory is larger than the device's, or if dynamic evaluation is asked of several
    processes.
    """
    if corpus.vocab_size > trained.config.vocab_size:
        raise ValueError(
            f"vocab_size={corpus.vocab_size} of {corpus.name}: expected at most the model's, "
            f"{trained.config.vocab_size}; the corpus has changed since training: prepare it as before, or give the "
            "--data-dir used in training"
        )
    tokens = corpus.split(reading.split)
    if len(tokens) == 0:
        raise ValueError(f"split={reading.split!r} of {corpus.name} holds no tokens; choose another split")
    world = world or World()
    if reading.dynamic is not None and world.size > 1:
        raise ValueError(
            f"dynamic evaluation updates the model: expected one process, not {world.size}; run it without torchrun"
        )
    size, window = min(len(tokens), reading.limit or len(tokens)), trained.config.window
    if reading.streams > (most := max(1, size // window)):
        raise ValueError(
            f"streams={reading.streams}: expected at most {most}, as {size:,} tokens have no more windows of {window}; "
            "give fewer, or leave it out"
        )
    streams = max(reading.streams or streams_for(size), world.size)
    for config in configs:
        require_memory(config.model, -(-streams // world.size), world.device)

    def results() -> Iterator[Result]:
        for config in configs:
            trains = reading.dynamic is not None
            model = trained.model(config.model if trains else _without_loss(config.model), world.device)

            def report(done: int, total: int, config: EvalConfig = config) -> None:
                if progress is not None:
                    progress(config, done, total)

            options: dict[str, Any] = {
                "streams": streams,
                "precision": reading.precision,
                "limit": reading.limit,
                "progress": report,
                "clips": corpus.starts(reading.split),
            }
            began = time.monotonic()
            if reading.dynamic is None:
                nll = score(model, tokens, world=world, **options)
            else:
                nll = dynamic_score(model, tokens, learning_rate=reading.dynamic, clip=reading.clip, **options)
            seconds = time.monotonic() - began
            if scored is not None:
                scored(nll)
            yield Result(config, summarise(nll, corpus, reading.split), streams, seconds)

    return results()


def rounding(
    trained: Trained,
    corpus: "Corpus",
    config: EvalConfig,
    reading: Reading,
    world: World,
    progress: Callable[[EvalConfig, int, int], None] | None = None,
) -> float:
    """Return how many bits per token bf16 costs against fp32, on the first `COMPARED` tokens of a reading.

    `progress` is as in `sweep`, for one precision after the other.
    """
    limit = min(COMPARED, reading.limit or COMPARED, len(corpus.split(reading.split)))
    streams = min(reading.streams or streams_for(limit), max(1, limit // trained.config.window))
    first = dataclasses.replace(reading, limit=limit, streams=streams)
    half, full = (
        next(sweep(trained, corpus, [config], dataclasses.replace(first, precision=precision), world, progress)).metrics
        for precision in get_args(Precision)[::-1]
    )
    return half.bits_per_token - full.bits_per_token


def _without_loss(config: AnyModelConfig) -> AnyModelConfig:
    """The same model without a compression loss, which scoring does not need: a tenth of the time on a CPU."""
    return dataclasses.replace(config, compression_loss="none") if isinstance(config, ModelConfig) else config


def plot(results: list[Result], path: Path) -> None:
    """Plot the main metric over compressed size, one line per memory size; over memory size if only that varies."""
    fig = figure(7, 4)
    axes = fig.subplots()
    configs = [transformer(result.config.model) for result in results]
    sizes = [(slots(config.memory_size), slots(config.compressed_size)) for config in configs]
    kinds, across = ("memory", "compressed"), 1  # index of the size on the x axis
    if len({compressed for _, compressed in sizes}) == 1 and len({memory for memory, _ in sizes}) > 1:
        across = 0
    metric, ends = results[0].metrics.headline.replace("_", " "), []
    for i, line in enumerate(sorted({size[1 - across] for size in sizes})):
        points = sorted(
            (size[across], r.headline) for size, r in zip(sizes, results, strict=True) if size[1 - across] == line
        )
        colour, label = PALETTE[i % len(PALETTE)], f"{kinds[1 - across]} size {line:g}"
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=label)
        hover(axes, points, [f"{label}, {kinds[across]} size {size:g}: {value:.4f} {metric}" for size, value in points])
        ends.append((points[-1][1], label, colour))
    tidy(axes, "", f"{kinds[across]} size (slots per layer)", metric)
    label_ends(axes, ends)
    best = min(range(len(results)), key=lambda i: results[i].headline)
    memory, compressed = sizes[best]
    claim = f"Best: {results[best].headline:.4f} {metric} with {memory:g} recent and {compressed:g} compressed slots"
    headline(fig, claim, f"{results[0].metrics.tokens:,} tokens; lower is better")
    save(fig, path)


def slots(size: PerLayer) -> float:
    """Return slots per layer, averaged if layers differ."""
    return size if isinstance(size, int) else sum(size) / len(size)
