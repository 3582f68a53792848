"""Makes `python -m compressive` the command line, and is what the command `compressive` calls."""

from typing import NoReturn

from compressive.cli import leave, main


def command() -> NoReturn:
    """Run the words of the command line, and end."""
    leave(main())


if __name__ == "__main__":
    command()
