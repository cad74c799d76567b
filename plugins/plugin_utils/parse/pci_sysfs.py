"""The evidence source ``sysfs.pci``: one block per PCI function with what ``/sys/bus/pci/devices`` says of it."""

from __future__ import annotations

import functools
import re

from ..core.snapshot import PciFunction, Region, Window
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
_IORESOURCE_WINDOW = 0x00200000
_STANDARD_BARS = 6
_LARGEST_CONFIG = 4096
_LONGEST_BLOCK = 4 * _LARGEST_CONFIG

_COUNTER = re.compile(r"([A-Za-z_]\w*) (\d{1,18})\b")
_COLLECTED = re.compile(r"\[[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\](?:\n[a-z]\w*:[^\n\r\x1b\u00a0]*)*")
_SECTION = re.compile(r"===.*?((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")


def functions(text: str) -> dict[str, PciFunction]:
    """Return the functions by address."""
    found = _collected(text)
    return found if found is not None else {bdf: _function(bdf, keys) for bdf, keys in _blocks(text).items()}


def _collected(text: str) -> dict[str, PciFunction] | None:
    """Read what the collector wrote, block by block; None where a person's hand is in it."""
    found: dict[str, PciFunction] = {}
    for block in text.rstrip("\n").split("\n\n"):
        one = _block(block) if len(block) < _LONGEST_BLOCK else None
        if one is None or one.bdf in found:
            return None
        found[one.bdf] = one
    return found


@functools.lru_cache(maxsize=4096)
def _block(text: str) -> PciFunction | None:
    """Read one block as the collector writes it. Machines of one kind share most of their blocks."""
    if not _COLLECTED.fullmatch(text):
        return None
    ((bdf, keys),) = _blocks(text).items()
    return _function(bdf, keys)


def _blocks(text: str) -> dict[str, dict[str, str]]:
    blocks: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    titled: str | None = None
    last = ""
    for row in lines(text):
        header = _HEADER.fullmatch(row.strip())
        bdf = address(header[1]) if header else None
        if bdf:
            current = blocks.setdefault(bdf, {})
        elif row.startswith("==="):
            # An operator's own heading: what follows is not sysfs, but may say that the function is dead.
            section = _SECTION.match(row)
            titled = address(section[1]) if section else None
            current = None
        elif "!!! Unknown header type 7f" in row and titled and current is None:
            blocks.setdefault(titled, {})["header_type"] = "7f"
        elif current is not None:
            key, colon, given = row.strip().partition(":")
            if colon:
                last = key.strip()
                current.setdefault(last, given.strip())
            elif key:
                current.pop(last, None)  # a terminal broke this line: half a value is none
    return blocks


def is_complete(found: dict[str, PciFunction]) -> bool:
    """Whether every block has what the collector always writes: then no function of the machine is missing."""
    return bool(found) and all(one.vendor and one.class_code for one in found.values())


def _function(bdf: str, keys: dict[str, str]) -> PciFunction:
    config = _config(keys)
    width = whole_number(keys.get("current_link_width"))
    link = pci_config.link(config)
    windows = pci_config.windows(config) or _windows(keys.get("resource", ""))
    header = keys.get("header_type") or pci_config.header_type(config)
    return PciFunction(
        bdf=bdf,
        vendor=_hex(keys.get("vendor"), 4),
        device=_hex(keys.get("device"), 4),
        class_code=(_hex(keys.get("class"), 6) or "")[:4] or None,
        driver=keys.get("driver"),
        regions=_regions(keys.get("resource", "")),
        link_speed_gt=_speed(keys.get("current_link_speed")) or (link.speed_gt if link else None),
        link_width=_width(width) or (_width(link.width) if link else None),
        link_raw_width=width,
        link_max_speed_gt=_speed(keys.get("max_link_speed")) or (link.max_speed_gt if link else None),
        link_max_width=_width(whole_number(keys.get("max_link_width"))) or (link.max_width if link else None),
        port_type=link.port_type if link else "",
        secondary_bus=pci_config.secondary_bus(config),
        window=windows[0] if windows else None,
        prefetchable_window=windows[1] if windows else None,
        ats=pci_config.ats_enabled(config),
        msi=pci_config.msi_enabled(config),
        aer=_counters(keys),
        aer_status=pci_config.error_status(config),
        lane_errors=pci_config.lane_errors(config),
        reset_methods=tuple(keys["reset_method"].split()) if "reset_method" in keys else None,
        power_state=keys.get("power_state"),
        d3cold_allowed=_flag(keys.get("d3cold_allowed")),
        boot_vga=_flag(keys.get("boot_vga")),
        header_type=header,
        numa_node=whole_number(keys.get("numa_node")),
        iommu_group=whole_number(keys.get("iommu_group")),
        bus_master=pci_config.bus_master(config),
        acs_cap=pci_config.acs_capability(config),
        acs_ctl=pci_config.acs_control(config),
        rebar=pci_config.resizable_bars(config),
        # A function that sleeps without power reads all ones too.
        off_bus=keys.get("power_state") != "D3cold"
        and (pci_config.is_gone(config) or width == GONE_WIDTH or header == "7f"),
        parent=address(keys.get("parent", "")),
        physfn=bool(keys.get("physfn")),
        config_hex=config.hex(),
        source="sysfs.pci",
    )


def _config(keys: dict[str, str]) -> bytes:
    """Return the configuration space: the collector leaves out zeros at the end and says how many bytes were read."""
    config = pci_config.read_hex(keys.get("config", ""))
    total = whole_number(keys.get("config_bytes"))
    return config.ljust(total, b"\0") if total and len(config) < total <= _LARGEST_CONFIG else config


def _counters(keys: dict[str, str]) -> dict[str, dict[str, int]] | None:
    """Return the error counters by severity. Absent files are a reading: the function reports no errors ({})."""
    found: dict[str, dict[str, int]] = {}
    asked = False
    for severity in ("correctable", "nonfatal", "fatal"):
        given = keys.get(f"aer_dev_{severity}")
        if given is None:
            continue
        asked = True
        counts = {name: int(count) for name, count in _COUNTER.findall(given)}
        if counts:
            found[severity] = counts
    return found if asked else None


def _flag(text: str | None) -> bool | None:
    return {"0": False, "1": True}.get(text or "")


def _windows(resource: str) -> tuple[Window | None, Window | None] | None:
    """Return the (memory, prefetchable memory) windows that ``resource`` gives for a bridge."""
    memory = prefetchable = None
    for row in resource.split(";")[_STANDARD_BARS + 1 :]:
        found = _RESOURCE.fullmatch(row.strip().lower())
        start, end, flags = (int(part, 16) for part in found.groups()) if found else (0, 0, 0)
        if flags & _IORESOURCE_WINDOW and flags & _IORESOURCE_MEM:
            if flags & _IORESOURCE_PREFETCH:
                prefetchable = Window(start, end)
            else:
                memory = Window(start, end)
    return (memory, prefetchable) if memory or prefetchable else None


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
