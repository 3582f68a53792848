"""Entry point of `python -m compressive` and of the script `compressive`."""

from typing import NoReturn

from compressive.cli import leave, main


def command() -> NoReturn:
    """Run the command line and exit."""
    leave(main())


if __name__ == "__main__":
    command()
