"""The command line: a table from command to module, imported on demand, so that --help is fast.

compressive train enwik8-base --train.steps 1000
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from compressive import __version__, console

Options = TypeVar("Options")

COMMANDS = {
    "train": ("train", "train a model from a preset"),
    "evaluate": ("evaluate", "score a run: bits per character, perplexity, any memory sizes"),
    "generate": ("generate", "sample text or audio from a run"),
    "serve": ("serve", "serve a web page that shows a model's memory at work"),
    "analyze": ("analyze", "measure how a run uses memory, attention and compression"),
    "runs": ("runs", "list runs: preset, corpus, steps, best score, speed, state"),
    "compare": ("compare", "compare runs: what differs, scores over seeds, curves in one figure"),
    "experiment": ("experiment", "run the paper's tables and figures, at tiny, small or the paper's scale"),
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
    "convert": ("convert", "make a release of a published TransformerXL"),
    "lm-eval": ("lm_eval", "run lm-evaluation-harness with our model and tasks registered"),
    "config": ("config", "list presets, or print one in full"),
    "completion": ("completion", "print a script that completes commands, presets and flags in bash or zsh"),
}
"""Command to module of this package and description; the module's `main` takes the remaining arguments."""
KINDS = {"INT": "a whole number", "FLOAT": "a number", "{[INT [INT ...]]}": "several, one per layer"}
"""Tyro's names of types, in words."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to `sys.argv[1:]`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    console.set_quiet("--quiet" in words)
    words = [word for word in words if word != "--quiet"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning(warnings.showwarning)
            return _dispatch(words)
    except KeyboardInterrupt:
        print("compressive: interrupted", file=sys.stderr)
        return INTERRUPTED


def _show_warning(other: Callable[..., None]) -> Callable[..., None]:
    """Return what shows a warning to users as a line without a place in the code; `other` shows those to developers."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category is UserWarning:
            console.warn(str(message))
        else:
            other(message, category, *place, **more)

    return show


def _dispatch(words: list[str]) -> int:
    for count in (3, 2, 1):
        name = " ".join(words[:count])
        if name in COMMANDS:
            module = import_module(f"compressive.cli.{COMMANDS[name][0]}")
            code: int = module.main(words[count:], prog=f"compressive {name}")
            return code
    if words[:1] == ["--version"]:
        print(f"compressive {__version__}")
        return 0
    asked = [word for word in words if word not in ("-h", "--help", "help")]
    group = " ".join(asked)
    listed = [name for name in COMMANDS if not group or name.startswith(f"{group} ")]
    if listed:  # no words, or the beginning of a command: `data`, `data pg19`, `rl`
        print(_overview(listed))
        return 0
    wrong = " ".join(word for word in words[:3] if not word.startswith("-")) or words[0]
    print(f"compressive: no command {wrong!r}{perhaps(wrong, COMMANDS)}; compressive --help lists all", file=sys.stderr)
    return 2


def _overview(names: list[str]) -> str:
    width = max(map(len, names))
    lines = [f"  compressive {name:<{width}}   {COMMANDS[name][1]}" for name in names]
    notes = (
        "Add --help to a command for its options, --quiet for results and errors only. --version prints the version."
    )
    return "\n".join([f"The Compressive Transformer, version {__version__}.", "", *lines, "", notes])


def perhaps(word: str, known: Iterable[str]) -> str:
    """Return a suggestion of what was meant, to go into an error message, or nothing."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    if not close:  # `evaluate runs/x` with a typo: compare the first word alone
        close = difflib.get_close_matches(word.split(" ")[0], [name for name in known if " " not in name], n=1)
    return f" (did you mean {close[0]}?)" if close else ""


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


def given_fields(arguments: list[str]) -> set[str]:
    """Return the configuration fields that flags set: `--model.vocab-size 8000` sets `model.vocab_size`."""
    flags = [word.split("=")[0] for word in arguments if word.startswith("--")]
    return {flag[2:].replace("-", "_").replace(".no_", ".") for flag in flags}


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


def parse(
    options: Any,
    arguments: list[str],
    prog: str,
    description: str,
    renamed: Mapping[str, str] | None = None,
    **more: Any,
) -> Any:
    """Parse arguments into the dataclass `options`; --help prints and exits.

    `renamed` maps flags of version 0.1 to their current names, `more` goes to tyro. Raises ValueError, in one line, for
    arguments that do not fit.
    """
    import contextlib
    import io

    import tyro

    words, said = with_new_flags(arguments, renamed), io.StringIO()
    raised: list[tuple[Any, ...]] = []
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.showwarning = lambda *warning, **_: raised.append(warning)
            found = tyro.cli(options, args=words, prog=prog, description=f"{description} --quiet: print less.", **more)
    except SystemExit as error:
        if not error.code:
            raise
        raise ValueError(f"{_one_line(said.getvalue())}; see {prog} --help") from None
    for warning in raised:
        warnings.showwarning(*warning)
    return found


def _one_line(box: str) -> str:
    """Return the message of tyro's error box: its first section, and the closest of the flags that it suggests."""
    import difflib

    lines = [line.strip("│").rstrip() for line in box.strip().splitlines() if not line.startswith(("╭", "╰"))]
    sections: list[list[str]] = [[]]
    for line in filter(None, lines):
        if set(line.strip()) <= {"─", "-"}:
            sections.append([])
        else:
            sections[-1].append(line)
    if not box.startswith("╭"):  # without UTF-8 the title is a section, not part of the border
        sections = sections[1:] or sections
    message = " ".join(line.strip() for line in sections[0])
    if message.startswith("Missing from"):  # the arguments are indented less than what is said about them
        indents = [len(line) - len(line.lstrip()) for line in sections[0]]
        named = [line.strip() for line, indent in zip(sections[0], indents, strict=True) if indent == indents[1]]
        message = "missing " + ", ".join(named)
    for section in sections[1:]:
        if section and section[0].strip().startswith("Perhaps you meant"):
            flags = [word for word in " ".join(section).split() if word.startswith("--")]
            wrong = next((word for word in message.replace(",", " ").split() if word.startswith("--")), "")
            closest = max(flags, key=lambda flag: difflib.SequenceMatcher(None, wrong, flag).ratio())
            message += f" (did you mean {closest}?)"
    message = re.sub(r"^Error parsing [\w.]+: (?=\w+=)", "", message)  # our own checks name the field
    if misfit := re.match(r"Error parsing (--[\w.-]+): (.*)", message):
        message = _in_words(misfit[1], misfit[2])
    return message[:1].lower() + message[1:].rstrip(".") if message else "arguments that do not fit"


def _in_words(flag: str, reason: str) -> str:
    """Return in the form of our own checks why tyro takes a value for no number; other reasons as they are."""
    if found := re.match(r"invalid literal for int\(\) with base 10: (.*)", reason):
        return f"{flag}={found[1].rstrip('.')}: expected {KINDS['INT']}"
    if found := re.match(r"could not convert string to float: (.*)", reason):
        return f"{flag}={found[1].rstrip('.')}: expected {KINDS['FLOAT']}"
    if found := re.match(r"no type matching (.*) could be instantiated from \[(.*?)\]\.", reason):
        kinds = (KINDS.get(kind, kind.strip("{}")) for kind in found[1].split("|"))
        return f"{flag}={found[2]}: expected {' or '.join(kinds)}"
    return f"{flag}: {reason}"


def run(
    function: Callable[[Options], int],
    options: type[Options],
    arguments: list[str],
    prog: str,
    description: str,
    renamed: Mapping[str, str] | None = None,
) -> int:
    """Parse the arguments into `options`, call the function and return its exit code; see `parse` and `guarded`."""
    return guarded(lambda: function(parse(options, arguments, prog, description, renamed)), prog)


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
        message = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:  # without the number of the error
            message = f"{error.filename}: {error.strerror}"
        print(f"{prog}: {message}", file=sys.stderr)
        return 2
