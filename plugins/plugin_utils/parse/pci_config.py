"""Raw PCI configuration space: NVIDIA's P2P approval capability, links, access control, resizable BARs, windows.

Register layouts: PCI Express base specification; Linux ``include/uapi/linux/pci_regs.h`` names the same offsets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.snapshot import Approval, Window

# Without CAP_SYS_ADMIN the kernel lets one read exactly the standard header.
UNPRIVILEGED_BYTES = 64
_STANDARD_BYTES = 256
_HEADER_BYTES = 4096

_HEX = re.compile(r"[0-9a-fA-F]*")
_VENDOR_SPECIFIC = 0x09
_SIGNATURE = b"P2P"
_MSI, _EXPRESS, _MSI_X = 0x05, 0x10, 0x11
_EXTENDED_AER, _EXTENDED_ACS, _EXTENDED_ATS, _EXTENDED_REBAR, _EXTENDED_SECONDARY = 0x01, 0x0D, 0x0F, 0x15, 0x19
_PORT_TYPES = {
    0x0: "endpoint",
    0x1: "legacy endpoint",
    0x4: "root port",
    0x5: "upstream port",
    0x6: "downstream port",
    0x9: "integrated endpoint",
}
_SPEEDS_GT = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_CORRECTABLE_BITS = {0: "RxErr", 6: "BadTLP", 7: "BadDLLP", 8: "Rollover", 12: "Timeout", 13: "AdvNonFatalErr"}
_UNCORRECTABLE_BITS = {
    4: "DLP",
    5: "SDES",
    12: "TLP",
    13: "FCP",
    14: "CmpltTO",
    15: "CmpltAbrt",
    16: "UnxCmplt",
    17: "RxOF",
    18: "MalfTLP",
    19: "ECRC",
    20: "UnsupReq",
    21: "ACSViol",
}
# PCI Express base specification, ACS Control Register, bit 0 first; lspci's names.
_ACS_BITS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")


def read_hex(config_hex: str) -> bytes:
    """Return the bytes of a hex dump without blanks; what is no hex ends it."""
    digits = _HEX.match(config_hex)
    return bytes.fromhex(config_hex[: digits.end() // 2 * 2]) if digits else b""


def approval(config: bytes) -> Approval:
    """Look for the P2P approval capability that a hypervisor puts into the standard capability list.

    Layout: QEMU ``hw/vfio/pci-quirks.c`` (vfio_add_nv_gpudirect_cap), NVIDIA ``nvpcie.h``: id 09, next, length 08,
    "P2P", a byte with the version in bits 2:0 and the clique in bits 6:3, a reserved byte. Any place counts: the
    driver walks the list, and QEMU itself uses C8h or D4h.
    """
    if is_gone(config):
        return Approval("device_gone")
    if len(config) >= 12 and not (config[0:2] == b"\xde\x10" and config[0x0B] == 0x03):
        return Approval("not_gpu")
    if len(config) < _STANDARD_BYTES:
        return Approval("need_root")
    for place in places(config):
        if place + 8 > _STANDARD_BYTES:
            break
        if config[place] == _VENDOR_SPECIFIC and config[place + 3 : place + 6] == _SIGNATURE:
            flags = config[place + 6]
            return Approval("present", clique=(flags >> 3) & 0x0F, version=flags & 0x07, offset=place)
    return Approval("absent")


def is_gone(config: bytes) -> bool:
    """Whether the function no longer answers: every read of a dead device gives ones."""
    return len(config) >= 4 and config[:4] == b"\xff\xff\xff\xff"


def bus_master(config: bytes) -> bool | None:
    """Return the bus master bit of the command register, or None where it was not read."""
    return bool(config[4] & 0x04) if len(config) >= 6 and not is_gone(config) else None


def places(config: bytes) -> tuple[int, ...]:
    """Return where the standard capabilities start, in the order of their list. Needs the first 256 bytes."""
    found: list[int] = []
    if len(config) < _STANDARD_BYTES or is_gone(config) or not config[0x06] & 0x10:
        return ()
    place = config[0x34] & 0xFC
    while place >= UNPRIVILEGED_BYTES and place not in found:
        found.append(place)
        place = config[place + 1] & 0xFC
    return tuple(found)


def capabilities(config: bytes) -> dict[int, int]:
    """Return the standard capabilities: id to the place of the first one. Needs the first 256 bytes."""
    found: dict[int, int] = {}
    for place in places(config):
        found.setdefault(config[place], place)
    return found


def extended(config: bytes) -> dict[int, int]:
    """Return the extended capabilities: id to the place of the first one. Needs more than 256 bytes."""
    found: dict[int, int] = {}
    place = _STANDARD_BYTES
    while place >= _STANDARD_BYTES and place not in found.values() and place + 8 <= min(len(config), _HEADER_BYTES):
        head = _dword(config, place)
        # Where there is none, the first header reads all zeros or all ones.
        if head in (0, 0xFFFFFFFF) or head & 0xFFFF in found:
            break
        found[head & 0xFFFF] = place
        place = head >> 20 & 0xFFC
    return found


def _word(config: bytes, place: int) -> int | None:
    return int.from_bytes(config[place : place + 2], "little") if place + 2 <= len(config) else None


def _dword(config: bytes, place: int) -> int:
    return int.from_bytes(config[place : place + 4], "little")


def acs_control(config: bytes) -> Mapping[str, bool] | None:
    """Return the ACS control flags of the extended capabilities; None where there are none, or none were read."""
    return _acs(config, 6)


def acs_capability(config: bytes) -> Mapping[str, bool] | None:
    """Return which ACS controls the function has; None where it has no such capability, or it was not read."""
    return _acs(config, 4)


def _acs(config: bytes, offset: int) -> Mapping[str, bool] | None:
    place = extended(config).get(_EXTENDED_ACS)
    flags = None if place is None else _word(config, place + offset)
    return None if flags is None else {name: bool(flags >> bit & 1) for bit, name in enumerate(_ACS_BITS)}


@dataclass(frozen=True)
class Link:
    """The PCI Express capability: what the port is, and its link. Speeds in GT/s, None where the code is unknown."""

    port_type: str
    max_speed_gt: float | None
    max_width: int | None
    speed_gt: float | None
    width: int | None


def link(config: bytes) -> Link | None:
    """Return the link registers (PCI Express capability: flags +2, LnkCap +0Ch, LnkSta +12h), or None."""
    place = capabilities(config).get(_EXPRESS)
    if place is None or place + 0x14 > len(config):
        return None
    kind = (_word(config, place + 2) or 0) >> 4 & 0xF
    can, now = _dword(config, place + 0x0C), _word(config, place + 0x12) or 0
    return Link(
        _PORT_TYPES.get(kind, ""),
        _SPEEDS_GT.get(can & 0xF),
        can >> 4 & 0x3F or None,
        _SPEEDS_GT.get(now & 0xF),
        now >> 4 & 0x3F or None,
    )


def ats_enabled(config: bytes) -> bool | None:
    """Return whether Address Translation Services are on; None without the capability, or where it was not read."""
    place = extended(config).get(_EXTENDED_ATS)
    control = None if place is None else _word(config, place + 6)
    return None if control is None else bool(control & 0x8000)


def msi_enabled(config: bytes) -> bool | None:
    """Return whether MSI or MSI-X is on; None where the function has neither, or they were not read."""
    places = capabilities(config)
    found = [
        bool((_word(config, places[name] + 2) or 0) & mask)
        for name, mask in ((_MSI, 0x0001), (_MSI_X, 0x8000))
        if name in places
    ]
    return any(found) if found else None


def resizable_bars(config: bytes) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Return the physical resizable BARs as lspci names their sizes: BAR to (current, supported)."""
    place = extended(config).get(_EXTENDED_REBAR)
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    if place is None or place + 12 > len(config):
        return found
    for entry in range(_dword(config, place + 8) >> 5 & 0x7):
        at = place + 4 + 8 * entry
        if at + 8 > len(config):
            break
        can, control = _dword(config, at), _dword(config, at + 4)
        # Bit 4 of the capability is 1 MB, bit 5 2 MB ... bit 31 128 TB; the control register goes on from 256 TB.
        powers = [bit - 4 for bit in range(4, 32) if can >> bit & 1] + [
            bit + 12 for bit in range(16, 32) if control >> bit & 1
        ]
        found[control & 0x7] = (_size(control >> 8 & 0x3F), tuple(_size(power) for power in powers))
    return found


def _size(power: int) -> str:
    """Return 2^power MB in lspci's words: 17 is 128GB."""
    unit = power // 10
    return f"{1 << power % 10}{('MB', 'GB', 'TB', 'PB', 'EB')[unit]}"


def error_status(config: bytes) -> tuple[str, ...] | None:
    """Return the error bits that are set (``CESta.RxErr``, ``UESta.CmpltTO``); None without AER, or not read."""
    place = extended(config).get(_EXTENDED_AER)
    if place is None or place + 0x14 > len(config):
        return None
    uncorrectable, correctable = _dword(config, place + 4), _dword(config, place + 0x10)
    return tuple(
        [f"CESta.{name}" for bit, name in _CORRECTABLE_BITS.items() if correctable >> bit & 1]
        + [f"UESta.{name}" for bit, name in _UNCORRECTABLE_BITS.items() if uncorrectable >> bit & 1]
    )


def lane_errors(config: bytes) -> tuple[int, ...] | None:
    """Return the lanes with an error (Secondary PCI Express capability); None without it, or not read."""
    place = extended(config).get(_EXTENDED_SECONDARY)
    if place is None or place + 12 > len(config):
        return None
    status = _dword(config, place + 8)
    return tuple(lane for lane in range(32) if status >> lane & 1)


def header_type(config: bytes) -> str | None:
    """Return the header type as two hex digits (without the multi-function bit), 7f for a dead function, or None."""
    return f"{config[0x0E] & 0x7F:02x}" if len(config) > 0x0E else None


def secondary_bus(config: bytes) -> int | None:
    """Return the bus below a bridge, or None for other functions."""
    return config[0x19] if len(config) > 0x19 and header_type(config) == "01" else None


def windows(config: bytes) -> tuple[Window, Window] | None:
    """Return the (memory, prefetchable memory) windows of a bridge; they stand in the first 64 bytes."""
    if len(config) < UNPRIVILEGED_BYTES or header_type(config) != "01":
        return None
    base, limit, low, high = (_word(config, at) or 0 for at in (0x20, 0x22, 0x24, 0x26))
    memory = Window((base & 0xFFF0) << 16, (limit & 0xFFF0) << 16 | 0xFFFFF)
    above, beyond = (_dword(config, 0x28), _dword(config, 0x2C)) if low & 0xF == 1 else (0, 0)
    start, end = above << 32 | (low & 0xFFF0) << 16, beyond << 32 | (high & 0xFFF0) << 16 | 0xFFFFF
    return memory, Window(start, end)
