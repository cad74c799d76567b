"""The vfio-user protocol, server's side: messages as bytes in, answers as bytes out. No sockets here.

Layouts: QEMU's `docs/interop/vfio-user.rst` (protocol 0.0); region and interrupt structures are those of linux/vfio.h.
"""

from __future__ import annotations

import errno
import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

HEADER = struct.Struct("<HHIII")  # message id, command, size of the whole message in bytes, flags, errno
_ACCESS = struct.Struct("<QII")  # offset, region, count in bytes
_REGION = struct.Struct("<IIIIQQ")  # argsz, flags, index, offset of capabilities, size, offset
_FOUR = struct.Struct("<IIII")

FLAG_REPLY, FLAG_NO_REPLY, FLAG_ERROR = 0x01, 0x10, 0x20
TYPE_MASK = 0x0F
MAX_TRANSFER = 1024 * 1024
MAX_MESSAGE = MAX_TRANSFER + 4096

# linux/vfio.h
DEVICE_FLAGS = 0x01 | 0x02  # can be reset, is a PCI device
REGION_READ_WRITE = 0x01 | 0x02
IRQ_EVENTFD = 0x01
REGIONS = 9  # six BARs, expansion ROM, configuration space, VGA
CONFIG_REGION = 7
IRQS = 5  # INTx, MSI, MSI-X, error, request


class Command(IntEnum):
    """Commands of a client that this server knows."""

    VERSION = 1
    DMA_MAP = 2
    DMA_UNMAP = 3
    DEVICE_GET_INFO = 4
    DEVICE_GET_REGION_INFO = 5
    DEVICE_GET_IRQ_INFO = 7
    DEVICE_SET_IRQS = 8
    REGION_READ = 9
    REGION_WRITE = 10
    DEVICE_RESET = 13


class ProtocolError(Exception):
    """The stream is no vfio-user any more; the connection must end."""


@dataclass(frozen=True)
class Header:
    """The 16 bytes before each payload. `size` counts them too."""

    message: int
    command: int
    size: int
    flags: int

    @property
    def payload_bytes(self) -> int:
        """How many bytes follow the header."""
        return self.size - HEADER.size

    @property
    def wants_reply(self) -> bool:
        """Whether the client waits for an answer."""
        return not self.flags & FLAG_NO_REPLY


class Device(Protocol):
    """What a device behind the protocol must be able to do. Offsets and counts are bytes."""

    def region_size(self, region: int) -> int:
        """Return the size of a region; 0 where there is none."""

    def irq_count(self, index: int) -> int:
        """Return how many interrupts of a kind (INTx, MSI, ...) there are."""

    def read(self, region: int, offset: int, count: int) -> bytes:
        """Return bytes of a region; the range was checked."""

    def write(self, region: int, offset: int, data: bytes) -> None:
        """Change bytes of a region; the range was checked."""

    def reset(self) -> None:
        """Go back to the state after power-on."""


def header(raw: bytes | bytearray) -> Header:
    """Read a header; one that no client sends is a ProtocolError."""
    message, command, size, flags, _ = HEADER.unpack(raw)
    if flags & TYPE_MASK:
        raise ProtocolError(f"message {message}: a reply (flags {flags:#x}), though nothing was asked")
    if not HEADER.size <= size <= MAX_MESSAGE:
        raise ProtocolError(f"message {message}: size {size} bytes, allowed are {HEADER.size} to {MAX_MESSAGE}")
    return Header(message, command, size, flags)


def reply(to: Header, payload: bytes = b"") -> bytes:
    """Return the answer to a message."""
    return HEADER.pack(to.message, to.command, HEADER.size + len(payload), FLAG_REPLY, 0) + payload


def refusal(to: Header, number: int) -> bytes:
    """Return the answer that says no, with an errno."""
    return HEADER.pack(to.message, to.command, HEADER.size, FLAG_REPLY | FLAG_ERROR, number)


def answer(device: Device, to: Header, payload: bytes) -> bytes | None:
    """Do what a message asks of the device, and return the answer, or None where the client wants none."""
    try:
        given = _do(device, to.command, payload)
    except struct.error:
        return refusal(to, errno.EINVAL)
    if not to.wants_reply:
        return None
    return refusal(to, given) if isinstance(given, int) else reply(to, given)


def _do(device: Device, command: int, payload: bytes) -> bytes | int:
    """Return the payload of the answer, or an errno."""
    if command == Command.VERSION:
        major, _ = struct.unpack_from("<HH", payload)
        return _version() if major == 0 else errno.EINVAL
    if command in (Command.DMA_MAP, Command.DEVICE_SET_IRQS):
        return b""  # guest memory is never touched, and no interrupt is ever raised
    if command == Command.DMA_UNMAP:
        return payload[:24]
    if command == Command.DEVICE_RESET:
        device.reset()
        return b""
    if command == Command.DEVICE_GET_INFO:
        return _FOUR.pack(_FOUR.size, DEVICE_FLAGS, REGIONS, IRQS)
    if command == Command.DEVICE_GET_REGION_INFO:
        index = _FOUR.unpack_from(payload)[2]
        size = device.region_size(index) if index < REGIONS else 0
        flags = REGION_READ_WRITE if size else 0
        return _REGION.pack(_REGION.size, flags, index, 0, size, index << 40) if index < REGIONS else errno.EINVAL
    if command == Command.DEVICE_GET_IRQ_INFO:
        index = _FOUR.unpack_from(payload)[2]
        if index >= IRQS:
            return errno.EINVAL
        return _FOUR.pack(_FOUR.size, IRQ_EVENTFD, index, device.irq_count(index))
    if command in (Command.REGION_READ, Command.REGION_WRITE):
        return _access(device, command, payload)
    return errno.ENOTSUP


def _version() -> bytes:
    capabilities = {"max_msg_fds": 8, "max_data_xfer_size": MAX_TRANSFER, "migration": {"pgsize": 4096}}
    return struct.pack("<HH", 0, 0) + json.dumps({"capabilities": capabilities}).encode() + b"\0"


def _access(device: Device, command: int, payload: bytes) -> bytes | int:
    offset, region, count = _ACCESS.unpack_from(payload)
    if count > MAX_TRANSFER or region >= REGIONS or offset + count > device.region_size(region):
        return errno.EINVAL
    head = payload[: _ACCESS.size]
    if command == Command.REGION_READ:
        return head + device.read(region, offset, count)
    data = payload[_ACCESS.size :]
    if len(data) != count:
        return errno.EINVAL
    device.write(region, offset, data)
    return head
