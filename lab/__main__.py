"""`python -m peerlane.lab`: the lab without the rest of the command line."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
