"""NCCL's picture of the machine: the XML that it dumps (``NCCL_TOPO_DUMP_FILE``) or is given (``NCCL_TOPO_FILE``)."""

from __future__ import annotations

import re

from ..core.runtime import NcclTopology
from .text import RefusedError

# Read by patterns, not by an XML parser: a paste is often cut, and a file may come from anywhere.
_TAG = re.compile(r"<(/?)(system|cpu|pci|gpu|nic|net|nvlink)\b([^<>]{0,600})>")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def parse(text: str, path: str = "") -> NcclTopology:
    """Read bus ids, and count the places where NCCL knew no speed, width or NUMA node."""
    buses: list[str] = []
    gpus: list[str] = []
    numa_unknown = links_unknown = on_cpu = 0
    above: list[str] = []
    for closing, tag, rest in _TAG.findall(text):
        if closing:
            if tag in above:
                del above[len(above) - 1 - above[::-1].index(tag) :]
            continue
        told = dict(_ATTRIBUTE.findall(rest))
        if tag == "cpu" and told.get("numaid") == "-1":
            numa_unknown += 1
        elif tag == "pci":
            bus = told.get("busid", "").lower()
            if bus:
                buses.append(bus)
            if told.get("link_speed") == "" or told.get("link_width") == "0":
                links_unknown += 1
            if told.get("class", "").startswith("0x03"):
                gpus.append(bus)
                on_cpu += above[-1:] == ["cpu"]
        if not rest.rstrip().endswith("/"):
            above.append(tag)
    if not buses and "<system" not in text:
        raise RefusedError("no <system> and no <pci> of an NCCL topology in it")
    return NcclTopology(path, tuple(buses), tuple(gpus), numa_unknown, links_unknown, on_cpu)
