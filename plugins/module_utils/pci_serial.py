# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The serial number that a PCI Express device carries in its configuration space."""

from __future__ import annotations

import re

_CONFIG = re.compile(r"^config: ([0-9a-f]+)$", re.MULTILINE)
# Extended capabilities start at 0x100, each with its id, its version and the place of the next.
_FIRST, _DEVICE_SERIAL_NUMBER, _MOST = 0x100, 0x0003, 96
_SERIAL_BYTES = 8


def without_serial_numbers(text: str) -> str:
    """Return the source ``sysfs.pci`` with zeros in place of the serial number of each ``config:`` line."""
    return _CONFIG.sub(_without, text)


def _without(found: re.Match[str]) -> str:
    data = bytearray.fromhex(found.group(1)) if len(found.group(1)) % 2 == 0 else bytearray()
    at = _FIRST
    for _ in range(_MOST):
        if at < _FIRST or at + 4 > len(data):
            break
        header = int.from_bytes(data[at : at + 4], "little")
        if header & 0xFFFF == _DEVICE_SERIAL_NUMBER:
            end = min(at + 4 + _SERIAL_BYTES, len(data))
            data[at + 4 : end] = bytes(end - at - 4)
            return "config: {0}".format(data.hex())
        at = header >> 20
    return found.group(0)
