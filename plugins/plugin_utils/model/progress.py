"""One line of progress for what takes long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def size_text(count: float) -> str:
    """Return bytes in the unit that a person would use (1 GB is 1e9 bytes)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def duration_text(seconds: float) -> str:
    """Return seconds as ``9 s``, ``3 min 20 s`` or ``1 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def transfer_line(step: Mapping[str, Any], elapsed_s: float) -> str:
    """Say how much of a model is on a host. ``step`` holds ``done_bytes`` and ``total_bytes``."""
    done, total = int(step.get("done_bytes") or 0), int(step.get("total_bytes") or 0)
    share = f" ({100 * done // total} %)" if total else ""
    return f"model files: {size_text(done)} of {size_text(total)}{share} after {duration_text(elapsed_s)}"
