"""NCCL's settings as NCCL itself reads them, and what its log tells."""

from __future__ import annotations

import re
import shlex

from ..core.snapshot import Setting
from .text import lines

_UNIT = re.compile(r"# ==> unit (\S+) <==")
_ENVIRONMENT = re.compile(r"\s*Environment[= ](.*)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+[\w.+]*)|using nccl==(\d+\.\d+[\w.+]*)")


def conf(text: str, origin: str) -> tuple[Setting, ...]:
    """Read ``nccl.conf`` as literally as NCCL does.

    Nothing is trimmed: ``NCCL_ALGO = Ring`` sets a variable whose name ends in a blank, quotes and ``# comments``
    behind a value belong to the value. Names are kept as NCCL would see them, so that a rule can say so.
    """
    settings = []
    for row in text.replace("\r\n", "\n").split("\n"):
        name, equals, value = row.partition("=")
        if equals and not row.startswith("#"):
            settings.append(Setting(name, value, origin))
    return tuple(settings)


def services(text: str) -> tuple[Setting, ...]:
    """Read the ``Environment NCCL_X=value`` lines of the source ``peerlane.services``, and of unit files."""
    settings: list[Setting] = []
    unit = ""
    for row in lines(text):
        header = _UNIT.fullmatch(row.strip())
        if header:
            unit = header[1]
            continue
        found = _ENVIRONMENT.fullmatch(row)
        for word in _words(found[1]) if found else []:
            name, equals, value = word.partition("=")
            if equals and name.startswith("NCCL_"):
                settings.append(Setting(name, value, f"unit {unit}" if unit else "unit file"))
    return tuple(settings)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        # An unbalanced quote: the line was cut.
        return []


def log_version(text: str) -> str | None:
    """Return the version that an NCCL log names, with its CUDA: ``2.26.5+cuda12.9``."""
    found = _VERSION.search(text)
    return (found[1] or found[2]) if found else None
