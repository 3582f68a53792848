"""`compressive evaluate RUN`: bits per character or perplexity of a run, with any memory sizes.

compressive evaluate runs/enwik8 --split valid --compressed-size 512,1024,2048,3072
compressive evaluate enwik8-small --text notes.txt
compressive evaluate runs/ours --against runs/txl
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from compressive.cli import run
from compressive.config import AnyModelConfig, ModelConfig, PerLayer, Precision, WaveNetConfig, transformer

if TYPE_CHECKING:
    from rich.table import Table

    from compressive.data.corpus import Corpus
    from compressive.distributed import World
    from compressive.evaluation.score import Nats
    from compressive.evaluation.sweep import Result
    from compressive.runs.run import Run
    from compressive.runs.trained import Trained


@dataclass(frozen=True)
class Evaluate:
    """Score a run's model on a split of its corpus."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run or release, or the name of a shipped model."""
    split: Literal["train", "valid", "test"] = "test"
    """Split of the corpus to score."""
    text: Path | None = None
    """Score this file in place of a split, as one text from an empty memory; - reads standard input. Nothing is written
    without --out."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Another run, release or shipped model of the same tokens, which scores the same text with the memory sizes of its
    training; those below are RUN's. Prints both scores and their difference in bits per token, with a standard error
    over stretches of the text; for words perplexity and gain by how often they occur in training."""
    which: Literal["best", "last"] = "best"
    """Checkpoint to load: the one with the lowest validation loss, or the last."""
    memory_size: str | None = None
    """Slots of recent memory per layer, if other than in training. A comma-separated list runs a sweep."""
    compressed_size: str | None = None
    """Slots of compressed memory per layer, or a list such as 512,1024,2048. All combinations are evaluated."""
    empty_memory: Literal["auto", "zeros", "masked"] = "auto"
    """Empty slots: attended to as zeros, or masked. auto: as in training, but masked if memory is larger
    and training never emptied it (train.reset_probability)."""
    streams: int = 0
    """Streams to cut the text into, read in one batch, each from empty memory; 0: 1, or 16 from 2,000,000 tokens on."""
    limit: int | None = None
    """Score only the first tokens of the split, this many."""
    dynamic: bool = False
    """Dynamic evaluation: a copy of the model trains on each window after scoring it."""
    dynamic_learning_rate: float = 3e-5
    """Learning rate of dynamic evaluation."""
    device: str = "auto"
    """Device, e.g. cpu or cuda:0; auto: a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products: fp32, or bf16 by autocast. auto: as in training on a GPU, else fp32. With bf16 the
    first 100,000 tokens are scored in fp32 too, and the difference is printed."""
    json: bool = False
    """Print one JSON object instead of a table."""
    out: Path | None = None
    """JSON file for the results, if not in RUN/evaluation/. Without it, nothing is written into a release."""
    plot: Path | None = None
    """File for the plot of a sweep, if not next to the JSON file."""
    data_dir: Path | None = None
    """Folder of prepared corpora, if not the one used in training."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and evaluate."""
    return run(
        evaluate,
        Evaluate,
        arguments,
        prog,
        "Score every token of a split once, with memory carried; print the metrics and keep them as JSON.",
        renamed={"--lanes": "--streams"},
    )


def evaluate(options: Evaluate) -> int:
    """Evaluate in this process, or in all processes that torchrun started."""
    from compressive.distributed import join

    with join(options.device) as world, TemporaryDirectory() as scratch:
        return _evaluate(options, world, Path(scratch))


def _evaluate(options: Evaluate, world: "World", scratch: Path) -> int:
    """Evaluate every requested memory size; print the results, then say what could not be written."""
    from rich.console import Console

    from compressive.analysis.against import gains
    from compressive.console import note, progress_bar, warn
    from compressive.evaluation.sweep import COMPARED, Reading, Result, combinations, rounding, sweep
    from compressive.plotting import require_matplotlib
    from compressive.runs.export import is_release
    from compressive.runs.run import Run
    from compressive.runs.trained import EvalConfig, Trained
    from compressive.runtime import write_atomically
    from compressive.speech.floors import floors

    source = Run.open(options.run)
    usual = source.config.train.precision if world.device.type == "cuda" else "fp32"
    reading = Reading(
        options.split if options.text is None else "test",
        options.streams,
        options.limit,
        usual if options.precision == "auto" else options.precision,
        options.dynamic_learning_rate if options.dynamic else None,
        source.config.train.clip,
    )
    if options.out is not None and (options.out.is_dir() or options.out.suffix == ".png"):  # the plot's name
        raise ValueError(f"out={options.out}: expected a JSON file, such as results.json")
    if options.plot is not None:
        require_matplotlib()  # fail before the evaluation, not after it
    path = options.out
    if path is None and options.text is None and not is_release(source):
        path = source.folder / "evaluation" / f"{_name(options, usual)}.json"
    trained = Trained.load(source, options.which)
    configs = combinations(trained, options.memory_size, options.compressed_size, options.empty_memory)
    against = None if options.against is None else _run_name(options.against)
    other = _other(options, source, len(configs))
    corpus = source.corpus(options.data_dir) if options.text is None else _as_corpus(options, source, scratch)

    about: dict[str, Any] = {
        "run": _run_name(source.folder),
        "corpus": corpus.name,
        "corpus_note": corpus.manifest.note or None,
        "split": options.split if options.text is None else None,
        "checkpoint": options.which,
        "step": trained.step,
        "precision": reading.precision,
        "device": str(world.device),
        "processes": world.size,
        "dynamic_learning_rate": reading.dynamic,
    }
    results: list[Result] = []
    unwritten: OSError | None = None
    theirs: Result | None = None
    scored: list[Nats] = []  # the other model's, then ours
    with progress_bar(world.is_first) as bar:
        task = bar.add_task("")

        def progress(config: EvalConfig, done: int, total: int) -> None:
            models = len(configs) + (other is not None)
            number = f"{len(results) + len(scored) + 1} of {models}, " if models > 1 else ""
            bar.update(task, description=f"{number}{_memory(config.model)}", completed=done, total=total)

        found = sweep(trained, corpus, configs, reading, world, progress, None if other is None else scored.append)
        if other is not None:
            (theirs,) = sweep(other, corpus, [other.eval_config()], reading, world, progress, scored.append)
            about["against"] = {"run": against, "step": other.step, **theirs.as_dict()}
        if corpus.tokenizer.is_audio and world.is_first:
            about["floors_bits_per_sample"] = floors(corpus, options.split, options.limit)
        if reading.precision == "bf16" and reading.dynamic is None:

            def comparing(config: EvalConfig, done: int, total: int) -> None:
                bar.update(task, description="bf16 against fp32", completed=done, total=total)

            about["bf16_less_fp32_bits_per_token"] = rounding(trained, corpus, configs[0], reading, world, comparing)
        for result in found:
            results.append(result)
            if other is not None:
                about["gains"] = [gain.as_dict() for gain in gains(scored[1], scored[0], corpus, reading.split)]
            if world.is_first and path is not None and unwritten is None:
                try:  # after each result, so that an interrupted sweep keeps the finished ones
                    write_atomically(path, _report(about, results, is_sweep=len(configs) > 1) + "\n")
                except OSError as error:
                    unwritten = error
    if not world.is_first:
        return 0

    if options.json:
        print(_report(about, results, is_sweep=len(configs) > 1))
    else:
        Console().print(_sweep_table(about, results) if len(results) > 1 else _table(about, results[0]))
        if theirs is not None:
            Console().print(_gains_table(about, results[0], theirs))
    if (apart := about.get("bf16_less_fp32_bits_per_token")) is not None:
        note(f"bf16 {apart:+.5f} bits per token against fp32, on the first {COMPARED:,} tokens or fewer")
    if len(results) > 1 and about["split"] == "test":
        note("choosing sizes on the test split overfits to it: choose them with --split valid")
    if path is None:
        note(f"nothing is written{' into a release' * is_release(source)}: keep the results with --out FILE")
    elif unwritten is None:
        note(f"written to {path}")
    else:
        warn(f"{path} cannot be written ({unwritten.strerror}): keep the results elsewhere with --out FILE")
    figure = options.plot
    if figure is None and path is not None and unwritten is None and len(results) > 1:
        figure = path.with_suffix(".png")
    plotted = figure is None or _plot(results, figure)
    # The score is there in any case; missing is a file only if it was asked for.
    missing = (unwritten is not None and options.out is not None) or (not plotted and options.plot is not None)
    return 2 if missing else 0


def _other(options: Evaluate, source: "Run", sizes: int) -> "Trained | None":
    """Return the model to compare with, if any; raise ValueError if it has other tokens, or for several sizes."""
    from compressive.runs.run import Run
    from compressive.runs.trained import Trained

    if options.against is None:
        return None
    if sizes > 1:
        raise ValueError(f"against={options.against}: expected one memory size, not {sizes}; give one of them")
    other, ours = Run.open(options.against), source.tokenizer(options.data_dir)
    theirs = other.tokenizer(options.data_dir)
    if not theirs.same_as(ours):
        raise ValueError(
            f"against={options.against}: it has other tokens ({theirs.kind}, {theirs.vocab_size:,}) than {options.run} "
            f"({ours.kind}, {ours.vocab_size:,}), so scores do not compare; train it on the same corpus, or prepare "
            f"one for it with --vocabulary {options.run}"
        )
    return Trained.load(other, options.which)


def _as_corpus(options: Evaluate, source: "Run", folder: Path) -> "Corpus":
    """Return the file to be scored as the test split of a corpus in the run's tokens, written to `folder`."""
    from compressive.data.corpus import write_corpus

    assert options.text is not None
    tokenizer = source.tokenizer(options.data_dir)
    if tokenizer.is_audio:
        raise ValueError(
            f"text={options.text}: {source.folder} was trained on audio; prepare clips as a corpus instead"
        )
    standard_input = options.text == Path("-")
    text = sys.stdin.buffer.read() if standard_input else options.text.read_bytes()
    name = "standard input" if standard_input else options.text.name
    if not text:
        raise ValueError(f"text={options.text}: {name} is empty, expected a text to score")
    splits = {"train": [b"\n"], "valid": [b"\n"], "test": [text]}
    return write_corpus(folder / "text", name, tokenizer, splits, {})


def _plot(results: list["Result"], path: Path) -> bool:
    """Plot a sweep; warn and return False if that is not possible."""
    from compressive.console import note, warn
    from compressive.evaluation.sweep import plot
    from compressive.plotting import PlotError

    try:
        plot(results, path)
    except (PlotError, OSError) as error:
        warn(f"no plot: {error}")
        return False
    note(f"written to {path}")
    return True


def _table(about: dict[str, Any], result: "Result") -> "Table":
    """Return a table of one evaluation, main metric first."""
    from rich.table import Table

    metrics, config = result.metrics, result.config.model
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
        table.add_row(f"  floor: {name.replace('_', ' ')}", f"{bits:.4f}")
    if metrics.not_comparable is not None:
        table.add_row("not comparable", metrics.not_comparable, style="red")
    if metrics.unknown_tokens:
        share = f"{metrics.unknown_tokens:,} tokens, {100 * metrics.unknown_tokens / metrics.tokens:.1f} %"
        table.add_row("<unk>", f"{share}; they hide text: no bits per byte, no word perplexity")
    for bucket in metrics.buckets:
        perplexity = "–" if bucket.perplexity is None else f"{bucket.perplexity:,.1f}"
        table.add_row(f"  in training {bucket.name} times", f"{perplexity}, {bucket.tokens:,} tokens")
    table.add_section()
    part = "" if metrics.whole_split else "the first "
    table.add_row("scored", f"{_text_of(about)}, {part}{metrics.tokens:,} tokens")
    if about["corpus_note"] is not None:
        table.add_row("note", about["corpus_note"])
    table.add_row("memory", _memory(config))
    if isinstance(config, ModelConfig):
        table.add_row("empty memory", f"{config.empty_memory} ({result.config.reason})")
    table.add_row("checkpoint", f"{about['checkpoint']}, step {about['step']:,}")
    if about["dynamic_learning_rate"] is not None:
        table.add_row("dynamic", f"learning rate {about['dynamic_learning_rate']:g}")
    streams = "1 stream" if result.streams == 1 else f"{result.streams} streams"
    table.add_row("time", f"{result.seconds:.1f} s, {result.tokens_per_second:,.0f} tokens/s, {streams}")
    table.add_row("arithmetic", f"{about['precision']} on {about['device']}")
    return table


def _gains_table(about: dict[str, Any], ours: "Result", theirs: "Result") -> "Table":
    """Return a table of two models, all tokens in the last row; for words a row for each range of frequency."""
    from rich.markup import escape
    from rich.table import Table

    words = bool(ours.metrics.buckets)
    table = Table(
        title="perplexity by frequency in training" if words else "bits per token",
        caption="difference in bits per token: below 0 where the first model is better, ± standard error over the text",
    )
    names = (about["run"], about["against"]["run"])
    models = [f"{escape(name)}\n{_memory(of.config.model)}" for name, of in zip(names, (ours, theirs), strict=True)]
    for column in ("in training" if words else "", "tokens", *models, *["gain"] * words, "difference"):
        table.add_column(column, justify="right")
    for gain in about["gains"]:
        figures = ("perplexity", "other_perplexity") if words else ("bits", "other_bits")
        error = gain["standard_error"]
        table.add_row(
            f"{gain['name']} times" if gain["name"] != "all" else "all",
            f"{gain['tokens']:,}",
            *(f"{gain[name]:,.1f}" if words else f"{gain[name]:.4f}" for name in figures),
            *[f"{100 * gain['relative_gain']:+.1f} %"] * words,
            f"{gain['difference']:+.4f}" + ("" if error is None else f" ± {error:.4f}"),
        )
    return table


def _run_name(folder: Path) -> str:
    return folder.resolve().name


def _sweep_table(about: dict[str, Any], results: list["Result"]) -> "Table":
    """Return a table of a sweep, one row per configuration, the best in bold."""
    from rich.table import Table

    first, best = results[0].metrics, _best(results)
    part = "" if first.whole_split else "the first "
    table = Table(
        title=f"{_text_of(about)}, {part}{first.tokens:,} tokens; {about['checkpoint']} checkpoint, "
        f"step {about['step']:,}" + ("; dynamic" if about["dynamic_learning_rate"] is not None else ""),
        caption=None if first.not_comparable is None else f"not comparable: {first.not_comparable}",
    )
    for name in ("memory", "compressed", "empty", first.headline.replace("_", " "), "tokens/s"):
        table.add_column(name, justify="left" if name == "empty" else "right")
    for i, result in enumerate(results):
        config = transformer(result.config.model)
        table.add_row(
            _size(config.memory_size),
            _size(config.compressed_size),
            config.empty_memory,
            f"{result.headline:,.4f}",
            f"{result.tokens_per_second:,.0f}",
            style="bold" if i == best else None,
        )
    return table


def _text_of(about: dict[str, Any]) -> str:
    return about["corpus"] if about["split"] is None else f"{about['corpus']} {about['split']}"


def _memory(config: AnyModelConfig) -> str:
    if isinstance(config, WaveNetConfig):
        return f"{config.receptive_field - 1:,} samples, the receptive field"
    return f"{_size(config.memory_size)} recent, {_size(config.compressed_size)} compressed"


def _size(size: PerLayer) -> str:
    return str(size) if isinstance(size, int) else "/".join(map(str, size))


def _name(options: Evaluate, usual: Precision) -> str:
    """Return the name of the result file: the split, then every option that is not the default.

    `usual` is the precision that is taken unless one is given.
    """
    differs = {
        f"m{options.memory_size}": options.memory_size is not None,
        f"c{options.compressed_size}": options.compressed_size is not None,
        options.empty_memory: options.empty_memory != "auto",
        "dynamic": options.dynamic,
        f"against-{_run_name(options.against or Path())}": options.against is not None,
        f"first{options.limit}": options.limit is not None,
        f"streams{options.streams}": options.streams > 0,
        options.precision: options.precision not in ("auto", usual),
        options.which: options.which != "best",
    }
    parts = [options.split, *(name for name, holds in differs.items() if holds)]
    return "-".join(parts).replace(" ", "").replace(",", "_")


def _report(about: dict[str, Any], results: list["Result"], is_sweep: bool) -> str:
    """Return one evaluation as a flat JSON object, a sweep as an object with a list of them."""
    found = [about | result.as_dict() for result in results]
    several = {"metric": results[0].metrics.headline, "best": _best(results), "results": found}
    return json.dumps(_plain(several if is_sweep else found[0]), indent=1, allow_nan=False)


def _best(results: list["Result"]) -> int:
    """Return the index of the lowest result."""
    return min(range(len(results)), key=lambda i: (math.isnan(results[i].headline), results[i].headline))


def _plain(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
