"""Run the command line as ``python -m peerlane``."""

import sys

from peerlane.cli import main

sys.exit(main())
