"""``nvidia-smi nvlink -s``: which NVLinks of each GPU are active, and what it says where it cannot tell."""

from __future__ import annotations

import re
from dataclasses import replace

from ..core.snapshot import NvLinks
from .text import RefusedError, lines

_GPU = re.compile(r"\s*GPU (\d{1,3}): (.+?)(?: \(UUID: [^)]*\)?)?$")
_LINK = re.compile(r"\s*Link (\d{1,3}): (.+)$")
_RATE = re.compile(r"(\d{1,5}(?:\.\d{1,4})?) GB/s")
_INACTIVE = "<inactive>"
# What stands below a GPU, or alone, instead of links.
_NOTE = re.compile(r"\s*(?:NVML: )?((?:Unable to retrieve|Nvlink queries|NVLink queries).*)", re.IGNORECASE)
_LONGEST_ROW = 300


def parse(text: str) -> tuple[NvLinks, ...]:
    """Read the links by GPU. No output at all is a reading: GPUs without NVLink; a note before any GPU is GPU -1."""
    gpus: list[NvLinks] = []
    rows = [row for row in lines(text) if row.strip()]
    for row in rows:
        if len(row) > _LONGEST_ROW:
            continue
        if named := _GPU.match(row):
            gpus.append(NvLinks(int(named[1]), named[2]))
        elif (link := _LINK.match(row)) and gpus:
            state = link[2].strip()
            rate = _RATE.fullmatch(state)
            # A line that was cut inside is no link that is down.
            if rate or state == _INACTIVE:
                links = {**gpus[-1].links, int(link[1]): float(rate[1]) if rate else None}
                gpus[-1] = replace(gpus[-1], links=links)
        elif noted := _NOTE.match(row):
            if gpus:
                gpus[-1] = replace(gpus[-1], note=noted[1].strip())
            else:
                gpus.append(NvLinks(-1, note=noted[1].strip()))
    if rows and not gpus:
        raise RefusedError("names neither a GPU nor a link")
    return tuple(gpus)
