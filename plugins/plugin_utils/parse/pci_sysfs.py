"""The evidence source ``sysfs.pci``: one block per PCI function with what ``/sys/bus/pci/devices`` says of it."""

from __future__ import annotations

import re

from ..core.snapshot import PciFunction, Region
from . import pci_config
from .lspci import GONE_WIDTH
from .text import address, lines, whole_number

# Also `--- 0000:03:00.0 ---`, as operators' own scripts head such blocks.
_HEADER = re.compile(r"(?:\[|-{2,}\s*)([0-9a-fA-F:.]{7,16})(?:\]|\s*-{2,})")
_SPEED = re.compile(r"(\d{1,3}(?:\.\d+)?) GT/s(?: PCIe)?")
_RESOURCE = re.compile(r"0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16})")

# linux/ioport.h
_IORESOURCE_MEM = 0x00000200
_IORESOURCE_PREFETCH = 0x00002000
_STANDARD_BARS = 6


def functions(text: str) -> dict[str, PciFunction]:
    """Return the functions by address."""
    blocks: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for row in lines(text):
        header = _HEADER.fullmatch(row.strip())
        bdf = address(header[1]) if header else None
        if bdf:
            current = blocks.setdefault(bdf, {})
        elif row.startswith("==="):
            current = None
        elif current is not None:
            key, colon, given = row.strip().partition(":")
            if colon:
                current.setdefault(key.strip(), given.strip())
    return {bdf: _function(bdf, keys) for bdf, keys in blocks.items()}


def is_complete(found: dict[str, PciFunction]) -> bool:
    """Whether every block has what the collector always writes: then no function of the machine is missing."""
    return bool(found) and all(one.vendor and one.class_code for one in found.values())


def _function(bdf: str, keys: dict[str, str]) -> PciFunction:
    config = pci_config.read_hex(keys.get("config", ""))
    width = whole_number(keys.get("current_link_width"))
    return PciFunction(
        bdf=bdf,
        vendor=_hex(keys.get("vendor"), 4),
        device=_hex(keys.get("device"), 4),
        class_code=(_hex(keys.get("class"), 6) or "")[:4] or None,
        driver=keys.get("driver"),
        regions=_regions(keys.get("resource", "")),
        link_speed_gt=_speed(keys.get("current_link_speed")),
        link_width=_width(width),
        link_max_speed_gt=_speed(keys.get("max_link_speed")),
        link_max_width=_width(whole_number(keys.get("max_link_width"))),
        numa_node=whole_number(keys.get("numa_node")),
        iommu_group=whole_number(keys.get("iommu_group")),
        bus_master=pci_config.bus_master(config),
        acs_ctl=pci_config.acs_control(config),
        off_bus=pci_config.is_gone(config) or width == GONE_WIDTH,
        parent=address(keys.get("parent", "")),
        physfn=bool(keys.get("physfn")),
        config_hex=config.hex(),
        source="sysfs.pci",
    )


def _hex(text: str | None, digits: int) -> str | None:
    found = re.fullmatch(rf"0x([0-9a-fA-F]{{{digits}}})", text or "")
    return found[1].lower() if found else None


def _speed(text: str | None) -> float | None:
    found = _SPEED.fullmatch(text or "")
    return float(found[1]) if found else None


def _width(width: int | None) -> int | None:
    return width if width not in (0, GONE_WIDTH) else None


def _regions(resource: str) -> dict[int, Region]:
    """Read ``start end flags`` of the six standard BARs. A start of zero means that the kernel found no place."""
    regions = {}
    for index, row in enumerate(resource.split(";")[:_STANDARD_BARS]):
        found = _RESOURCE.fullmatch(row.strip().lower())
        if not found:
            continue
        start, end, flags = (int(part, 16) for part in found.groups())
        if flags & _IORESOURCE_MEM:
            size = end - start + 1 if end > start else None
            regions[index] = Region(index, size, start or None, bool(flags & _IORESOURCE_PREFETCH))
    return regions
