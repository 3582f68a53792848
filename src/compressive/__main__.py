"""Makes `python -m compressive` the command line."""

import sys

from compressive.cli import main

if __name__ == "__main__":
    sys.exit(main())
