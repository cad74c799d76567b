"""``lspci`` in any verbosity, whole or as an excerpt, with its indentation or without."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..core.snapshot import PciFunction, Region
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
_LINK = re.compile(r"Speed ([\d.]+)GT/s|Width x(\d+)")
_FLAG = re.compile(r"(\w+)([+-])")
_REBAR = re.compile(r"BAR (\d): current size: (\w+), supported:(.*)")
_SECONDARY = re.compile(r"Bus: primary=[0-9a-fA-F]+, secondary=([0-9a-fA-F]+)")
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
}
# QEMU's q35 host bridge and pci.ids' name for it: the one name that tells a guest without -nn.
Q35_HOST_BRIDGE = "82G33/G31/P35/P31 Express DRAM Controller"

# A link register that reads all ones (device off the bus) gives this width, wider than any link.
GONE_WIDTH = 63


@dataclass
class Block:
    """One function as lspci printed it, or an excerpt without its header line (``bdf`` is then "")."""

    function: PciFunction
    secondary_bus: str | None = None
    rows: list[str] = field(default_factory=list)
    capability: str = ""
    keys: set[str] = field(default_factory=set)


def blocks(text: str) -> tuple[list[Block], list[Block]]:
    """Return (functions, excerpts without a header), each in the order of the text."""
    whole: list[Block] = []
    headless: list[Block] = []
    block: Block | None = None
    for row in lines(text):
        bare = row.strip()
        if not bare:
            continue
        header = _HEADER.match(bare)
        function = header_function(header[1], header[2]) if header else None
        if function:
            block = Block(function, rows=[bare])
            whole.append(block)
            continue
        if bare == "--" or (block and not block.function.bdf and _repeats(block, bare)):
            block = None
            if bare == "--":
                continue
        if block is None:
            block = Block(PciFunction(bdf=""))
            headless.append(block)
        block.rows.append(bare)
        _attribute(block, bare)
    return whole, [one for one in headless if one.keys]


def functions(text: str) -> dict[str, PciFunction]:
    """Return the functions by address. Where bridges tell their buses, each function knows the port above it."""
    whole, _ = blocks(text)
    ports = {
        (one.function.bdf[:-8], one.secondary_bus): one.function.bdf for one in whole if one.secondary_bus is not None
    }
    found = {}
    for one in whole:
        bdf = one.function.bdf
        domain, bus = bdf[:-8], bdf[-7:-5]
        parent = ports.get((domain, bus))
        found[bdf] = replace(one.function, parent=parent if parent != bdf else None, source="lspci.vvv")
    return found


def fragments(text: str) -> tuple[PciFunction, ...]:
    """Return what an excerpt says of functions that it does not name (``lspci -vvv | grep ACSCtl``)."""
    return tuple(one.function for one in blocks(text)[1])


def header_function(bdf_text: str, rest: str) -> PciFunction | None:
    """Read the header of a function: ``01:00.0`` and ``VGA compatible controller [0300]: NVIDIA ... (rev a1)``."""
    bdf = address(bdf_text)
    classed = _CLASS.fullmatch(rest)
    if bdf is None or classed is None:
        return None
    class_name, class_code, described = classed.groups()
    described, _, _ = described.partition(" (prog-if")
    revision = _REVISION.search(described)
    vendor, device = ids(described)
    name = _ID.sub("", described[: revision.start()] if revision else described)
    return PciFunction(
        bdf=bdf,
        vendor=vendor,
        device=device,
        class_code=class_code.lower() if class_code else _CLASS_NAMES.get(class_name.strip()),
        name=" ".join(name.split()),
        off_bus=bool(revision and revision[1].lower() == "ff"),
    )


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


def _repeats(block: Block, bare: str) -> bool:
    key = _key(bare)
    return key in block.keys and key in ("ACSCtl", "LnkSta", "LnkCap", "Control")


def _key(bare: str) -> str:
    return bare.partition(":")[0]


def _attribute(block: Block, bare: str) -> None:
    function = block.function
    key = _key(bare)
    if bare.startswith("!!! Unknown header type 7f"):
        block.keys.add("header")
        block.function = replace(function, off_bus=True)
    elif key == "Capabilities":
        block.capability = bare
        if "<access denied>" in bare:
            block.keys.add(key)
            block.function = replace(function, access_denied=True)
    elif key.startswith("Region ") and not block.capability:
        region = _region(bare)
        if region:
            block.keys.add("Region")
            block.function = replace(function, regions={**function.regions, region.index: region})
    elif key.startswith("BAR ") and "Virtual Resizable BAR" not in block.capability:
        rebar = _REBAR.match(bare)
        if rebar:
            block.keys.add("BAR")
            sizes = (rebar[2], tuple(rebar[3].split()))
            block.function = replace(function, rebar={**function.rebar, int(rebar[1]): sizes})
    elif key in _READERS:
        block.keys.add(key)
        block.function = _READERS[key](function, bare)
    else:
        _other(block, bare)


def _other(block: Block, bare: str) -> None:
    secondary = _SECONDARY.match(bare)
    if secondary:
        block.secondary_bus = secondary[1].lower()
        return
    dump = _HEX_ROW.fullmatch(bare)
    if dump:
        block.function = replace(block.function, config_hex=block.function.config_hex + dump[1].replace(" ", ""))


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


def _link(bare: str) -> tuple[float | None, int | None, bool]:
    """Return (speed in GT/s, width, off the bus) of a link line. All-ones and zero widths are no widths."""
    speed = width = None
    for found in _LINK.finditer(bare):
        if found[1] and re.fullmatch(r"\d+(?:\.\d+)?", found[1]):
            speed = float(found[1])
        if found[2]:
            width = whole_number(found[2])
    return speed, width if width not in (0, GONE_WIDTH) else None, width == GONE_WIDTH


def _read_cap(function: PciFunction, bare: str) -> PciFunction:
    speed, width, gone = _link(bare)
    return replace(function, link_max_speed_gt=speed, link_max_width=width, off_bus=function.off_bus or gone)


def _read_sta(function: PciFunction, bare: str) -> PciFunction:
    speed, width, gone = _link(bare)
    return replace(function, link_speed_gt=speed, link_width=width, off_bus=function.off_bus or gone)


def _read_acs(function: PciFunction, bare: str) -> PciFunction:
    return replace(function, acs_ctl={name: sign == "+" for name, sign in _FLAG.findall(bare.partition(":")[2])})


def _read_control(function: PciFunction, bare: str) -> PciFunction:
    flags = {name: sign == "+" for name, sign in _FLAG.findall(bare)}
    return replace(function, bus_master=flags.get("BusMaster", function.bus_master))


def _read_driver(function: PciFunction, bare: str) -> PciFunction:
    return replace(function, driver=bare.partition(":")[2].strip() or None)


def _read_modules(function: PciFunction, bare: str) -> PciFunction:
    names = tuple(name.strip() for name in bare.partition(":")[2].split(",") if name.strip())
    # lspci prints the bound driver before the modules: where that line is missing, none is bound.
    return replace(function, modules=names, driver="" if function.driver is None else function.driver)


def _read_numa(function: PciFunction, bare: str) -> PciFunction:
    return replace(function, numa_node=whole_number(bare.partition(":")[2]))


def _read_group(function: PciFunction, bare: str) -> PciFunction:
    return replace(function, iommu_group=whole_number(bare.partition(":")[2]))


_READERS = {
    "LnkCap": _read_cap,
    "LnkSta": _read_sta,
    "ACSCtl": _read_acs,
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
