"""Print a script that completes commands, presets and flags.

compressive completion bash > ~/.local/share/bash-completion/completions/compressive
compressive completion zsh > ~/.compressive-completion.zsh    # then `source` it from ~/.zshrc
"""

import contextlib
import io
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from tyro.conf import Positional

from compressive.cli import COMMANDS, run
from compressive.config import preset_names

PRESETS = {"train": "data", "rl train": "task", "config": None, "bench": None}
"""Commands whose first argument is a preset, and the table that it must hold."""


@dataclass(frozen=True)
class Completion:
    """Print a completion script."""

    shell: Positional[Literal["bash", "zsh"]]
    """The shell to write it for."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and print."""
    about = "Print a script that completes commands, presets, flags and files, to be sourced by the shell."
    return run(show, Completion, arguments, prog, about)


def show(options: Completion) -> int:
    """Print the script; zsh runs bash's through bashcompinit."""
    head = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" if options.shell == "zsh" else ""
    print(head + SCRIPT.replace("@CASES@", "\n".join(_case(name) for name in COMMANDS)))
    return 0


def _case(name: str) -> str:
    """One branch of the script: what can follow a command."""
    words = sorted(_flags(name))
    if name in PRESETS:
        words = [*preset_names(PRESETS[name]), *words]
    return f'    "{name}") words="{" ".join(words)}" ;;'


def _flags(name: str) -> set[str]:
    """The flags of a command, as its --help lists them."""
    shown = io.StringIO()
    module = import_module(f"compressive.cli.{COMMANDS[name][0]}")
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        module.main(["--help"], prog=f"compressive {name}")
    return {"--help", "--quiet", *re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", shown.getvalue())}


SCRIPT = f"""\
_compressive() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[*]:1:COMP_CWORD-1}}" words="" name
  for name in "${{COMP_WORDS[*]:1:3}}" "${{COMP_WORDS[*]:1:2}}" "${{COMP_WORDS[*]:1:1}}"; do
    case "$name" in
@CASES@
    esac
    [ -n "$words" ] && break
  done
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current"))
    return
  fi
  for name in {" ".join(repr(name) for name in COMMANDS)}; do
    [ -n "$before" ] && case "$name" in "$before "*) name="${{name#"$before "}}" ;; *) continue ;; esac
    case "$words " in *" ${{name%% *}} "*) ;; *) words="$words ${{name%% *}}" ;; esac
  done
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o filenames -F _compressive compressive
"""
