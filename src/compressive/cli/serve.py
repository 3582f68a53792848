"""Serve a web page on which one sees a model's memory work.

compressive serve
compressive serve runs/quickstart
compressive serve release --port 0 --open
"""

import importlib.util
import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from compressive.cli import run as run_command
from compressive.console import note


@dataclass(frozen=True)
class Serve:
    """The model to serve, and where."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN|RELEASE|NAME")] = "enwik8-small"
    """Folder of a run or release, or the name of a shipped model."""
    host: str = "127.0.0.1"
    """Address to listen on. Any that other machines reach, as 0.0.0.0, requires a token: the printed address has it."""
    port: int = 8642
    """Port to listen on; 0 takes any that is free."""
    open: bool = False
    """Open the page in a browser."""
    which: Literal["best", "last"] = "best"
    """Checkpoint to load: the one with the lowest validation loss, or the last."""
    device: str = "auto"
    """Device, e.g. cpu or cuda:0; auto: a GPU if there is one."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and serve."""
    description = (
        "Serve a local web page: text grows token by token, coloured by surprise; see where each head looked, and both "
        "memories fill, be compressed and be forgotten. Ctrl-C stops."
    )
    return run_command(serve, Serve, arguments, prog, description)


def serve(options: Serve) -> int:
    """Serve until Ctrl-C."""
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise ValueError("the page needs Starlette and uvicorn: pip install 'compressive[web]'")
    from compressive.web.server import listen, serve

    with listen(options.host, options.port) as bound:
        from compressive.api import load

        note(f"loading {options.run}")
        model = load(options.run, which=options.which, device=options.device)

        def listening(address: str) -> None:
            print(address)
            sys.stdout.flush()
            note("open it in a browser; Ctrl-C stops")
            if options.open:
                threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()  # one of text may block

        serve(model, Path(options.run).resolve().name, bound, options.host, listening)
    return 0
