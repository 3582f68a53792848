"""`compressive evaluate RUN`: bits per character, perplexity, other memory sizes.

compressive evaluate runs/enwik8 --split valid --compressed-size 512,1024,2048,3072
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from compressive.cli import run
from compressive.config import AnyModelConfig, ModelConfig, PerLayer, Precision, WaveNetConfig, transformer

if TYPE_CHECKING:
    from rich.table import Table

    from compressive.distributed import World
    from compressive.evaluation.sweep import Result


@dataclass(frozen=True)
class Evaluate:
    """Score a run's model on a split of its corpus."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    split: Literal["train", "valid", "test"] = "test"
    """Which part of the corpus to score."""
    which: Literal["best", "last"] = "best"
    """Which checkpoint: the best on the validation split, or the last."""
    memory_size: str | None = None
    """Slots of recent memory per layer, if not as in training; several with commas make a sweep."""
    compressed_size: str | None = None
    """Slots of compressed memory per layer, likewise: 512,1024,2048. Every combination is evaluated."""
    empty_memory: Literal["auto", "zeros", "masked"] = "auto"
    """Slots not yet written: seen as zeros, or masked; auto: as in training, but masked where memory is larger."""
    lanes: int = 0
    """Stretches of the text read side by side, each from empty memory; 0: 1, or 16 for 2,000,000 tokens and more."""
    limit: int | None = None
    """Score only so many tokens from the beginning of the split."""
    dynamic: bool = False
    """Dynamic evaluation: a copy of the model goes on training on each window after scoring it."""
    dynamic_learning_rate: float = 3e-5
    """Learning rate of dynamic evaluation."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one."""
    precision: Precision = "fp32"
    """Arithmetic of the matrix products."""
    json: bool = False
    """Print one JSON object and nothing else."""
    plot: Path | None = None
    """Where to draw a sweep, if not in the run's folder."""
    data_dir: Path | None = None
    """Folder that holds prepared corpora, if not the one trained from."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the options, then evaluate."""
    return run(
        evaluate,
        Evaluate,
        arguments,
        prog,
        "Score every token of a split exactly once, memory carried, and save the figures in RUN/evaluation/.",
    )


def evaluate(options: Evaluate) -> int:
    """Evaluate in this process, or in all those that torchrun has started."""
    from compressive.distributed import join

    with join(options.device) as world:
        return _evaluate(options, world)


def _evaluate(options: Evaluate, world: "World") -> int:
    """Evaluate with every memory that was asked for; print and save what comes out."""
    from rich.console import Console
    from rich.progress import Progress

    from compressive.evaluation.sweep import Reading, Result, combinations, plot, sweep
    from compressive.plotting import PlotError, require_matplotlib
    from compressive.runs.run import Run
    from compressive.runs.trained import Setting, Trained
    from compressive.speech.floors import floors

    source = Run.open(options.run)
    reading = Reading(
        options.split,
        options.lanes,
        options.limit,
        options.precision,
        options.dynamic_learning_rate if options.dynamic else None,
        source.config.train.clip,
    )
    trained = Trained.load(source, options.which)
    settings = combinations(trained, options.memory_size, options.compressed_size, options.empty_memory)
    corpus = source.corpus(options.data_dir)
    if options.plot is not None:
        require_matplotlib()  # better now than after the work

    about: dict[str, Any] = {
        "run": source.folder.resolve().name,
        "corpus": corpus.name,
        "corpus_note": corpus.manifest.note or None,
        "split": options.split,
        "checkpoint": options.which,
        "step": trained.step,
        "precision": options.precision,
        "device": str(world.device),
        "processes": world.size,
        "dynamic_learning_rate": reading.dynamic,
    }
    if corpus.tokenizer.of_sound and world.is_first:
        about["floors_bits_per_sample"] = floors(corpus, options.split, options.limit)
    path = source.folder / "evaluation" / f"{_name(options)}.json"
    results: list[Result] = []
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not (errors.is_terminal and world.is_first)) as bar:
        task = bar.add_task("")

        def progress(setting: Setting, done: int, total: int) -> None:
            number = f"{len(results) + 1} of {len(settings)}, " if len(settings) > 1 else ""
            bar.update(task, description=f"{number}{_memory(setting.config)}", completed=done, total=total)

        for result in sweep(trained, corpus, settings, reading, world, progress):
            results.append(result)
            report = _report(about, results, is_sweep=len(settings) > 1)
            if world.is_first:
                _write(path, report)  # after each, so that a long sweep that fails keeps what it has
    if not world.is_first:
        return 0

    drawn = None
    if len(results) > 1 or options.plot is not None:
        try:
            plot(results, drawn := options.plot or path.with_suffix(".png"))
        except PlotError as error:
            drawn = None
            errors.print(f"no plot: {error}", markup=False, highlight=False, soft_wrap=True)

    if options.json:
        print(report)
        return 0
    console = Console()
    console.print(_sweep_table(about, results) if len(results) > 1 else _table(about, results[0]))
    notes = [f"written to {written}" for written in (path, drawn) if written is not None]
    if len(results) > 1 and options.split == "test":
        notes.append("sizes chosen on the test split are fitted to it: choose them with --split valid")
    if len(results) > 1 and results[0].metrics.not_comparable is not None:
        notes.append(f"not comparable: {results[0].metrics.not_comparable}")
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    return 0


def _table(about: dict[str, Any], result: "Result") -> "Table":
    """Show one evaluation, the figure that fits the corpus first."""
    from rich.table import Table

    metrics, config = result.metrics, result.setting.config
    figures = {
        "bits_per_sample": f"{metrics.bits_per_sample:.4f}, {metrics.nats_per_sample:.4f} nats"
        if metrics.bits_per_sample is not None
        else None,
        "bits_per_character": f"{metrics.bits_per_character:.4f}" if metrics.bits_per_character is not None else None,
        "word_perplexity": f"{metrics.word_perplexity:,.3f}, over {metrics.words:,} {metrics.words_are} words"
        if metrics.word_perplexity is not None
        else None,
        "perplexity": f"{metrics.perplexity:,.3f} per token" if metrics.bits_per_sample is None else None,
        "bits_per_byte": f"{metrics.bits_per_byte:.4f}" if metrics.bits_per_byte is not None else None,
    }
    order = sorted(figures, key=lambda name: name != metrics.headline)
    table = Table(show_header=False)
    for name in order:
        if (figure := figures[name]) is not None:
            table.add_row(name.replace("_", " "), figure, style="bold" if name == metrics.headline else None)
    for name, bits in about.get("floors_bits_per_sample", {}).items():
        table.add_row(f"  floor: {name}", f"{bits:.4f}")
    if metrics.not_comparable is not None:
        table.add_row("not comparable", metrics.not_comparable, style="red")
    for bucket in metrics.buckets:
        perplexity = "–" if bucket.perplexity is None else f"{bucket.perplexity:,.1f}"
        table.add_row(f"  in training {bucket.name} times", f"{perplexity}, {bucket.tokens:,} tokens")
    table.add_section()
    part = "" if metrics.whole_split else "the first "
    table.add_row("scored", f"{about['corpus']} {about['split']}, {part}{metrics.tokens:,} tokens")
    if about["corpus_note"] is not None:
        table.add_row("note", about["corpus_note"])
    table.add_row("memory", _memory(config))
    if isinstance(config, ModelConfig):
        table.add_row("empty memory", f"{config.empty_memory} ({result.setting.reason})")
    table.add_row("checkpoint", f"{about['checkpoint']}, step {about['step']:,}")
    if about["dynamic_learning_rate"] is not None:
        table.add_row("dynamic", f"learning rate {about['dynamic_learning_rate']:g}")
    lanes = "1 lane" if result.lanes == 1 else f"{result.lanes} lanes"
    table.add_row("time", f"{result.seconds:.1f} s, {result.tokens_per_second:,.0f} tokens/s, {lanes}")
    table.add_row("arithmetic", f"{about['precision']} on {about['device']}")
    return table


def _sweep_table(about: dict[str, Any], results: list["Result"]) -> "Table":
    """Show a sweep, one line per memory, the best in bold."""
    from rich.table import Table

    first, best = results[0].metrics, _best(results)
    part = "" if first.whole_split else "the first "
    table = Table(
        title=f"{about['corpus']} {about['split']}, {part}{first.tokens:,} tokens; {about['checkpoint']} checkpoint, "
        f"step {about['step']:,}" + ("; dynamic" if about["dynamic_learning_rate"] is not None else ""),
    )
    for name in ("memory", "compressed", "empty", first.headline.replace("_", " "), "tokens/s"):
        table.add_column(name, justify="left" if name == "empty" else "right")
    for i, result in enumerate(results):
        config = transformer(result.setting.config)
        table.add_row(
            _size(config.memory_size),
            _size(config.compressed_size),
            config.empty_memory,
            f"{result.headline:,.4f}",
            f"{result.tokens_per_second:,.0f}",
            style="bold" if i == best else None,
        )
    return table


def _memory(config: AnyModelConfig) -> str:
    if isinstance(config, WaveNetConfig):
        return f"{config.receptive_field - 1:,} samples, the receptive field"
    return f"{_size(config.memory_size)} recent, {_size(config.compressed_size)} compressed"


def _size(size: PerLayer) -> str:
    return str(size) if isinstance(size, int) else "/".join(map(str, size))


def _name(options: Evaluate) -> str:
    """Name the result's file after the split and all that differs from the plain evaluation of it."""
    differs = {
        f"m{options.memory_size}": options.memory_size is not None,
        f"c{options.compressed_size}": options.compressed_size is not None,
        options.empty_memory: options.empty_memory != "auto",
        "dynamic": options.dynamic,
        f"first{options.limit}": options.limit is not None,
        f"lanes{options.lanes}": options.lanes > 0,
        options.precision: options.precision != "fp32",
        options.which: options.which != "best",
    }
    parts = [options.split, *(name for name, holds in differs.items() if holds)]
    return "-".join(parts).replace(" ", "").replace(",", "_")


def _report(about: dict[str, Any], results: list["Result"], is_sweep: bool) -> str:
    """Write one evaluation as one flat JSON object, a sweep as an object that lists them."""
    found = [about | result.as_dict() for result in results]
    several = {"metric": results[0].metrics.headline, "best": _best(results), "results": found}
    return json.dumps(_plain(several if is_sweep else found[0]), indent=1, allow_nan=False)


def _best(results: list["Result"]) -> int:
    """Which of them has the lowest figure."""
    return min(range(len(results)), key=lambda i: (math.isnan(results[i].headline), results[i].headline))


def _plain(value: Any) -> Any:
    """Replace what JSON has no word for: numbers that are none become null."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text + "\n", "utf-8")
    aside.replace(path)
