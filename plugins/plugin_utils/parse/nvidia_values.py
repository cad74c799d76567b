"""Values as NVIDIA's tools print them: units, and the many ways to say that there is none."""

from __future__ import annotations

import functools
import re
from datetime import datetime

# Texts that stand where a value should be. Bracketed ones ([N/A], [GPU requires reset]) are caught by their brackets.
_NO_VALUE = frozenset(
    {
        "",
        "n/a",
        "err!",
        "??",
        "unknown",
        "unknown error",
        "not found",
        "no data",
        "not supported",
        "function not found",
        "gpu requires reset",
        "gpu is lost",
        "insufficient permissions",
        "in use by another client",
        "requested functionality has been deprecated",
        "uninitialized",
    }
)
# Most cells of most GPUs hold the same few texts.
_remembered = functools.lru_cache(maxsize=4096)
_NUMBER = re.compile(r"(-?\d{1,15})(\.\d{1,9})?\s*(?:MiB|W|C|%|x|MHz|us|KB/s)?")


@_remembered
def value(text: str | None) -> str | None:
    """Return the text of a cell, or None where it holds no value (``[N/A]``, ``ERR!``, ``GPU requires reset``)."""
    if text is None:
        return None
    bare = text.strip()
    if bare.startswith("[") or bare.lower() in _NO_VALUE:
        return None
    return bare


@_remembered
def number(text: str | None) -> float | None:
    """Return the number of a cell with or without its unit, or None where there is none."""
    found = _NUMBER.fullmatch(value(text) or "")
    return float(found[1] + (found[2] or "")) if found else None


@_remembered
def whole(text: str | None) -> int | None:
    """Return the whole number of a cell, or None where there is none."""
    given = number(text)
    return None if given is None else int(given)


@_remembered
def mode(text: str | None) -> str | None:
    """Return ``Enabled`` or ``Disabled`` for a switch however it is written, or None."""
    given = (value(text) or "").lower()
    return {"enabled": "Enabled", "on": "Enabled", "disabled": "Disabled", "off": "Disabled"}.get(given)


@_remembered
def flag(text: str | None) -> str | None:
    """Return ``Yes`` or ``No`` for a cell that says one of them (or 1 and 0, as CSV does), or None."""
    return {"yes": "Yes", "1": "Yes", "true": "Yes", "no": "No", "0": "No", "false": "No"}.get(
        (value(text) or "").lower()
    )


def program(text: str | None) -> str:
    """Return the name of a program without its folder and without arguments, which may hold secrets; "" for none."""
    words = (value(text) or "").split()
    return words[0].rsplit("/", 1)[-1] if words else ""


def seconds(text: str | None) -> float | None:
    """Return a time stamp of a CSV (``2026/07/14 09:00:44.742``) in seconds since an arbitrary moment, or None."""
    for form in ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S"):
        try:
            return (datetime.strptime((text or "").strip(), form) - datetime(2000, 1, 1)).total_seconds()
        except ValueError:
            continue
    return None
