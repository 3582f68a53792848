"""Sample text from a run.

compressive generate runs/enwik8 --prompt "The Roman Empire" --samples 3
compressive generate runs/pg19 --prompt-file built/test/860.txt --prompt-length 512 --length 2000
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from compressive.cli import run as run_command


@dataclass
class Generate:
    """What to continue, and how."""

    run: Positional[Path]
    """Folder of the run."""
    prompt: str | None = None
    """Text to continue; without one the text begins after a newline."""
    prompt_file: Path | None = None
    """File with the text to continue, a whole book if you like; - reads standard input."""
    prompt_length: int | None = None
    """Read only so many tokens of it, from its beginning, as the opening of a book."""
    length: int = 500
    """How many tokens to draw."""
    samples: int = 1
    """How many continuations to draw side by side."""
    temperature: float = 1.0
    """Below 1 sharpens the distribution, above flattens it; 0 always takes the most likely token."""
    top_p: float = 0.98
    """Nucleus: draw from the smallest set of tokens with this much probability; 1 for all."""
    top_k: int = 0
    """Draw from so many of the most likely tokens only; 0 for all."""
    seed: int = 0
    """Seed of the draw; the same seed gives the same text."""
    which: Literal["best", "last"] = "best"
    """Which checkpoint."""
    memory_size: int | None = None
    """Slots of recent memory, if other than in training."""
    compressed_size: int | None = None
    """Slots of compressed memory, if other than in training."""
    empty_memory: Literal["auto", "zeros", "masked"] = "auto"
    """Slots not yet written: seen as zeros, or masked; auto: as in training, but masked where memory is larger."""
    device: str = "auto"
    """Where to run: auto takes a GPU if there is one."""
    out: Path | None = None
    """File to write the text to, in place of the terminal."""
    data_dir: Path | None = None
    """Folder that holds the run's corpus, whose tokeniser is needed, if it has moved since training."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words and generate."""
    return run_command(generate, Generate, arguments, prog, "Sample text from a run, streamed as it comes.")


def generate(options: Generate) -> int:
    """Stream the first sample as it comes; the others, drawn beside it, follow when it is done."""
    import torch

    from compressive.generation.generate import generate
    from compressive.generation.text import TextStream, encode_prompt
    from compressive.run import Run, pick_device
    from compressive.trained import Trained

    run = Run.open(options.run)
    if options.prompt_length is not None and options.prompt_length < 1:
        raise ValueError(f"prompt_length={options.prompt_length}: expected at least 1; leave it out to read the whole")
    tokenizer = run.tokenizer(options.data_dir)
    opening = encode_prompt(tokenizer, _prompt(options))[: options.prompt_length]
    prompt = torch.from_numpy(opening.astype("int64"))
    # A model trained with zeros expects them at the beginning of a text, but not more of them than it was trained with.
    trained = Trained.load(run, options.which)
    setting = trained.setting(options.memory_size, options.compressed_size, options.empty_memory)
    model = trained.model(setting.config, pick_device(options.device))
    drawn = generate(
        model,
        prompt,
        options.length,
        samples=options.samples,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )
    streams = [TextStream(tokenizer, int(prompt[-1])) for _ in range(options.samples)]
    waiting: list[list[str]] = [[] for _ in streams[1:]]

    began, first_token = time.perf_counter(), 0.0
    with nullcontext(sys.stdout) if options.out is None else options.out.open("w", encoding="utf-8") as sink:
        sink.write(_header(1, options.samples))
        for tokens in drawn:
            first_token = first_token or time.perf_counter()
            shown, *held = (stream.push(token) for stream, token in zip(streams, tokens.tolist(), strict=True))
            sink.write(shown)
            sink.flush()
            for parts, text in zip(waiting, held, strict=True):
                parts.append(text)
        sink.write(streams[0].finish() + "\n")
        for i, parts in enumerate(waiting, start=1):
            sink.write(_header(i + 1, options.samples) + "".join(parts) + streams[i].finish() + "\n")
        sink.flush()
    ended = time.perf_counter()

    count = options.length * options.samples
    speed = f", {(count - options.samples) / (ended - first_token):,.0f} tokens/s" if options.length > 1 else ""
    print(
        f"prompt of {len(prompt):,} tokens read in {first_token - began:.1f} s; {count:,} drawn in "
        f"{ended - first_token:.1f} s{speed}",
        file=sys.stderr,
    )
    return 0


def _prompt(options: Generate) -> bytes:
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("--prompt and --prompt-file: give one of them, not both")
    if options.prompt_file is None:
        return (options.prompt or "").encode()
    return sys.stdin.buffer.read() if options.prompt_file == Path("-") else options.prompt_file.read_bytes()


def _header(number: int, samples: int) -> str:
    return f"=== {number} of {samples} ===\n" if samples > 1 else ""
