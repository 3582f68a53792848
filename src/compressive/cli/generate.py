"""Sample text or audio from a run.

compressive generate runs/enwik8 --prompt "The Roman Empire" --samples 3
compressive generate runs/pg19 --prompt-file built/test/860.txt --prompt-length 512 --length 2000
compressive generate runs/pg19 --prompt-file book.txt --save-state book.state    # later: --state book.state
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

    from compressive.api import TextModel, TextState
    from compressive.data.tokenizer import Tokenizer
    from compressive.model.language_model import LanguageModel
    from compressive.runs.run import Run

MOST = 10**9
"""Tokens that one command samples at most, over all samples: at 1,000 a second, 11 days."""


@dataclass
class Generate:
    """The prompt to continue, and the sampling options."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run or release, or the name of a shipped model."""
    prompt: str | None = None
    """Text to continue; without one, sampling starts after a newline."""
    prompt_file: Path | None = None
    """File to continue: a text of any length, or a wav or flac for audio; - reads standard input."""
    prompts: Path | None = None
    """File with a prompt per line, each a JSON string or an object with the key prompt: all continued in one batch."""
    state: Path | None = None
    """State that --save-state wrote, to continue from; --prompt or --prompt-file, if given, is read after it."""
    save_state: Path | None = None
    """File for the state after the prompt: a book is read once, and continued often."""
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
    """Empty slots: attended to as zeros, or masked. auto: as in training, but masked if memory is larger
    and training never emptied it (train.reset_probability)."""
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
    """Sample text or audio, as the run was trained on."""
    from compressive.api import TextModel
    from compressive.evaluation.score import require_memory
    from compressive.model.language_model import CompressiveLM
    from compressive.runs.run import Run
    from compressive.runs.trained import Trained
    from compressive.runtime import pick_device

    run = Run.open(options.run)
    tokenizer = run.tokenizer(options.data_dir)
    length = _length(options, tokenizer.is_audio)
    _check(options, length)
    prompts = None if options.prompts is None else _read_prompts(options.prompts)
    device = pick_device(options.device)
    trained = Trained.load(run, options.which)
    config = trained.eval_config(options.memory_size, options.compressed_size, options.empty_memory)
    require_memory(config.model, options.samples if prompts is None else len(prompts), device, decoding=True)
    model = trained.model(config.model, device)
    if tokenizer.is_audio:
        return _sample_audio(options, run, tokenizer, model, length)
    assert isinstance(model, CompressiveLM)  # a WaveNet is of audio
    return _sample_text(options, TextModel(model, tokenizer, run.config, trained.step), prompts, length)


def _sample_text(options: Generate, model: "TextModel", prompts: list[str] | None, length: int) -> int:
    """Stream the first continuation token by token; the others, sampled in the same batch, are printed after it."""
    from compressive.console import note
    from compressive.inference.text import TextStream

    began = time.perf_counter()
    states, prompt_tokens = _read_states(options, model, prompts)
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed")}
    streams = [TextStream(model.tokenizer, int(state.last)) for state in states]
    texts: list[list[str]] = [[] for _ in streams]
    first_token = 0.0
    with _sink(options) as sink:
        sink.write(_header(1, len(states)))
        for tokens in model.sample(states, length, **sampling):
            first_token = first_token or time.perf_counter()
            added = [stream.push(token) for stream, token in zip(streams, tokens.tolist(), strict=True)]
            sink.write(added[0])
            sink.flush()
            for i in range(0 if options.json else 1, len(states)):  # the first is shown and need not be kept
                texts[i].append(added[i])
        endings = [stream.finish() for stream in streams]
        sink.write(endings[0] + "\n")
        for i in range(1, len(states)):
            sink.write(_header(i + 1, len(states)) + "".join(texts[i]) + endings[i] + "\n")
        sink.flush()
    ended = time.perf_counter()

    count = length * len(states)
    if options.json:
        samples = ["".join(parts) + ending for parts, ending in zip(texts, endings, strict=True)]
        _print_json(options, {"samples": samples}, prompt_tokens, count, ended - first_token)
        return 0
    speed = f", {(count - len(states)) / (ended - first_token):,.0f} tokens/s" if length > 1 else ""
    note(
        f"prompt of {prompt_tokens:,} tokens read in {first_token - began:.1f} s; {count:,} sampled in "
        f"{ended - first_token:.1f} s{speed}"
    )
    return 0


def _read_states(options: Generate, model: "TextModel", prompts: list[str] | None) -> tuple[list["TextState"], int]:
    """Read the prompts, after the saved state if there is one; return a state per continuation, and the tokens read."""
    from compressive.inference.fast_decoder import FastDecoder
    from compressive.inference.text import encode_prompt

    state, device = None, str(next(model.model.parameters()).device)
    if options.state is not None:
        state = _load_state(options.state, device)
    tokens = [encode_prompt(model.tokenizer, text.encode()) for text in prompts or []]
    if prompts is None:
        text = _prompt(options)
        if text or state is None:
            tokens = [encode_prompt(model.tokenizer, text)[: options.prompt_length]]
    decoder = FastDecoder(model.model)
    states = [model.read(one.astype("int64"), state, decoder=decoder) for one in tokens]
    if not states and state is not None:  # nothing to read after the saved state
        states = [state]
    if options.save_state is not None:
        with _naming(options.save_state, "save_state"):
            options.save_state.parent.mkdir(parents=True, exist_ok=True)
            states[0].save(options.save_state)
    return states * options.samples if prompts is None else states, sum(map(len, tokens))


def _load_state(path: Path, device: str) -> "TextState":
    from safetensors import SafetensorError

    from compressive.api import TextState

    try:
        return TextState.load(path, device)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"state={path} is no state that --save-state wrote ({error})") from error


def _read_prompts(path: Path) -> list[str]:
    """Read a file of prompts, one JSON string or object per line; raise ValueError for the first line that is none."""
    prompts = []
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: JSON strings may hold other line separators
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}): expected a JSON string per line") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt = value["prompt"] if isinstance(value, dict) else value
        except (ValueError, KeyError):
            prompt = None
        if not isinstance(prompt, str):
            raise ValueError(
                f"{path}, line {number}: expected a JSON string, or an object with the key prompt; found {line[:40]!r}"
            )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts: expected one per line")
    return prompts


def _sample_audio(options: Generate, run: "Run", tokenizer: "Tokenizer", model: "LanguageModel", length: int) -> int:
    import torch

    from compressive.inference.generate import generate
    from compressive.speech.generate import prompt_samples

    prompt = torch.from_numpy(prompt_samples(options.prompt_file, tokenizer, options.prompt_length).astype("int64"))
    sampling = {name: getattr(options, name) for name in ("samples", "temperature", "top_p", "top_k", "seed")}
    return _write_audio(options, run, tokenizer, generate(model, prompt, length, **sampling), length, len(prompt))


def _check(options: Generate, length: int) -> None:
    """Raise ValueError, before weights are loaded, for values that cannot work."""
    from compressive.inference.sampling import check_sampling

    check_sampling(options.temperature, options.top_p, options.top_k)
    if options.prompts is not None:
        for name in ("prompt", "prompt_file", "prompt_length", "save_state"):
            if getattr(options, name) is not None:
                raise ValueError(f"--prompts and --{name.replace('_', '-')}: give one of them, not both")
        if options.samples != 1:
            raise ValueError(f"samples={options.samples} with --prompts: expected 1; repeat lines of the file instead")
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
def _naming(out: Path, name: str = "out") -> "Iterator[None]":
    """Name the file that cannot be written; the system's message for a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{name}={out} cannot be written ({error.strerror}): choose another file") from error


def _print_json(options: Generate, result: dict[str, Any], prompt_tokens: int, count: int, seconds: float) -> None:
    """Print the samples or their files, with settings and speed."""
    names = ("temperature", "top_p", "top_k", "seed")
    counts = {"prompt_tokens": prompt_tokens, "sampled_tokens": count, "seconds": seconds}
    print(json.dumps(result | counts | {name: getattr(options, name) for name in names}, indent=1))


def _length(options: Generate, is_audio: bool) -> int:
    """Return how many tokens to sample; raise ValueError for options that do not fit text or audio."""
    from compressive.data.speech.codes import RATE

    if is_audio:
        for name in ("prompts", "state", "save_state"):
            if getattr(options, name) is not None:
                raise ValueError(f"{name}={getattr(options, name)}: the run was trained on audio; this is for text")
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
        _print_json(options, {"files": list(map(str, paths))}, prompt_tokens, length * len(paths), took)
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
