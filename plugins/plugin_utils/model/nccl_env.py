"""Which NCCL variables a host gets, with the reason for each, and the literal text of the file.

NCCL reads its settings without any mercy: a blank, a quote or a lower-case level makes it ignore the line and say
nothing (``nccl.conf`` syntax measured on 2.32.3; ``NCCL_P2P_LEVEL`` compared with ``strcmp`` in ``src/graph/paths.cc``
of 2.30.7). So everything that it would ignore is refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import InputError

# src/graph/paths.cc of NCCL 2.30.7: the names it knows; an integer is legacy (0 LOC, 1 PIX, 2 PXB, 3 PHB, 4+ SYS).
P2P_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")

# Variables that Peerlane never writes on its own or for anybody, and why.
FORBIDDEN = {
    "NCCL_IGNORE_DISABLED_P2P": "it makes NCCL use peer access that the driver refuses",
    "NCCL_P2P_USE_CUDA_MEMCPY": "wrong results were reported with it",
    "NCCL_SHM_DISABLE": "traffic inside the host falls to sockets",
}

_NAME = re.compile(r"NCCL_[A-Z0-9_]+")
_VALUE = re.compile(r"[^\s\"'#]+")


@dataclass(frozen=True)
class Variable:
    """One variable to write: who wants it (``audit`` or ``user``) and why."""

    name: str
    value: str
    origin: str
    reason: str


def plan(
    advice: Mapping[str, Any] | None, extra: Mapping[str, Any], where: str = "nccl_settings_extra"
) -> tuple[Variable, ...]:
    """Join what the audit justifies with what the user asks for; the user's value wins.

    ``advice`` is ``peerlane.advice``: ``nccl_env`` {name: value} and ``reasons`` (texts). Raises InputError for a name
    or a value that NCCL would ignore, or that Peerlane does not write.
    """
    chosen: dict[str, Variable] = {}
    if advice:
        reasons = "; ".join(str(reason) for reason in advice.get("reasons") or ())
        for name, value in (advice.get("nccl_env") or {}).items():
            chosen[name] = Variable(name, str(value), "audit", reasons)
    for name, value in extra.items():
        text = _literal(value)
        _check(name, text, where)
        chosen[name] = Variable(name, text, "user", f"set in {where}")
    return tuple(chosen[name] for name in sorted(chosen))


def file_text(variables: tuple[Variable, ...]) -> str:
    """Return the environment file: ``NAME=value`` lines and nothing else."""
    return "".join(f"{one.name}={one.value}\n" for one in variables)


def provenance_text(variables: tuple[Variable, ...]) -> str:
    """Return the side file that says why each variable is there. No time in it: it changes only with its content."""
    shape = {
        "schema": "peerlane.nccl_settings/1",
        "variables": {one.name: {"value": one.value, "origin": one.origin, "reason": one.reason} for one in variables},
    }
    return json.dumps(shape, indent=1, sort_keys=True) + "\n"


def _literal(value: Any) -> str:
    # YAML turns a bare 1 into an integer and a bare yes into a boolean; NCCL knows only the digit.
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value)


def _check(name: str, value: str, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no NCCL variable", where, "names are NCCL_ and capitals, as NCCL prints them")
    if name in FORBIDDEN:
        raise InputError(f"{name} is not written: {FORBIDDEN[name]}", where, "remove it")
    if not _VALUE.fullmatch(value):
        raise InputError(
            f"{name} has the value {value!r}, which NCCL reads literally and ignores",
            where,
            "no blanks, quotes or comments",
        )
    if name == "NCCL_P2P_LEVEL" and value not in P2P_LEVELS and not value.isdigit():
        close = [level for level in P2P_LEVELS if level == value.upper()]
        todo = f"did you mean {close[0]}?" if close else f"one of {', '.join(P2P_LEVELS)}"
        raise InputError(f"NCCL_P2P_LEVEL has the value {value!r}, which NCCL ignores without a word", where, todo)
    if name == "NCCL_P2P_DISABLE" and value not in ("0", "1"):
        raise InputError(f"NCCL_P2P_DISABLE has the value {value!r}; only the digit 1 disables", where, "write 0 or 1")
