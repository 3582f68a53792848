"""The command line: a table from command to module, imported on demand, so that --help is fast.

compressive train enwik8-base --train.steps 1000
"""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NoReturn, TypeVar

Options = TypeVar("Options")

COMMANDS = {
    "train": ("train", "train a model from a preset"),
    "evaluate": ("evaluate", "score a run: bits per character, perplexity, any memory sizes"),
    "generate": ("generate", "sample text or audio from a run"),
    "analyze": ("analyze", "measure how a run uses memory, attention and compression"),
    "data prepare": ("data", "download or read a corpus and tokenise it"),
    "data pg19 build": ("pg19.build", "build PG-19 from raw Project Gutenberg texts"),
    "data pg19 verify": ("pg19.verify", "compare built books with the official ones by SHA-256"),
    "data pg19 stats": ("pg19.stats", "print the paper's PG-19 tables for the built books"),
    "data pg19 topics": ("pg19.topics", "learn topics of the built books"),
    "rl train": ("rl.train", "train an agent whose memory is the Compressive Transformer"),
    "rl evaluate": ("rl.evaluate", "evaluate an agent, a random policy or an oracle: returns, right choices"),
    "rl watch": ("rl.watch", "run one episode and write it as a GIF or as images"),
    "bench": ("bench", "measure training and generation speed on this machine"),
    "export": ("export", "export a run's model as one folder"),
    "config": ("config", "list presets, or print one in full"),
}
"""Command to module of this package and description; the module's `main` takes the remaining arguments."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to `sys.argv[1:]`."""
    words = sys.argv[1:] if arguments is None else arguments
    for count in (3, 2, 1):
        name = " ".join(words[:count])
        if name in COMMANDS:
            module = import_module(f"compressive.cli.{COMMANDS[name][0]}")
            code: int = module.main(words[count:], prog=f"compressive {name}")
            return code
    asked = not words or words[0] in ("-h", "--help", "help")
    width = max(map(len, COMMANDS))
    lines = [f"  compressive {name:<{width}}   {purpose}" for name, (_, purpose) in COMMANDS.items()]
    text = "\n".join(["The Compressive Transformer.", "", *lines, "", "Add --help to a command for its options."])
    if asked:
        print(text)
        return 0
    print(f"compressive: no command {' '.join(words[:3])!r}\n\n{text}", file=sys.stderr)
    return 2


def with_new_flags(arguments: list[str], renamed: Mapping[str, str] | None = None) -> list[str]:
    """Return the arguments with flags and values of version 0.1 replaced by the current ones.

    `renamed` maps a command's own old flags to new ones. Renamed configuration fields apply to all commands.
    """
    from compressive.config.presets import RENAMED, RENAMED_VALUES

    flags = {_flag(old): _flag(new) for old, new in RENAMED.items()} | dict(renamed or {})
    values = {(_flag(key), old): new for (key, old), new in RENAMED_VALUES.items()}
    words: list[str] = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        flag = flags.get(flag.replace("_", "-") if flag.startswith("--") else flag, flag)
        if equals:
            words.append(f"{flag}={values.get((flag, value), value)}")
        else:
            words.append(values.get((words[-1] if words else "", flag), flag))
    return words


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def leave(code: int) -> NoReturn:
    """Exit the process with the exit code of a command.

    Under torchrun, interpreter shutdown is skipped: gloo's threads may still hold tensors of the last collective, and
    a thread that releases them during shutdown aborts the process.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def preset_first(arguments: list[str], names: list[str], shown: str) -> tuple[str, list[str]]:
    """Split off the preset's name, the first argument; --help without a preset shows the options of `shown`.

    Raises ValueError if the name is missing or unknown.
    """
    if arguments and not arguments[0].startswith("-"):
        name: str | None = arguments[0]
    else:
        name = None
        if set(arguments) & {"-h", "--help"}:
            return shown, arguments
    if name is None or name not in names:
        raise ValueError(f"preset={name!r}: expected a preset as the first argument, one of {', '.join(names)}")
    return name, arguments[1:]


def run(
    function: Callable[[Options], int],
    options: type[Options],
    arguments: list[str],
    prog: str,
    description: str,
    renamed: Mapping[str, str] | None = None,
) -> int:
    """Parse the arguments into `options`, call the function and return its exit code; see `guarded` for errors.

    `renamed` maps flags of version 0.1 to their current names.
    """
    import tyro

    parsed = tyro.cli(options, args=with_new_flags(arguments, renamed), prog=prog, description=description)
    return guarded(lambda: function(parsed), prog)


def guarded(function: Callable[[], int], prog: str) -> int:
    """Call the function; print errors that a user can fix without a traceback, and return exit code 2 for them."""
    try:
        return function()
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError:  # from torch, where the traceback is needed
            raise
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
