"""Where results and complaints go: results to stdout or a file, everything else to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError

EXIT_OK, EXIT_BLOCKING, EXIT_USAGE, EXIT_FAILED, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130


def write_result(text: str | Iterable[str], place: Path | None = None) -> None:
    """Write a result, whole or in pieces, to a file or to stdout. A reader that has gone (``| head``) is no error."""
    pieces = [text] if isinstance(text, str) else text
    if place is not None:
        try:
            with place.open("w", encoding="utf-8") as stream:
                stream.writelines(pieces)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", str(place), "choose another -o FILE") from None
        return
    for piece in pieces:
        _write(sys.stdout, piece)


def check_place(place: Path) -> None:
    """Refuse a result file that cannot be written, before the work whose result it is to hold."""
    todo = "choose another -o FILE"
    if place.is_dir():
        raise InputError("is a folder", str(place), todo)
    if not place.parent.is_dir():
        raise InputError("its folder does not exist", str(place), f"make it, or {todo}")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise InputError("cannot be written: Permission denied", str(place), todo)


def say(text: str) -> None:
    """Write a line of progress or complaint to stderr."""
    _write(sys.stderr, text + "\n")


def _write(stream: IO[str] | None, text: str) -> None:
    if stream is None:  # it was closed before Python started
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        # The interpreter flushes once more at its end, and must not complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError) and stream is sys.stdout:
            raise InputError(f"the result cannot be written: {error.strerror}", "stdout", "give -o FILE") from None


def state_folder() -> Path:
    """Return the folder that runs are kept in: ``$XDG_STATE_HOME/peerlane``."""
    base = os.environ.get("XDG_STATE_HOME") or ""
    # The XDG base directory specification says that a relative path there counts as not set.
    home = Path(base) if base.startswith("/") else Path("~/.local/state").expanduser()
    return home / "peerlane"
