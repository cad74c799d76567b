"""``lspci`` in any verbosity, whole or as an excerpt, with its indentation or without."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..core.snapshot import PciFunction, Region, Window
from .text import address, lines, size_bytes, whole_number

_HEADER = re.compile(r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\s+(\S.*)")
_CLASS = re.compile(r"([^:\[]{2,60}?)(?:\s*\[([0-9a-fA-F]{4})\])?:\s+(.*)")
_ID = re.compile(r"\[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\]")
_RAW_ID = re.compile(r"\bDevice ([0-9a-fA-F]{4})(?::([0-9a-fA-F]{4}))?\b")
_REVISION = re.compile(r"\(rev ([0-9a-fA-F]{2})\)")

_REGION = re.compile(
    r"Region (\d): Memory at (<\w+>|[0-9a-fA-F]+)(?: \((?:64|32)-bit, (non-prefetchable|prefetchable)\))?([^\n]*)"
)
_REGION_SIZE = re.compile(r"\[size=(\w+)\]")
_LINK = re.compile(r"Speed (\d{1,3}(?:\.\d{1,3})?)GT/s|Width x(\d{1,3})")
_FLAG = re.compile(r"(\w+)([+-])")
_REBAR = re.compile(r"BAR (\d): current size: (\w+), supported:(.*)")
# The rest of a list of sizes that a terminal broke.
_SIZES = re.compile(r"(?:\d{1,4}[KMGTPE]?B?|[KMGTPE]?B)(?: \d{1,4}[KMGTPE]?B?)*")
_ONE_SIZE = re.compile(r"\d+[KMGTPE]B")
_SECONDARY = re.compile(r"Bus: primary=[0-9a-fA-F]+, secondary=([0-9a-fA-F]+)")
_WINDOW = re.compile(
    r"(?:Memory|Prefetchable memory) behind bridge: (?:([0-9a-fA-F]+)-([0-9a-fA-F]+)|None|\[disabled\])(.*)"
)
_PORT_TYPE = re.compile(r"Express \(v\d\) ([A-Z][A-Za-z ]+?)(?: \(Slot[+-]\))?,")
_LANES = re.compile(r"LaneErr at lane: ([\d ]+)")
_POWER = re.compile(r"Status: (D[0-3](?:hot|cold)?)\b")
_PORT_TYPES = {
    "Root Port": "root port",
    "Upstream Port": "upstream port",
    "Downstream Port": "downstream port",
    "Endpoint": "endpoint",
    "Legacy Endpoint": "legacy endpoint",
    "Root Complex Integrated Endpoint": "integrated endpoint",
}
_HEX_ROW = re.compile(r"[0-9a-f]{2,3}: ((?:[0-9a-f]{2} ?){1,16})")

# Names of classes where lspci ran without -nn (pci.ids).
_CLASS_NAMES = {
    "VGA compatible controller": "0300",
    "3D controller": "0302",
    "Display controller": "0380",
    "PCI bridge": "0604",
    "Host bridge": "0600",
    "ISA bridge": "0601",
    "Bridge": "0680",
    "Audio device": "0403",
    "Multimedia audio controller": "0401",
    "USB controller": "0c03",
    "Serial bus controller": "0c80",
    "Ethernet controller": "0200",
    "Infiniband controller": "0207",
    "Non-Volatile memory controller": "0108",
}
# Names of vendors that matter here, where lspci ran without -nn.
_VENDOR_NAMES = {
    "NVIDIA Corporation": "10de",
    "Intel Corporation": "8086",
    "Advanced Micro Devices": "1022",
    "Mellanox Technologies": "15b3",
    "Broadcom / LSI": "1000",
    "PMC-Sierra": "11f8",
}
# QEMU's q35 host bridge and pci.ids' name for it: the one name that tells a guest without -nn.
Q35_HOST_BRIDGE = "82G33/G31/P35/P31 Express DRAM Controller"

# A link register that reads all ones (device off the bus) gives this width, wider than any link.
GONE_WIDTH = 63

_LONGEST_HEX_ROW = 60
# One function of `lspci -vvv -xxxx` has 18 KB of dump.
_LONGEST_BLOCK = 32 * 1024
# Lines that a function has once: their repetition starts the next one in an excerpt without headers.
_ONCE = frozenset({"ACSCtl", "LnkSta", "LnkCap", "Kernel driver in use", "NUMA node"})


@dataclass
class Block:
    """One function as lspci printed it, or an excerpt without its header line (then without a ``bdf``)."""

    values: dict[str, Any] = field(default_factory=lambda: {"bdf": ""})
    secondary_bus: str | None = None
    capability: str = ""
    broken: int | None = None  # the BAR whose list of sizes may go on in the next line
    keys: set[str] = field(default_factory=set)

    def function(self, parent: str | None = None) -> PciFunction:
        """Return what was read as a function."""
        return PciFunction(**self.values, parent=parent, source="lspci.vvv")


def blocks(text: str) -> tuple[list[Block], list[Block]]:
    """Return (functions, excerpts without a header), each in the order of the text."""
    whole, headless, block = _scanned(text)
    if block is not None:
        if block.broken is not None and not text.endswith("\n"):
            # Nothing follows the list of sizes: it may be cut, and then the largest size is not known.
            block.values["rebar"].pop(block.broken)
        else:
            _settle_sizes(block)
    return whole, headless


def _scanned(text: str) -> tuple[list[Block], list[Block], Block | None]:
    """Return what ``blocks`` returns, and the last one, whose end is not settled."""
    whole: list[Block] = []
    headless: list[Block] = []
    block: Block | None = None
    for row in lines(text):
        bare = row.strip()
        if not bare:
            continue
        header = _HEADER.match(bare)
        values = _header_values(header[1], header[2]) if header else None
        if values:
            block = Block(values)
            whole.append(block)
            continue
        if bare == "--":
            block = None
            continue
        if block is None or (not block.values["bdf"] and _repeats(block, bare)):
            block = Block()
            headless.append(block)
        if block.broken is not None and _SIZES.fullmatch(bare):
            _continue_sizes(block, bare)
        else:
            _settle_sizes(block)
            _attribute(block, bare)
    return whole, [one for one in headless if one.keys], block


def _repeats(block: Block, bare: str) -> bool:
    """Whether this line starts the next function of an excerpt without headers."""
    rebar = _REBAR.match(bare)
    return _key(bare) in block.keys & _ONCE or bool(rebar and int(rebar[1]) in block.values.get("rebar", {}))


def read(text: str) -> tuple[dict[str, PciFunction], tuple[PciFunction, ...]]:
    """Return (``functions``, ``fragments``) of a text in one pass."""
    listed = _listed(text)
    if listed is not None:
        return listed, ()
    whole, headless = blocks(text)
    return _by_address(whole), tuple(one.function() for one in headless)


def _listed(text: str) -> dict[str, PciFunction] | None:
    """Read a whole listing block by block; None where it is none. Machines of one kind share most of their blocks."""
    parts = [part for part in text.split("\n\n") if part.strip()]
    if parts and text.endswith("\n"):
        parts[-1] = f"{parts[-1].rstrip()}\n"
    keys = [(part, at == len(parts) - 1) for at, part in enumerate(parts)]
    read_: list[Block] = []
    for part, last in keys:
        block = _block(part, last) if len(part) < _LONGEST_BLOCK else None
        if block is None:
            return None
        read_.append(block)
    ports = _ports(read_)
    found = {}
    for key, block in zip(keys, read_, strict=True):
        bdf = str(block.values["bdf"])
        parent = ports.get((_domain(block), bdf[-7:-5]))
        found[bdf] = _function(*key, parent if parent != bdf else None)
    return found


@functools.lru_cache(maxsize=4096)
def _block(text: str, last: bool) -> Block | None:
    """Read one function of a listing, or return None where the text is anything else."""
    if text[0].isspace():
        return None
    whole, headless, _ = _scanned(text)
    if last:
        whole, headless = blocks(text)
    return whole[0] if len(whole) == 1 and not headless else None


@functools.lru_cache(maxsize=4096)
def _function(text: str, last: bool, parent: str | None) -> PciFunction:
    block = _block(text, last)
    assert block is not None
    return block.function(parent)


def functions(text: str) -> dict[str, PciFunction]:
    """Return the functions by address. Where bridges tell their buses, each function knows the port above it."""
    return _by_address(blocks(text)[0])


def _by_address(whole: list[Block]) -> dict[str, PciFunction]:
    ports = _ports(whole)
    found = {}
    for one in whole:
        bdf = str(one.values["bdf"])
        parent = ports.get((_domain(one), bdf[-7:-5]))
        found[bdf] = one.function(parent if parent != bdf else None)
    return found


def _ports(whole: list[Block]) -> dict[tuple[str, str], str]:
    """Return the bridge above each bus."""
    return {(_domain(one), one.secondary_bus): str(one.values["bdf"]) for one in whole if one.secondary_bus}


def _domain(block: Block) -> str:
    return str(block.values["bdf"])[:-8]


def fragments(text: str) -> tuple[PciFunction, ...]:
    """Return what an excerpt says of functions that it does not name (``lspci -vvv | grep ACSCtl``)."""
    return tuple(one.function() for one in blocks(text)[1])


def header_function(bdf_text: str, rest: str) -> PciFunction | None:
    """Read the header of a function: ``01:00.0`` and ``VGA compatible controller [0300]: NVIDIA ... (rev a1)``."""
    values = _header_values(bdf_text, rest)
    return PciFunction(**values, source="lspci.vvv") if values else None


def _header_values(bdf_text: str, rest: str) -> dict[str, Any] | None:
    bdf = address(bdf_text)
    classed = _CLASS.fullmatch(rest)
    if bdf is None or classed is None:
        return None
    class_name, class_code, described = classed.groups()
    described, _, _ = described.partition(" (prog-if")
    revision = _REVISION.search(described)
    vendor, device = ids(described)
    name = _ID.sub("", described[: revision.start()] if revision else described)
    return {
        "bdf": bdf,
        "vendor": vendor,
        "device": device,
        "class_code": class_code.lower() if class_code else _CLASS_NAMES.get(class_name.strip()),
        "name": " ".join(name.split()),
        "off_bus": bool(revision and revision[1].lower() == "ff"),
    }


def ids(described: str) -> tuple[str | None, str | None]:
    """Return (vendor, device) of the words behind an address: from their last ``[10de:2bb5]``, or from known names."""
    printed = _ID.findall(described)
    if printed:
        # Names hold brackets too, [GeForce RTX 3090]; the id is the last pair.
        return printed[-1][0].lower(), printed[-1][1].lower()
    vendor = next((code for name, code in _VENDOR_NAMES.items() if described.startswith(name)), None)
    raw = _RAW_ID.search(described)
    if raw and raw[2]:
        return raw[1].lower(), raw[2].lower()
    if Q35_HOST_BRIDGE in described:
        return "8086", "29c0"
    return vendor, raw[1].lower() if raw else None


def _key(bare: str) -> str:
    return bare.partition(":")[0]


def _attribute(block: Block, bare: str) -> None:
    values = block.values
    key = _key(bare)
    reader = _READERS.get(key)
    if reader:
        block.keys.add(key)
        reader(values, bare)
    elif bare.startswith("!!! Unknown header type 7f"):
        block.keys.add("header")
        values["off_bus"] = True
        values["header_type"] = "7f"
    elif key.endswith("emory behind bridge"):
        block.keys.add(key)
        _read_window(values, bare)
    elif key == "Capabilities":
        block.capability = bare
        _read_capability(values, bare)
        if "<access denied>" in bare:
            block.keys.add(key)
            values["access_denied"] = True
    elif key.startswith("Region ") and not block.capability:
        # Behind a capability, regions are those of virtual functions.
        region = _region(bare)
        if region:
            block.keys.add("Region")
            values.setdefault("regions", {})[region.index] = region
    elif key.startswith("BAR ") and "Virtual Resizable BAR" not in block.capability:
        rebar = _REBAR.match(bare)
        if rebar:
            block.keys.add("BAR")
            values.setdefault("rebar", {})[int(rebar[1])] = (rebar[2], tuple(rebar[3].split()))
            block.broken = int(rebar[1])
    elif key == "Bus":
        secondary = _SECONDARY.match(bare)
        if secondary:
            block.secondary_bus = secondary[1].lower()
            values["secondary_bus"] = int(secondary[1], 16)
    else:
        dump = _HEX_ROW.fullmatch(bare) if len(bare) < _LONGEST_HEX_ROW else None
        if dump:
            values["config_hex"] = values.get("config_hex", "") + dump[1].replace(" ", "")


def _continue_sizes(block: Block, bare: str) -> None:
    """Put the rest of a broken list behind its start: a size itself may be broken (`16` and `GB 32GB`)."""
    if block.broken is None:
        return
    current, supported = block.values["rebar"][block.broken]
    whole = bool(supported and _ONE_SIZE.fullmatch(supported[-1]))
    joined = " ".join(supported) + (" " if whole else "") + bare
    block.values["rebar"][block.broken] = (current, tuple(joined.split()))


def _settle_sizes(block: Block) -> None:
    """Drop a list of sizes that was cut within one."""
    if block.broken is None:
        return
    _, supported = block.values["rebar"][block.broken]
    if not supported or not all(_ONE_SIZE.fullmatch(size) for size in supported):
        block.values["rebar"].pop(block.broken)
    block.broken = None


def _read_window(values: dict[str, Any], bare: str) -> None:
    found = _WINDOW.match(bare)
    if not found:
        return
    name = "prefetchable_window" if bare.startswith("Prefetchable") else "window"
    if found[1] is None or "[disabled]" in found[3]:
        values[name] = Window(1, 0)
    else:
        values[name] = Window(int(found[1], 16), int(found[2], 16))


def _read_capability(values: dict[str, Any], bare: str) -> None:
    port = _PORT_TYPE.search(bare)
    if port:
        values["port_type"] = _PORT_TYPES.get(port[1], "")
    if "] MSI: Enable" in bare or "] MSI-X: Enable" in bare:
        values["msi"] = values.get("msi", False) or "Enable+" in bare


def _region(bare: str) -> Region | None:
    found = _REGION.match(bare)
    if not found:
        return None
    index, place, kind, rest = found.groups()
    size = _REGION_SIZE.search(rest)
    placed = not place.startswith("<") and "[virtual]" not in rest
    return Region(
        index=int(index),
        size_bytes=size_bytes(size[1]) if size else None,
        address=int(place, 16) if placed else None,
        prefetchable=None if kind is None else kind == "prefetchable",
    )


def _link(values: dict[str, Any], bare: str) -> tuple[float | None, int | None]:
    """Return (speed in GT/s, width) of a link line. All-ones and zero widths are no widths."""
    speed = width = None
    for found in _LINK.finditer(bare):
        if found[1]:
            speed = float(found[1])
        if found[2]:
            width = whole_number(found[2])
    if width == GONE_WIDTH:
        values["off_bus"] = True
        values["link_raw_width"] = width
    return speed, width if width not in (0, GONE_WIDTH) else None


def _read_cap(values: dict[str, Any], bare: str) -> None:
    values["link_max_speed_gt"], values["link_max_width"] = _link(values, bare)


def _read_sta(values: dict[str, Any], bare: str) -> None:
    values["link_speed_gt"], values["link_width"] = _link(values, bare)
    values["link_downgraded"] = "(downgraded)" in bare


def _read_acs(values: dict[str, Any], bare: str) -> None:
    values["acs_ctl"] = {name: sign == "+" for name, sign in _FLAG.findall(bare.partition(":")[2])}


def _read_acs_cap(values: dict[str, Any], bare: str) -> None:
    values["acs_cap"] = {name: sign == "+" for name, sign in _FLAG.findall(bare.partition(":")[2])}


def _read_ats(values: dict[str, Any], bare: str) -> None:
    values["ats"] = "Enable+" in bare


def _read_errors(values: dict[str, Any], bare: str) -> None:
    key = _key(bare)
    bits = tuple(f"{key}.{name}" for name, sign in _FLAG.findall(bare.partition(":")[2]) if sign == "+")
    values["aer_status"] = (values.get("aer_status") or ()) + bits


def _read_lanes(values: dict[str, Any], bare: str) -> None:
    found = _LANES.search(bare)
    values["lane_errors"] = tuple(int(lane) for lane in found[1].split()) if found else ()


def _read_status(values: dict[str, Any], bare: str) -> None:
    # Only power management has a line `Status: D0`; the device's own has flags.
    found = _POWER.match(bare)
    if found:
        values["power_state"] = found[1]


def _read_control(values: dict[str, Any], bare: str) -> None:
    # A slot's "Control:" line has other flags.
    flags = dict(_FLAG.findall(bare))
    if "BusMaster" in flags:
        values["bus_master"] = flags["BusMaster"] == "+"


def _read_driver(values: dict[str, Any], bare: str) -> None:
    values["driver"] = bare.partition(":")[2].strip() or None


def _read_modules(values: dict[str, Any], bare: str) -> None:
    values["modules"] = tuple(name.strip() for name in bare.partition(":")[2].split(",") if name.strip())
    # lspci prints the bound driver before the modules: where that line is missing, none is bound.
    values.setdefault("driver", "")


def _read_numa(values: dict[str, Any], bare: str) -> None:
    values["numa_node"] = whole_number(bare.partition(":")[2])


def _read_group(values: dict[str, Any], bare: str) -> None:
    values["iommu_group"] = whole_number(bare.partition(":")[2])


_READERS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "LnkCap": _read_cap,
    "LnkSta": _read_sta,
    "ACSCap": _read_acs_cap,
    "ACSCtl": _read_acs,
    "ATSCtl": _read_ats,
    "UESta": _read_errors,
    "CESta": _read_errors,
    "LaneErrStat": _read_lanes,
    "Status": _read_status,
    "Control": _read_control,
    "Kernel driver in use": _read_driver,
    "Kernel modules": _read_modules,
    "NUMA node": _read_numa,
    "IOMMU group": _read_group,
}


def excerpt(text: str, bdfs: Iterable[str]) -> list[str]:
    """Return the header lines of these functions, verbatim."""
    wanted = set(bdfs)
    rows = []
    for row in lines(text):
        header = _HEADER.match(row.strip())
        if header and address(header[1]) in wanted:
            rows.append(row.strip())
    return rows
