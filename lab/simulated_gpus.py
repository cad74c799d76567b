"""SIMULATED GPUs: PCI functions with NVIDIA's ids that have a configuration space and plain memory, and can't compute.

Run as a program, it serves each of them on a Unix socket over vfio-user, for QEMU's `vfio-user-pci`:

    python -m peerlane.lab.simulated_gpus FOLDER

FOLDER holds `gpus.json`, a list of {"socket": NAME, "device": "2bb5", "clique": null or 0-15}. Where it also holds
`gpus.saved.json`, the configuration spaces start as written there. SIGTERM writes that file and ends the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import vfio_user

VENDOR = 0x10DE
SUBSYSTEM = 0x204B
REVISION = 0xA1
CLASS_3D_CONTROLLER = 0x030200
CONFIG_BYTES = 4096
MIB = 1024 * 1024
# BAR number -> size in bytes and type bits (0: 32 bit; 0xC: 64 bit, prefetchable). BAR1 is as without Resizable BAR.
BARS: Mapping[int, tuple[int, int]] = {0: (64 * MIB, 0x0), 1: (256 * MIB, 0xC), 3: (32 * MIB, 0xC)}
IRQ_COUNTS = (1, 1, 0, 0, 0)  # INTx, MSI, MSI-X, error, request
PAGE = 4096
RECEIVE_BYTES = 65536

# The places of a real RTX PRO 6000's capabilities, and the one that QEMU gives the approval capability.
POWER, MSI, EXPRESS, VENDOR_OWN, APPROVAL, SERIAL = 0x40, 0x48, 0x60, 0x9C, 0xC8, 0x100
SPEED_32_GT, WIDTH = 5, 16

# offset -> size and bits that a driver may change. All else is read-only. QEMU keeps the BARs itself.
_WRITABLE: Mapping[int, tuple[int, int]] = {
    0x04: (2, 0x0547),
    0x0C: (1, 0xFF),
    0x3C: (1, 0xFF),
    POWER + 4: (2, 0x0103),
    MSI + 2: (2, 0x0071),
    MSI + 4: (4, 0xFFFFFFFC),
    MSI + 8: (4, 0xFFFFFFFF),
    MSI + 12: (2, 0xFFFF),
    EXPRESS + 0x08: (2, 0x7FFF),
    EXPRESS + 0x10: (2, 0x01FB),
    EXPRESS + 0x28: (2, 0x7FFF),
    EXPRESS + 0x30: (2, 0x00FF),
}


def config_space(device: int, clique: int | None, serial: int) -> bytes:
    """Return the 4096 bytes of a simulated GPU with this PCI device id.

    `clique` 0-15 adds NVIDIA's P2P approval capability ("P2P", clique in bits 6:3), as a hypervisor does; None leaves
    it out. `serial` is the device serial number.
    """
    space = bytearray(CONFIG_BYTES)
    struct.pack_into("<HHHH", space, 0, VENDOR, device, 0, 0x0010)  # status: has capabilities
    struct.pack_into("<I", space, 8, CLASS_3D_CONTROLLER << 8 | REVISION)
    for number, (_, kind) in BARS.items():
        struct.pack_into("<I", space, 0x10 + 4 * number, kind)
    struct.pack_into("<HH", space, 0x2C, VENDOR, SUBSYSTEM)
    space[0x34], space[0x3D] = POWER, 1  # first capability; INTA
    struct.pack_into("<BBHH", space, POWER, 0x01, MSI, 0x0003, 0x0008)  # version 3, no soft reset
    struct.pack_into("<BBH", space, MSI, 0x05, EXPRESS, 0x0080)  # 64-bit addresses, one message
    _express(space, EXPRESS, VENDOR_OWN)
    struct.pack_into("<BBB", space, VENDOR_OWN, 0x09, 0 if clique is None else APPROVAL, 0x14)
    if clique is not None:
        struct.pack_into("<BBB3sBB", space, APPROVAL, 0x09, 0, 8, b"P2P", clique << 3, 0)
    struct.pack_into("<IQ", space, SERIAL, 0x0003 | 1 << 16, serial)
    return bytes(space)


def _express(space: bytearray, place: int, following: int) -> None:
    """Put a PCI Express capability there: version 2, endpoint, 32 GT/s x16, function level reset."""
    struct.pack_into("<BBH", space, place, 0x10, following, 0x0002)
    struct.pack_into("<IHH", space, place + 0x04, 1 << 28 | 1 << 15 | 0x1, 0x2810, 0)  # FLR, 256-byte payloads
    struct.pack_into("<IHH", space, place + 0x0C, WIDTH << 4 | SPEED_32_GT, 0, WIDTH << 4 | SPEED_32_GT)
    struct.pack_into("<IHH", space, place + 0x24, 0, 0, 0)
    struct.pack_into("<IHH", space, place + 0x2C, 0x3E, SPEED_32_GT, 0)  # supported speeds 2.5 to 32 GT/s


class SimulatedGpu:
    """One function: a `vfio_user.Device` with a configuration space, and BARs that remember what was written."""

    def __init__(self, config: bytes, saved: bytes | None = None) -> None:
        self._power_on = bytes(config)
        self.config = bytearray(saved or config)
        self._pages: dict[tuple[int, int], bytearray] = {}

    def region_size(self, region: int) -> int:
        """Return the size of a region in bytes."""
        return CONFIG_BYTES if region == vfio_user.CONFIG_REGION else BARS.get(region, (0, 0))[0]

    def irq_count(self, index: int) -> int:
        """Return how many interrupts of a kind there are."""
        return IRQ_COUNTS[index]

    def read(self, region: int, offset: int, count: int) -> bytes:
        """Return bytes of the configuration space or of a BAR; memory that was never written reads zero."""
        if region == vfio_user.CONFIG_REGION:
            return bytes(self.config[offset : offset + count])
        return bytes(self._memory(region, at, make=False)[at % PAGE] for at in range(offset, offset + count))

    def write(self, region: int, offset: int, data: bytes) -> None:
        """Change the writable bits of the configuration space, or a BAR's memory."""
        for at, value in enumerate(data, start=offset):
            if region == vfio_user.CONFIG_REGION:
                mask = _BYTE_MASKS.get(at, 0)
                self.config[at] = self.config[at] & ~mask & 0xFF | value & mask
            else:
                self._memory(region, at, make=True)[at % PAGE] = value

    def reset(self) -> None:
        """Forget all that was written."""
        self.config[:] = self._power_on
        self._pages.clear()

    def _memory(self, region: int, offset: int, *, make: bool) -> bytearray:
        key = (region, offset // PAGE)
        return self._pages.setdefault(key, bytearray(PAGE)) if make else self._pages.get(key, _ZEROS)


_ZEROS = bytearray(PAGE)
_BYTE_MASKS = {
    offset + step: mask >> 8 * step & 0xFF for offset, (size, mask) in _WRITABLE.items() for step in range(size)
}


def serve(connection: socket.socket, device: vfio_user.Device) -> None:
    """Answer one client until it goes. File descriptors that it sends (memory, interrupts) are closed unused."""
    held = bytearray()  # a message mostly comes in one piece; a guest that reads a whole space sends thousands
    with connection:
        while True:
            part, descriptors, _, _ = socket.recv_fds(connection, RECEIVE_BYTES, 8)
            for descriptor in descriptors:
                os.close(descriptor)
            if not part:
                return
            held += part
            while len(held) >= vfio_user.HEADER.size:
                head = vfio_user.header(held[: vfio_user.HEADER.size])
                if len(held) < head.size:
                    break
                answer = vfio_user.answer(device, head, bytes(held[vfio_user.HEADER.size : head.size]))
                del held[: head.size]
                if answer is not None:
                    connection.sendall(answer)


def _listen(place: socket.socket, name: str, device: vfio_user.Device) -> None:
    """Serve one client after the other: QEMU may end and come again."""
    while True:
        connection, _ = place.accept()
        try:
            serve(connection, device)
        except (OSError, vfio_user.ProtocolError) as error:
            print(f"simulated GPU {name}: {error}", file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> int:
    """Serve the GPUs of a folder until SIGTERM."""
    if len(words) != 1:
        print("usage: simulated_gpus FOLDER", file=sys.stderr)
        return 2
    os.chdir(words[0])  # a socket's path may have 107 bytes at most, so it is given without the folder
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    saved_file = Path("gpus.saved.json")
    saved = json.loads(saved_file.read_text(encoding="utf-8")) if saved_file.exists() else {}
    gpus: dict[str, SimulatedGpu] = {}
    for number, entry in enumerate(json.loads(Path("gpus.json").read_text(encoding="utf-8"))):
        name = entry["socket"]
        config = config_space(int(entry["device"], 16), entry["clique"], serial=number + 1)
        gpus[name] = SimulatedGpu(config, bytes.fromhex(saved[name]) if name in saved else None)
        Path(name).unlink(missing_ok=True)
        place = socket.socket(socket.AF_UNIX)
        place.bind(name)
        place.listen(1)
        threading.Thread(target=_listen, args=(place, name, gpus[name]), daemon=True).start()
    Path("gpus.ready").touch()
    signal.sigwait(stop)
    aside = Path(".gpus.saved.json")
    aside.write_text(json.dumps({name: gpu.config.hex() for name, gpu in gpus.items()}), encoding="utf-8")
    aside.replace(saved_file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
