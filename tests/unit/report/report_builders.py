"""Hosts for report tests, made up: a bare metal machine with two sockets and a switch on each, and hostile text."""

from __future__ import annotations

from typing import Any

import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.measurement import Copy, Device, Matrix, Measurement
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Gpu, PciFunction, Snapshot

# Each of these must come out as text: tags, quotes, entities, template syntax, control and bidi characters, fences.
HOSTILE = (
    "\"'><script>alert(1)</script><img src=x onerror=a()>&amp;{{7*7}}{%x%}\x1b[2J\x00\u202e\u2066```</pre></style>]]>"
)

LINK = {"link_width": 16, "link_max_width": 16, "link_speed_gt": 2.5, "link_max_speed_gt": 32.0}
SWITCH = "PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch [1000:c030]"
NIC = "Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7] [15b3:1021]"


def two_sockets(per_socket: int = 4, extra: str = "") -> list[PciFunction]:
    """Per socket: root port, switch with one downstream port for each GPU and for a network card of two functions."""
    made = []
    for node in range(2):
        root, up = f"0000:{node * 8:x}0:01.1", f"0000:{node * 8:x}1:00.0"
        made.append(b.port(root, numa_node=node))
        made.append(b.port(up, numa_node=node, parent=root, name=SWITCH, vendor="1000", device="c030", **LINK))
        for at in range(per_socket + 1):
            down, bus = f"0000:{node * 8:x}2:{at:02x}.0", f"0000:{node * 8:x}{at + 3:x}:00"
            made.append(b.port(down, numa_node=node, parent=up))
            if at < per_socket:
                made.append(b.gpu_function(f"{bus}.0", parent=down, numa_node=node, **LINK))
                made.append(b.audio(f"{bus}.1", parent=down, numa_node=node))
            else:
                card = {"vendor": "15b3", "device": "1021", "class_code": "0207", "name": NIC + extra, "parent": down}
                made += [PciFunction(bdf=f"{bus}.{one}", numa_node=node, **card, **LINK) for one in (0, 1)]
    return made


def gpus(functions: list[PciFunction], name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition") -> Any:
    found = [one.bdf for one in functions if one.is_gpu]
    return b.fact(tuple(Gpu(index=at, bus_id=bdf, name=name) for at, bdf in enumerate(found)), "gpus", "nvidia_smi.q")


def bare(host: str = "bm1", per_socket: int = 4, extra: str = "", **parts: Any) -> Snapshot:
    functions = two_sockets(per_socket, extra)
    links = {
        f"g{row}_{column}": "PIX" if row // per_socket == column // per_socket else "SYS"
        for row in range(2 * per_socket)
        for column in range(row)
    }
    made = {
        "pci": b.pci(*functions),
        "gpus": gpus(functions, "NVIDIA RTX PRO 6000 Blackwell Server Edition" + extra),
        "p2p": b.granted(2 * per_socket),
        "topology": b.topology(2 * per_socket, **links),
        "driver": b.Driver(smi=b.smi(driver_version="580.95.05")),
        **parts,
    }
    return b.snapshot("bare_metal", host, **made)


def copied(count: int, gbps: float = 50.0, **more: Any) -> Measurement:
    """A table of bandwidths between all GPUs (rung 1)."""
    cells = tuple(tuple(None if row == column else gbps for column in range(count)) for row in range(count))
    table = Matrix("uni", "bandwidth", "GB/s", cells, p2p=True)
    devices = tuple(Device(at) for at in range(count))
    return Measurement("p2p", "p2pBandwidthLatencyTest", "ok", 1, devices, results=(table,), **more)


def verified(first: int, second: int, good: bool) -> Measurement:
    """One pair whose owner looked at the data (rung 2), or saw wrong data."""
    copy = Copy((f"GPU{first}", f"GPU{second}"), 49.5, good)
    status = "ok" if good else "wrong_results"
    devices = (Device(first), Device(second))
    return Measurement(
        "p2p", "simpleP2P", status, 2 if good else None, devices, results=(copy,), failure="" if good else "nan"
    )
