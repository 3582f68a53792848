"""The command line: one table from command to function, imports inside, so that help is instant.

compressive train enwik8-base --train.steps 1000
"""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NoReturn, TypeVar

Options = TypeVar("Options")

COMMANDS = {
    "train": ("train", "train a model from a preset, with progress and checkpoints"),
    "evaluate": ("evaluate", "score a run: bits per character, perplexity, other memory sizes"),
    "generate": ("generate", "sample text from a run"),
    "analyze": ("analyze", "see what a run's memory, attention and compression do"),
    "data prepare": ("data", "download or read a corpus and write its tokens"),
    "data pg19 build": ("pg19.build", "build PG-19 from raw Project Gutenberg texts"),
    "data pg19 verify": ("pg19.verify", "compare built books with the official ones, bit by bit"),
    "data pg19 stats": ("pg19.stats", "the paper's tables of PG-19, from the built books"),
    "data pg19 topics": ("pg19.topics", "topics of the built books"),
    "rl train": ("rl.train", "train an agent whose memory is the Compressive Transformer"),
    "rl evaluate": ("rl.evaluate", "let an agent, chance or an oracle play: returns, right choices"),
    "rl watch": ("rl.watch", "play one episode and write it as a GIF or as pictures"),
    "bench": ("bench", "see how fast a model trains and generates on this machine"),
    "export": ("export", "write a run's model as one folder, to hand on"),
    "config": ("config", "list presets, or show one in full"),
}
"""Command to module of this package, whose `main` takes the remaining words, and what it is for."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
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
    text = "\n".join(["The Compressive Transformer.", "", *lines, "", "--help after any of them explains it."])
    if asked:
        print(text)
        return 0
    print(f"compressive: no command {' '.join(words[:3])!r}\n\n{text}", file=sys.stderr)
    return 2


def with_new_flags(arguments: list[str], renamed: Mapping[str, str] | None = None) -> list[str]:
    """Return the words with the flags and values of today; those of version 0.1 go on working, unlisted.

    `renamed` has a command's own flags, old to new; fields of configurations are renamed for all commands.
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
    """End this process with the exit code of a command.

    One of several processes goes at once: gloo's threads may still hold tensors of its last exchange, and a thread that
    wants the interpreter to let them go, while that is being taken down, aborts the process whatever its code was.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def preset_first(arguments: list[str], names: list[str], shown: str) -> tuple[str, list[str]]:
    """Take a preset's name off the front of the words; help, asked for without one, is that of the preset `shown`."""
    if arguments and not arguments[0].startswith("-"):
        name: str | None = arguments[0]
    else:
        name = None
        if set(arguments) & {"-h", "--help"}:
            return shown, arguments
    if name is None or name not in names:
        raise ValueError(f"preset={name!r}: expected the name of one first, of {', '.join(names)}")
    return name, arguments[1:]


def run(
    function: Callable[[Options], int],
    options: type[Options],
    arguments: list[str],
    prog: str,
    description: str,
    renamed: Mapping[str, str] | None = None,
) -> int:
    """Parse the words into `options`, call the function, and turn expected errors into one clear line.

    `renamed` has flags that had another name in version 0.1, old to new.
    """
    import tyro

    parsed = tyro.cli(options, args=with_new_flags(arguments, renamed), prog=prog, description=description)
    return guarded(lambda: function(parsed), prog)


def guarded(function: Callable[[], int], prog: str) -> int:
    """Call; an error that a user can mend is printed without a traceback and gives exit code 2."""
    try:
        return function()
    except BrokenPipeError:  # whoever read the output has had enough of it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError:  # torch's own; its traceback is needed
            raise
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
