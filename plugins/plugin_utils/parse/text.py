"""What every parser needs: clean lines, PCI addresses, and a way to refuse."""

from __future__ import annotations

import re
from collections.abc import Callable

# Terminal colours, window titles and character set switches, as `script` and copied terminals leave them.
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][0-9A-B]")
_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?")
_SIZE = re.compile(r"(\d+)\s*([KMGTPE]?)(?:i?B)?", re.IGNORECASE)
_FILE_HEADER = re.compile(r"# ==> (.+?) <==")

EXCERPT_LINES = 12
# Columns of a terminal that breaks lines; a longest line below that was not broken.
NARROWEST = 60


class RefusedError(ValueError):
    """The text is not what this parser reads. The message says why, in words for a person."""


def lines(text: str) -> list[str]:
    """Return the lines of a paste as the tool printed them.

    Takes away what copying adds: ANSI escapes, carriage returns, a byte order mark, Markdown quote marks, the
    indentation that all lines share, and blanks at the end of a line.
    """
    text = text.lstrip("\ufeff")
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    rows = [row.rstrip() for row in text.split("\n")]
    filled = [row for row in rows if row]
    if filled and all(row.startswith(">") for row in filled):
        rows = [row[2:] if row.startswith("> ") else row[1:] for row in rows]
        filled = [row for row in rows if row]
    indent = _shared_indent(filled)
    return [row[indent:] for row in rows] if indent else rows


def _shared_indent(rows: list[str]) -> int:
    shared: str | None = None
    for row in rows:
        margin = row[: len(row) - len(row.lstrip())]
        if shared is None:
            shared = margin
        while not margin.startswith(shared):
            shared = shared[:-1]
        if not shared:
            return 0
    return len(shared or "")


def rejoined(rows: list[str], starts: Callable[[str], object]) -> list[str]:
    """Return lines that a terminal broke in one piece again.

    ``starts`` says whether a line can begin an entry. One that can't goes on where a line as wide as the terminal
    ended; a blank that stood at the break was lost with the end of that line.
    """
    lengths = list(map(len, rows))
    width = max(lengths, default=0)
    full = [at for at, length in enumerate(lengths[:-1], 1) if length >= width - 1] if width >= NARROWEST else []
    if not any(rows[at] and not starts(rows[at]) for at in full):
        return rows
    joined: list[str] = []
    gap = width
    for row in rows:
        if width >= NARROWEST and gap <= 1 and row and not starts(row):
            joined[-1] = f"{joined[-1]}{' ' * gap}{row}"
        else:
            joined.append(row)
        gap = width - len(row)
    return joined


def address(text: str) -> str | None:
    """Return a PCI address as sysfs writes it (``0000:01:00.0``), or None where the text is none.

    The domain may be left out or have eight digits; a function that is left out stays out.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if not found:
        return None
    domain, bus, device, function = found.groups()
    head = f"{int(domain or '0', 16):04x}:{bus}:{device}".lower()
    return head if function is None else f"{head}.{function}"


def size_bytes(text: str) -> int | None:
    """Return the bytes of ``128G``, ``64MB``, ``8EB`` or ``4096`` (powers of 1024), or None."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        return None
    power = " KMGTPE".index(found[2].upper() or " ")
    return int(found[1]) * int(1024**power)


def first_line(text: str, pattern: str) -> str:
    """Return the first line that a regular expression finds, verbatim, or ""."""
    found = re.search(pattern, text, re.MULTILINE | re.IGNORECASE)
    if not found:
        return ""
    start = text.rfind("\n", 0, found.start()) + 1
    end = text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)].strip("\r\n ")


def shorten(rows: list[str]) -> str:
    """Return lines as an excerpt: the first ones, and how many were left out."""
    if len(rows) <= EXCERPT_LINES:
        return "\n".join(rows)
    return "\n".join([*rows[: EXCERPT_LINES - 1], f"... {len(rows) - EXCERPT_LINES + 1} more lines"])


def whole_number(text: str | None) -> int | None:
    """Return a decimal whole number, or None for anything else."""
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text.strip()) else None


def files(text: str) -> list[tuple[str, str]]:
    """Split the text of a ``files`` source at its ``# ==> PATH <==`` lines into (path, text).

    Text before the first such line comes with the path "".
    """
    parts: list[tuple[str, list[str]]] = [("", [])]
    for row in lines(text):
        header = _FILE_HEADER.fullmatch(row.strip())
        if header:
            parts.append((header[1], []))
        else:
            parts[-1][1].append(row)
    return [(path, "\n".join(rows)) for path, rows in parts if path or any(row.strip() for row in rows)]
