"""Raw PCI configuration space: NVIDIA's P2P approval capability and Access Control Services."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.snapshot import Approval

# Without CAP_SYS_ADMIN the kernel lets one read exactly the standard header.
UNPRIVILEGED_BYTES = 64
_STANDARD_BYTES = 256
_HEADER_BYTES = 4096

_VENDOR_SPECIFIC = 0x09
_SIGNATURE = b"P2P"
_EXTENDED_ACS = 0x000D
# PCI Express base specification, ACS Control Register, bit 0 first; lspci's names.
_ACS_BITS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")


def read_hex(config_hex: str) -> bytes:
    """Return the bytes of a hex dump without blanks; what is no hex ends it."""
    digits = []
    for digit in config_hex:
        if digit not in "0123456789abcdefABCDEF":
            break
        digits.append(digit)
    return bytes.fromhex("".join(digits[: len(digits) // 2 * 2]))


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
    if not config[0x06] & 0x10:
        return Approval("absent")
    place = config[0x34] & 0xFC
    seen: set[int] = set()
    while place >= UNPRIVILEGED_BYTES and place not in seen and place + 8 <= _STANDARD_BYTES:
        seen.add(place)
        if config[place] == _VENDOR_SPECIFIC and config[place + 3 : place + 6] == _SIGNATURE:
            flags = config[place + 6]
            return Approval("present", clique=(flags >> 3) & 0x0F, version=flags & 0x07, offset=place)
        place = config[place + 1] & 0xFC
    return Approval("absent")


def is_gone(config: bytes) -> bool:
    """Whether the function no longer answers: every read of a dead device gives ones."""
    return len(config) >= 4 and config[:4] == b"\xff\xff\xff\xff"


def bus_master(config: bytes) -> bool | None:
    """Return the bus master bit of the command register, or None where it was not read."""
    return bool(config[4] & 0x04) if len(config) >= 6 and not is_gone(config) else None


def acs_control(config: bytes) -> Mapping[str, bool] | None:
    """Return the ACS control flags of the extended capabilities; None where there are none, or none were read."""
    place = _STANDARD_BYTES
    seen: set[int] = set()
    while place >= _STANDARD_BYTES and place not in seen and place + 8 <= min(len(config), _HEADER_BYTES):
        seen.add(place)
        head = int.from_bytes(config[place : place + 4], "little")
        if head & 0xFFFF == _EXTENDED_ACS:
            control = int.from_bytes(config[place + 6 : place + 8], "little")
            return {name: bool(control >> bit & 1) for bit, name in enumerate(_ACS_BITS)}
        place = head >> 20 & 0xFFC
    return None
