"""IOMMU units and groups: the evidence source ``sysfs.iommu``, and the listings that people's own scripts print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.snapshot import KernelLog, PciFunction
from . import lspci
from .text import RefusedError, address, lines

_UNIT = re.compile(r"unit (\S+)")
_GROUP = re.compile(r"group (\d+) type (\S+) devices\s*(.*)")
_HEAD = re.compile(r"(?:iommu[_ ]?)?group:?\s+(\d+):?\s*(.*)", re.IGNORECASE)
_TABLE = re.compile(r"(\d+)[\t ]+((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])[\t ]+(.*)")
_PATH = re.compile(r"/iommu_groups/(\d+)/devices/([0-9a-fA-F:.]+)")
_DEVICE = re.compile(r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\b[\t ]*(.*)")
_DEFAULT_DOMAIN = re.compile(r"iommu: Default domain type: (\w+)", re.IGNORECASE)


@dataclass
class IommuReading:
    """What one source says. ``units`` is None where the source does not speak of units."""

    units: tuple[str, ...] | None = None
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    functions: dict[str, PciFunction] = field(default_factory=dict)


def sysfs(text: str) -> IommuReading:
    """Read ``sysfs.iommu``: ``unit dmar0`` and ``group 14 type DMA-FQ devices BDF BDF``. Empty text: IOMMU off."""
    reading = IommuReading()
    units = []
    for row in lines(text):
        unit, group = _UNIT.fullmatch(row), _GROUP.fullmatch(row)
        if unit:
            units.append(unit[1])
        elif group:
            reading.groups[group[1]] = tuple(bdf for word in group[3].split() if (bdf := address(word)))
            reading.types[group[1]] = group[2]
    reading.units = tuple(units)
    return reading


def listing(text: str) -> IommuReading:
    """Read a listing of groups in any of the usual shapes and in any order.

    ``IOMMU group 7`` with the devices below or behind it, a table ``7<tab>00:1b.0<tab>...``, or the paths that
    ``find /sys/kernel/iommu_groups -type l`` prints. Device lines in lspci's words also tell class and ids.
    """
    groups: dict[str, list[str]] = {}
    functions: dict[str, PciFunction] = {}
    current: str | None = None
    for row in lines(text):
        bare = row.strip()
        path, head, table = _PATH.search(bare), _HEAD.fullmatch(bare), _TABLE.fullmatch(bare)
        if path and address(path[2]):
            groups.setdefault(path[1], []).append(address(path[2]) or "")
            continue
        if head:
            current, bare = head[1], head[2]
            groups.setdefault(current, [])
        elif table:
            current, bare = table[1], f"{table[2]} {table[3]}"
            groups.setdefault(current, [])
        device = _DEVICE.match(bare)
        bdf = address(device[1]) if device else None
        if device and bdf and current is not None:
            groups[current].append(bdf)
            function = lspci.header_function(device[1], device[2].replace("\t", " "))
            if function:
                functions[bdf] = function
    if not groups:
        raise RefusedError("lists no IOMMU group")
    return IommuReading(groups={group: tuple(bdfs) for group, bdfs in groups.items()}, functions=functions)


def default_domain(log: KernelLog) -> tuple[str, str] | None:
    """Return (``Translated`` or ``Passthrough``, the line). Printed with ``iommu=off`` too: no proof by itself."""
    for line in reversed(log.notes.get("default_domain", ())):
        found = _DEFAULT_DOMAIN.search(line.text)
        if found:
            return found[1].capitalize(), line.text
    return None


def groups_of(functions: Mapping[str, PciFunction]) -> dict[str, tuple[str, ...]]:
    """Return the groups that the functions themselves name, where no listing was read."""
    groups: dict[str, list[str]] = {}
    for bdf in sorted(functions):
        group = functions[bdf].iommu_group
        if group is not None and group >= 0:
            groups.setdefault(str(group), []).append(bdf)
    return {group: tuple(bdfs) for group, bdfs in groups.items()}
