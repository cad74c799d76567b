"""Draw what a terminal showed as an SVG, colours included: `python docs/picture.py TITLE OUT.svg < recording`.

The pictures of the README are real runs, recorded with `script -qec COMMAND` or from a log, never typed by hand.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def picture(recorded: str, title: str, width: int) -> str:
    """Return the SVG of a recorded terminal."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text.from_ansi(recorded.replace("\r\n", "\n")), soft_wrap=False)
    # Without the web fonts that the template names: a picture fetches nothing.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)


def main() -> int:
    """Read a recording and write its picture."""
    title, place = sys.argv[1:]
    recorded = sys.stdin.read()
    width = min(110, max(len(Text.from_ansi(line)) for line in recorded.splitlines() or [""]) + 1)
    Path(place).write_text(picture(recorded, title, width), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
