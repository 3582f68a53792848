"""Sample text or audio from a run.

compressive generate runs/enwik8 --prompt "The Roman Empire" --samples 3
compressive generate runs/pg19 --prompt-file built/test/860.txt --prompt-length 512 --length 2000
compressive generate runs/speech --seconds 2 --out a.wav
"""

import json
import math
import os
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import tyro
from tyro.conf import Positional

from compressive.cli import run as run_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from compressive.data.tokenizer import Tokenizer
    from compressive.runs.run import Run

MOST = 10**9
"""Tokens that one command samples at most, over all samples: at 1,000 a second, 11 days."""


@dataclass
class Generate:
    """The prompt to continue, and the sampling options."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run or release."""
    prompt: str | None = None
    """Text to continue; without one, sampling starts after a newline."""
    prompt_file: Path | None = None
    """File to continue: a text of any length, or a wav or flac for audio; - reads standard input."""
    prompt_length: int | None = None
    """Use only the first tokens of the prompt, this many."""
    length: int = 500
    """Tokens to sample."""
    seconds: float | None = None
    """For audio: duration to sample, instead of --length."""
    samples: int = 1
    """Number of continuations, sampled in one batch."""
    temperature: float = 1.0
    """Softmax temperature: below 1 sharpens the distribution, above 1 flattens it; 0 takes the most likely token."""
    top_p: float = 0.98
    """Nucleus sampling: sample from the smallest set of tokens with this total probability; 1 for all."""
    top_k: int = 0
    """Sample from this many of the most likely tokens only; 0 for all."""
    seed: int = 0
    """Random seed; the same seed gives the same output."""
    which: Literal["best", "last"] = "best"
    """Checkpoint to load: the one with the lowest validation loss, or the last."""
    memory_size: int | None = None
    """Slots of recent memory per layer, if other than in training."""
    compressed_size: int | None = None
    """Slots of compressed memory per layer, if other than in training."""
    empty_memory: Literal["auto", "zeros", "masked"] = "auto"
    """Empty slots: attended to as zeros, or masked. auto: as in training, but masked if memory is larger."""
    device: str = "auto"
    """Device, e.g. cpu or cuda:0; auto: a GPU if there is one."""
    out: Path | None = None
    """File for the text, instead of the terminal. For audio: the wav, with a spectrogram beside it."""
    json: bool = False
    """Print one JSON object: the samples, or the files of audio, with settings and speed."""
    data_dir: Path | None = None
    """Folder of prepared corpora, if not the one used in training: runs of version 0.1 have their tokeniser there."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and generate."""
    return run_command(generate, Generate, arguments, prog, "Sample text or audio from a run; text is streamed.")


def generate(options: Generate) -> int:
    """Stream the first sample token by token; the others, sampled in the same batch, are printed after it."""
    import torch

    from compressive.console import note
    from compressive.evaluation.score import require_memory
    from compressive.inference.generate import generate
    from compressive.inference.text import TextStream, encode_prompt
    from compressive.runs.run import Run
    from compressive.runs.trained import Trained
    from compressive.runtime import pick_device
    from compressive.speech.generate import prompt_samples

    run = Run.open(options.run)
    tokenizer = run.tokenizer(options.data_dir)
    length = _length(options, tokenizer.is_audio)
    _check(options, length)
    device = pick_device(options.device)
    if tokenizer.is_audio:
        opening = prompt_samples(options.prompt_file, tokenizer, options.prompt_length)
    else:
        opening = encode_prompt(tokenizer, _prompt(options))[: options.prompt_length]
    prompt = torch.from_numpy(opening.astype("int64"))
    trained = Trained.load(run, options.which)
    config = trained.eval_config(options.memory_size, options.compressed_size, options.empty_memory)
    require_memory(config.model, options.samples, device, decoding=True)
    model = trained.model(config.model, device)
    sampled = generate(
        model,
        prompt,
        length,
        samples=options.samples,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )
    if tokenizer.is_audio:
        return _write_audio(options, run, tokenizer, sampled, length, len(prompt))
    streams = [TextStream(tokenizer, int(prompt[-1])) for _ in range(options.samples)]
    texts: list[list[str]] = [[] for _ in streams]

    began, first_token = time.perf_counter(), 0.0
    with _sink(options) as sink:
        sink.write(_header(1, options.samples))
        for tokens in sampled:
            first_token = first_token or time.perf_counter()
            added = [stream.push(token) for stream, token in zip(streams, tokens.tolist(), strict=True)]
            sink.write(added[0])
            sink.flush()
            for i in range(0 if options.json else 1, options.samples):  # the first is shown and need not be kept
                texts[i].append(added[i])
        endings = [stream.finish() for stream in streams]
        sink.write(endings[0] + "\n")
        for i in range(1, options.samples):
            sink.write(_header(i + 1, options.samples) + "".join(texts[i]) + endings[i] + "\n")
        sink.flush()
    ended = time.perf_counter()

    if options.json:
        samples = ["".join(parts) + ending for parts, ending in zip(texts, endings, strict=True)]
        _print_json(options, {"samples": samples}, len(prompt), length, ended - first_token)
        return 0
    count = length * options.samples
    speed = f", {(count - options.samples) / (ended - first_token):,.0f} tokens/s" if length > 1 else ""
    note(
        f"prompt of {len(prompt):,} tokens read in {first_token - began:.1f} s; {count:,} sampled in "
        f"{ended - first_token:.1f} s{speed}"
    )
    return 0


def _check(options: Generate, length: int) -> None:
    """Raise ValueError, before weights are loaded, for values that cannot work."""
    from compressive.inference.sampling import check_sampling

    check_sampling(options.temperature, options.top_p, options.top_k)
    if options.prompt_length is not None and options.prompt_length < 1:
        raise ValueError(f"prompt_length={options.prompt_length}: expected at least 1; leave it out to read all of it")
    for name, value in (("length", length), ("samples", options.samples)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    if length * options.samples > MOST:
        raise ValueError(
            f"length={length}, samples={options.samples}: expected at most {MOST:,} tokens in all; give smaller numbers"
        )
    if not -(2**63) <= options.seed < 2**64:
        raise ValueError(f"seed={options.seed}: expected a number of at most 64 bits")
    if options.out is not None and options.out.is_dir():
        raise ValueError(f"out={options.out} is a folder: expected a file, such as {options.out / 'sample.txt'}")


@contextmanager
def _sink(options: Generate) -> "Iterator[TextIO]":
    """Yield where text is streamed to: the file, or the terminal unless JSON will be printed there."""
    if options.out is None:
        with Path(os.devnull).open("w", encoding="utf-8") if options.json else nullcontext(sys.stdout) as sink:
            yield sink
        return
    with _naming(options.out):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", encoding="utf-8") as sink:
            yield sink


@contextmanager
def _naming(out: Path) -> "Iterator[None]":
    """Name the file that cannot be written; the system's message for a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"out={out} cannot be written ({error.strerror}): choose another file") from error


def _print_json(options: Generate, result: dict[str, Any], prompt_tokens: int, length: int, seconds: float) -> None:
    """Print the samples or their files, with settings and speed."""
    names = ("temperature", "top_p", "top_k", "seed")
    counts = {"prompt_tokens": prompt_tokens, "sampled_tokens": length * options.samples, "seconds": seconds}
    print(json.dumps(result | counts | {name: getattr(options, name) for name in names}, indent=1))


def _length(options: Generate, is_audio: bool) -> int:
    """Return how many tokens to sample; raise ValueError for options that do not fit text or audio."""
    from compressive.data.speech.codes import RATE

    if not is_audio:
        if options.seconds is not None:
            raise ValueError(f"seconds={options.seconds}: the run was trained on text; give --length")
        return options.length
    if options.prompt is not None:
        raise ValueError(
            f"prompt={options.prompt!r}: the run was trained on audio; give --prompt-file with a wav or flac"
        )
    if options.out is None or options.out.suffix.lower() != ".wav":
        raise ValueError(f"out={options.out}: the run was trained on audio; give a wav file, such as --out a.wav")
    if options.seconds is None:
        return options.length
    if not 1 / RATE <= options.seconds < math.inf:
        raise ValueError(f"seconds={options.seconds}: expected a number above 0")
    return round(options.seconds * RATE)


def _write_audio(
    options: Generate, run: "Run", tokenizer: "Tokenizer", sampled: "Iterator[Tensor]", length: int, prompt_tokens: int
) -> int:
    """Write each continuation as a wav, and spectrograms of all next to real audio."""
    from compressive.console import note, progress_bar, warn
    from compressive.data.speech.audio import read_wav
    from compressive.data.speech.codes import RATE
    from compressive.plotting import PlotError
    from compressive.speech.generate import real_audio, write_samples
    from compressive.speech.spectrogram import plot_spectrograms

    assert options.out is not None
    paths = [options.out]
    if options.samples > 1:
        paths = [options.out.with_stem(f"{options.out.stem}-{i + 1}") for i in range(options.samples)]
    began = time.perf_counter()
    with _naming(options.out), progress_bar() as bar:
        task = bar.add_task("sampling", total=length)
        for count in write_samples(sampled, tokenizer, paths):
            bar.update(task, completed=count)
    took = time.perf_counter() - began
    if options.json:
        _print_json(options, {"files": list(map(str, paths))}, prompt_tokens, length, took)
    else:
        note(
            f"{length / RATE:.2f} s of audio in {took:.1f} s, {options.samples * length / took:,.0f} samples/s: "
            f"{', '.join(map(str, paths))}"
        )
    generated = {f"Sampled ({path.name})": read_wav(path) for path in paths}
    figure = options.out.with_suffix(".png")
    try:
        real = {"Real (test split)": real_audio(run.corpus(options.data_dir), length)}
        plot_spectrograms(real | generated, figure)
        note(f"spectrograms: {figure}")
    except (PlotError, OSError, ValueError) as error:  # no matplotlib, a full disk, or not the corpus of the run
        warn(f"no spectrograms: {error}")
    return 0


def _prompt(options: Generate) -> bytes:
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("--prompt and --prompt-file: give one of them, not both")
    if options.prompt_file is None:
        return (options.prompt or "").encode()
    return sys.stdin.buffer.read() if options.prompt_file == Path("-") else options.prompt_file.read_bytes()


def _header(number: int, samples: int) -> str:
    return f"=== {number} of {samples} ===\n" if samples > 1 else ""
