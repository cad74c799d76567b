"""``lspci -t``: which port each function hangs below, read from the drawing's columns."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..core.snapshot import PciFunction
from .lspci import ids
from .text import lines

_LINES = re.compile(r"[\s|+\\-]*")
_BUS = re.compile(r"\[(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2})(?:-[0-9a-fA-F]{2})?\]")
_DEVICE = re.compile(r"([0-9a-fA-F]{2}\.[0-7])(?![0-9a-fA-F])")


@dataclass(frozen=True)
class _Bus:
    column: int
    domain: str
    number: str
    port: str | None


def functions(text: str) -> dict[str, PciFunction]:
    """Return the functions of the tree by address, with ``parent``; names and ids where the tree has them (-v, -nn)."""
    found: dict[str, PciFunction] = {}
    stack: list[_Bus] = []
    for row in lines(text):
        at, device = 0, None
        while True:
            at = _end(_LINES.match(row, at), at)
            bus, slot = _BUS.match(row, at), _DEVICE.match(row, at)
            if bus:
                stack = [one for one in stack if one.column < at]
                above = stack[-1] if stack else None
                domain = f"{int(bus[1], 16):04x}" if bus[1] else above.domain if above else "0000"
                stack.append(_Bus(at, domain, bus[2].lower(), device if not bus[1] else None))
                at = bus.end()
            elif slot:
                stack = [one for one in stack if one.column < at]
                device = _add(found, stack, slot[1])
                at = slot.end()
            else:
                break
        if device in found and row[at:].strip():
            name = row[at:].strip()
            vendor, number = ids(name)
            found[device] = replace(found[device], vendor=vendor, device=number, name=name)
    return found


def _end(match: re.Match[str] | None, at: int) -> int:
    return match.end() if match else at


def _add(found: dict[str, PciFunction], stack: list[_Bus], slot: str) -> str | None:
    if not stack:
        # The line of its bus was not pasted: the address is not known.
        return None
    bus = stack[-1]
    bdf = f"{bus.domain}:{bus.number}:{slot.lower()}"
    found[bdf] = PciFunction(bdf=bdf, parent=bus.port, source="lspci.t")
    return bdf
