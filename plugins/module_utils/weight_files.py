# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tell from a weight file's own header whether the whole file is there, without reading the weights."""

from __future__ import annotations

import json
import os
import struct
from typing import IO, Any

# ggml type -> (elements, bytes) of one block; the table of the GGUF format. A type that is not here counts as empty,
# so that a newer one is never called truncated.
GGML_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 40),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
}

# GGUF value types with a fixed size in bytes; 8 is a string, 9 an array.
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32

# More than any real header has: a damaged length must not make the reader loop for hours.
_MOST_ENTRIES = 10**6


def weight_complaint(path: str, name: str = "") -> str:
    """Say what is wrong with a weight file (``is truncated: 12 of 34 bytes``), or "" where nothing is seen.

    ``name`` decides the format where the file does not have its last name yet.
    """
    name = name or path
    if name.endswith(".safetensors"):
        return _whole(path, _safetensors_end, "has no safetensors header")
    if name.endswith(".gguf"):
        return _whole(path, _gguf_end, "has no GGUF header")
    return ""


def _whole(path: str, end_of: Any, no_header: str) -> str:
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as stream:
            need = end_of(stream)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error):
        return no_header
    return "is truncated: {0} of {1} bytes".format(size, need) if size < need else ""


def _safetensors_end(stream: IO[bytes]) -> int:
    length = _number(stream, "<Q")
    if not 2 <= length <= os.fstat(stream.fileno()).st_size - 8:
        raise ValueError("length")
    header = json.loads(stream.read(length).decode("utf-8"))
    ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
    return 8 + length + int(max(ends or [0]))


def _gguf_end(stream: IO[bytes]) -> int:
    if stream.read(4) != b"GGUF":
        raise ValueError("magic")
    _version, tensors, settings = struct.unpack("<IQQ", stream.read(20))
    if max(tensors, settings) > _MOST_ENTRIES:
        raise ValueError("counts")
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(settings):
        key = _text(stream)
        kind = _number(stream, "<I")
        if key == b"general.alignment" and kind == 4:
            alignment = _number(stream, "<I")
        else:
            _skip(stream, kind)
    end = 0
    for _ in range(tensors):
        _text(stream)
        elements = 1
        for size in struct.unpack("<{0}Q".format(count := _number(stream, "<I")), stream.read(8 * count)):
            elements *= size
        kind = _number(stream, "<I")
        per_block, block_bytes = GGML_BLOCKS.get(kind, (1, 0))
        end = max(end, _number(stream, "<Q") + elements // per_block * block_bytes)
    start = stream.tell()
    return int(start + -start % alignment + end)


def _number(stream: IO[bytes], form: str) -> int:
    return int(struct.unpack(form, stream.read(struct.calcsize(form)))[0])


def _text(stream: IO[bytes]) -> bytes:
    length = _number(stream, "<Q")
    raw = stream.read(length) if length < 2**24 else b""
    if len(raw) != length:
        raise ValueError("text")
    return raw


def _skip(stream: IO[bytes], kind: int) -> None:
    if kind == _GGUF_STRING:
        _text(stream)
    elif kind == _GGUF_ARRAY:
        inner, count = struct.unpack("<IQ", stream.read(12))
        if inner in _GGUF_SIZES:
            stream.seek(_GGUF_SIZES[inner] * count, os.SEEK_CUR)
        elif count > 100 * _MOST_ENTRIES:
            raise ValueError("array")
        else:
            for _ in range(count):
                _skip(stream, inner)
    else:
        stream.seek(_GGUF_SIZES[kind], os.SEEK_CUR)
