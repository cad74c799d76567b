"""What rules about a host's devices share: which GPUs are meant for guests, and what stands above each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..core.finding import Excerpt
from ..core.snapshot import CommandLine, LogLine, PciFunction, Role, Snapshot
from ..parse.text import size_bytes
from .common import has_no_gpu, listed_items
from .knowledge import gpu_model
from .machines import Passed, gpu_vms
from .registry import Verdict, verdict
from .views import view

HOST_ROLES: tuple[Role, ...] = ("bare_metal", "hypervisor")
RDMA_CLASSES = ("0207", "0200")
FIRMWARE_RISK = "Firmware settings have to change: the machine is down for a while."
REBOOT_RISK = "Reboots the hypervisor, and with it every guest."


@view
def vfio_ids(snapshot: Snapshot) -> frozenset[str]:
    """Return the ``vendor:device`` ids that modprobe options give to vfio-pci."""
    found: set[str] = set()
    for line in snapshot.kernel.modprobe.value or ():
        matched = re.match(r"options\s+vfio[-_]pci\b.*\bids=(\S+)", line)
        if matched:
            found |= {one.lower() for one in matched[1].split(",")}
    command = snapshot.kernel.command_line.value
    for key in ("vfio-pci.ids", "vfio_pci.ids"):
        found |= {one.lower() for one in listed_items(command or CommandLine(), key)}
    return frozenset(found)


@view
def passed_gpus(snapshot: Snapshot) -> tuple[tuple[PciFunction, str, Passed | None], ...]:
    """Return the GPUs meant for guests: those in VM files, else those named for vfio-pci. With the VM's id."""
    found: list[tuple[PciFunction, str, Passed | None]] = []
    for config, lines in gpu_vms(snapshot):
        found += [(one.display, config.vmid, one) for one in lines if one.display is not None]
    seen = {gpu.bdf for gpu, _, _ in found}
    ids = vfio_ids(snapshot)
    for gpu in snapshot.pci.gpus():
        by_driver = gpu.driver == "vfio-pci" and not snapshot.vm.configs.known
        if gpu.bdf not in seen and (f"{gpu.vendor}:{gpu.device}" in ids or by_driver):
            found.append((gpu, "", None))
    return tuple(found)


def no_passed_gpu(snapshot: Snapshot) -> Verdict:
    """Say that no GPU is passed to a VM, or why that is not known."""
    configs, functions = snapshot.vm.configs, snapshot.pci.functions
    if configs.known and not gpu_vms(snapshot):
        return verdict("not_applicable", "No GPU is passed to a VM", reason="no VM has a GPU among its hostpci lines")
    if configs.known:
        reason = functions.reason or "the PCI functions that the hostpci lines name were not read"
        return verdict("unknown", "The PCI functions of the passed GPUs are not known", reason=reason)
    reason = configs.reason or "the VM configurations were not read"
    return verdict("unknown", "Which GPUs are passed to VMs is not known", reason=reason)


def slot_of(bdf: str) -> str:
    """Return an address without its function: ``0000:01:00``."""
    return bdf.rpartition(".")[0]


@view
def bridges_above(snapshot: Snapshot, bdf: str) -> tuple[PciFunction, ...] | None:
    """Return the bridges from a function up to the root, or None where the way is not known."""
    functions = snapshot.pci.functions.value or {}
    way: list[PciFunction] = []
    parent = (functions[bdf].parent if bdf in functions else None) or ""
    while parent in functions and functions[parent] not in way:
        way.append(functions[parent])
        parent = functions[parent].parent or ""
    return tuple(way) or None


@view
def host_gpus(snapshot: Snapshot) -> tuple[PciFunction, ...]:
    """Return the NVIDIA GPUs of the host; a tree without classes names them by a device id that is known."""
    functions = snapshot.pci.functions.value or {}
    found = list(snapshot.pci.gpus())
    for bdf in sorted(functions):
        one = functions[bdf]
        model = gpu_model(one.device) if one.is_nvidia and one.class_code is None and bdf.endswith(".0") else None
        if model is not None and model.name:
            found.append(one)
    return tuple(found)


def excerpt_of(function: PciFunction, *parts: str) -> Excerpt:
    """Return values of a function as an excerpt."""
    return Excerpt(function.source or "sysfs.pci", " ".join((function.bdf, *parts)))


def log_notes(snapshot: Snapshot, *kinds: str) -> tuple[LogLine, ...]:
    """Return the telling kernel messages of these kinds, in the order of the kinds."""
    log = snapshot.kernel.log.value
    return tuple(line for kind in kinds for line in log.notes.get(kind, ())) if log else ()


def by_device(lines: Iterable[LogLine], pattern: re.Pattern[str]) -> dict[str, list[LogLine]]:
    """Group messages by the address that the pattern's first group finds; what names none is left out."""
    found: dict[str, list[LogLine]] = {}
    for line in lines:
        hit = pattern.search(line.text)
        if hit:
            found.setdefault(hit[1], []).append(line)
    return found


def no_gpu(snapshot: Snapshot) -> Verdict:
    """Say that the machine has no GPU, or why that is not known."""
    if has_no_gpu(snapshot):
        return verdict("not_applicable", "The machine has no NVIDIA GPU", reason="no NVIDIA function on the PCI bus")
    reason = snapshot.pci.functions.reason or "the list of PCI devices is only a part and names no GPU"
    return verdict("unknown", "The GPUs on the bus are not known", reason=reason)


def size_text(count: int) -> str:
    """Return bytes in the words of lspci: 32 GiB, 256 MiB."""
    for unit, name in ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} bytes"


def resizable(function: PciFunction) -> tuple[int, str, str] | None:
    """Return (BAR, current size, largest supported size) of the BAR that can grow most, or None."""
    best: tuple[int, str, str] | None = None
    most = 0
    for bar, (current, supported) in function.rebar.items():
        largest = max(supported, key=lambda size: size_bytes(size) or 0, default="")
        if largest and (size_bytes(largest) or 0) > most:
            most = size_bytes(largest) or 0
            best = (bar, current, largest)
    return best
