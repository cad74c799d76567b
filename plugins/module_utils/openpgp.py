# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the fingerprints of an OpenPGP key file, so that a repository key can be checked where no gpg is installed.

Debian 13 and a minimal Ubuntu have no ``gpg``: apt brings its own verifier. Formats: RFC 4880 section 4 (packets),
6.2 (armor), 12.2 (fingerprint of a version 4 key).
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_ARMOR = "-----BEGIN PGP PUBLIC KEY BLOCK-----"
_ARMOR_END = "-----END PGP PUBLIC KEY BLOCK-----"
_PUBLIC_KEY = 6  # tag of a primary key packet; 14 is a subkey


class KeyFileError(ValueError):
    """The bytes are no OpenPGP public key."""


def binary(data: bytes) -> bytes:
    """Return the key in binary form, without its armor if it had one."""
    text = data.decode("ascii", "replace")
    if _ARMOR not in text:
        return data
    result = b""
    for block in text.split(_ARMOR)[1:]:
        body, end, _rest = block.partition(_ARMOR_END)
        if not end:
            raise KeyFileError("the armor has no end line")
        lines = [line.strip() for line in body.strip("\r\n").splitlines()]
        # Armor headers ("Version: ...") end at the first empty line.
        if any(":" in line for line in lines):
            lines = lines[lines.index("") + 1 :] if "" in lines else []
        encoded = "".join(line for line in lines if line and not line.startswith("="))
        try:
            result += base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise KeyFileError("the armor is damaged: {0}".format(error)) from None
    return result


def fingerprints(data: bytes) -> list[str]:
    """Return the fingerprints of all primary keys in a file, upper case, 40 hexadecimal digits each."""
    found = []
    for tag, body in _packets(binary(data)):
        if tag != _PUBLIC_KEY:
            continue
        if not body or body[0] != 4:
            raise KeyFileError("a key of version {0}; only version 4 is understood".format(body[0] if body else "none"))
        digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body)  # noqa: S324 - RFC 4880 defines it so
        found.append(digest.hexdigest().upper())
    if not found:
        raise KeyFileError("no OpenPGP public key in it")
    return found


def _packets(data: bytes) -> list[tuple[int, bytes]]:
    packets = []
    position = 0
    while position < len(data):
        first = data[position]
        if not first & 0x80:
            raise KeyFileError("no OpenPGP packet at byte {0}".format(position))
        position += 1
        if first & 0x40:
            tag = first & 0x3F
            length, position = _new_length(data, position)
        else:
            tag = (first >> 2) & 0x0F
            size = (1, 2, 4, 0)[first & 3]
            if not size:
                raise KeyFileError("a packet of indefinite length")
            length = int.from_bytes(data[position : position + size], "big")
            position += size
        body = data[position : position + length]
        if len(body) != length:
            raise KeyFileError("the key is cut off at byte {0}".format(len(data)))
        packets.append((tag, body))
        position += length
    return packets


def _new_length(data: bytes, position: int) -> tuple[int, int]:
    if position >= len(data):
        raise KeyFileError("the key is cut off at byte {0}".format(len(data)))
    first = data[position]
    if first < 192:
        return first, position + 1
    if first < 224:
        if position + 1 >= len(data):
            raise KeyFileError("the key is cut off at byte {0}".format(len(data)))
        return ((first - 192) << 8) + data[position + 1] + 192, position + 2
    if first == 255:
        return int.from_bytes(data[position + 1 : position + 5], "big"), position + 5
    raise KeyFileError("a packet of partial length")
