"""Facts of the devices: PCI functions, IOMMU groups, and the paths between GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from ..core.snapshot import (
    Approval,
    Fact,
    Iommu,
    KernelLog,
    LogLine,
    MemoryRange,
    P2pMatrix,
    Pci,
    PciFunction,
    Topology,
    unknown,
)
from . import iommu as iommu_text
from . import kernel_log, lspci, pci_sysfs, pci_tree, platform
from . import p2p as p2p_text
from . import pci as pci_text
from . import topology as topology_text
from .facts import Reading, Sources
from .text import RefusedError, shorten

T = TypeVar("T")

_P2P = "nvidia_smi.topo_p2p_"


def pci(sources: Sources) -> Pci:
    """Join what sysfs, lspci, its tree and IOMMU listings say of the functions."""
    readings: list[tuple[str, dict[str, PciFunction]]] = []
    complete = False
    for entry in sources.entries("sysfs.pci"):
        found = pci_sysfs.functions(entry.stdout)
        complete = complete or (pci_sysfs.is_complete(found) and not entry.truncated)
        readings.append((entry.source, found))
    unnamed: Fact[tuple[PciFunction, ...]] = unknown("every line of lspci names its function", "lspci.vvv")
    for entry in sources.entries("lspci.vvv"):
        found, fragments = lspci.read(entry.stdout)
        readings.append((entry.source, found))
        if fragments and not unnamed.known:
            rows = [row.strip() for row in entry.stdout.split("\n") if row.strip()]
            unnamed = Fact(fragments, entry.source, shorten(rows))
        # Only a run of lspci that ended well is known to be whole; a paste may be part of one.
        complete = complete or (entry.rc == 0 and not entry.truncated)
    readings += [(entry.source, pci_tree.functions(entry.stdout)) for entry in sources.entries("lspci.t")]
    for entry in sources.entries("iommu.groups"):
        try:
            readings.append((entry.source, iommu_text.listing(entry.stdout).functions))
        except RefusedError:
            # iommu() says so; here it only means that the listing has no functions to add.
            continue
    readings = [(source, found) for source, found in readings if found]
    memory = sources.fact(_memory_map, "proc.iomem")
    if not readings:
        refusal = "" if not sources.entries("lspci.vvv") else "lspci.vvv names no function"
        reason = sources.missing("sysfs.pci", "lspci.vvv", refusal=refusal)
        return Pci(functions=reason, approvals=reason, unnamed=unnamed, memory_map=memory)
    merged = pci_text.merge({}, *(found for _, found in readings))
    source, _ = readings[0]
    functions: Fact[Mapping[str, PciFunction]] = Fact(merged, source, _excerpt(sources, source, merged))
    return Pci(
        functions=functions,
        approvals=_approvals(sources, merged),
        complete=complete,
        unnamed=unnamed,
        memory_map=memory,
    )


def _memory_map(text: str) -> Reading[tuple[MemoryRange, ...]]:
    rows = [row.strip() for row in text.split("\n") if "PCI Bus" in row or "BOOTFB" in row]
    return platform.memory_map(text), shorten(rows)


def _excerpt(sources: Sources, source: str, functions: Mapping[str, PciFunction]) -> str:
    """Return the lines that name the GPUs, or all functions where there is no GPU, as the source prints them."""
    shown = [bdf for bdf, one in functions.items() if one.is_gpu] or list(functions)
    text = next(entry.stdout for entry in sources.entries(source) if entry.source == source)
    if source == "sysfs.pci" and text.startswith("["):
        return shorten([f"[{bdf}]" for bdf in shown if f"[{bdf}]" in text])
    return shorten(lspci.excerpt(text, shown) or [f"[{bdf}]" for bdf in shown if f"[{bdf}]" in text])


def _approvals(sources: Sources, functions: dict[str, PciFunction]) -> Fact[Mapping[str, Approval]]:
    found = pci_text.approvals(functions)
    if not found:
        if any(one.is_gpu for one in functions.values()):
            return unknown("the configuration space of no GPU was read", "sysfs.pci")
        return unknown("no NVIDIA display function was seen", "sysfs.pci")
    rows = [f"{bdf} config: {functions[bdf].config_hex[:128]}..." for bdf in found]
    return Fact(found, "sysfs.pci", shorten(rows))


def iommu(sources: Sources, known: Pci, log: Fact[KernelLog]) -> Iommu:
    """Read units and groups; a group that only the functions name counts too."""
    functions = known.functions.value or {}
    missing = sources.missing("sysfs.iommu")
    units: Fact[tuple[str, ...]] = missing
    groups: Fact[Mapping[str, tuple[str, ...]]] = missing
    types: Fact[Mapping[str, str]] = missing
    for entry in sources.entries("sysfs.iommu")[:1]:
        units, groups, types = _iommu_facts(entry.source, entry.stdout)
    if not groups.known:
        groups = _listed_groups(sources) or groups
    if not groups.known:
        named = iommu_text.groups_of(functions)
        groups = Fact(named, known.functions.source, "") if named else groups
    return Iommu(
        units=units,
        groups=groups,
        group_types=types,
        default_domain=_default_domain(log),
        technology=_noted(log, kernel_log.technology, "does not name an IOMMU"),
        interrupt_remapping=_remapping(sources, log),
    )


@functools.lru_cache(maxsize=256)
def _iommu_facts(
    source: str, text: str
) -> tuple[Fact[tuple[str, ...]], Fact[Mapping[str, tuple[str, ...]]], Fact[Mapping[str, str]]]:
    """Return units, groups and their types; machines of one kind have the same."""
    reading = iommu_text.sysfs(text)
    units = shorten([row for row in text.split("\n") if row.startswith("unit ")])
    groups = shorten([row for row in text.split("\n") if row.startswith("group ")])
    return (
        Fact(reading.units or (), source, units),
        Fact(reading.groups, source, groups),
        Fact(reading.types, source, groups),
    )


def _noted(
    log: Fact[KernelLog], read: Callable[[Mapping[str, tuple[LogLine, ...]]], Reading[T]], absent: str
) -> Fact[T]:
    if log.value is None:
        return unknown(log.reason, log.source)
    found = read(log.value.notes)
    return Fact(found[0], log.source, found[1]) if found else unknown(f"{log.source} {absent}", log.source)


def _remapping(sources: Sources, log: Fact[KernelLog]) -> Fact[bool]:
    """Interrupt chips say what is in use; the log says it only as long as its first lines are kept."""
    for entry in sources.entries("proc.interrupts"):
        chips = platform.interrupt_chips(entry.stdout)
        used = [chip for chip in chips if chip.startswith("IR-")]
        plain = [chip for chip in chips if chip.startswith(("PCI-MSI", "IO-APIC"))]
        if used or plain:
            shown = shorten([f"{chip} {chips[chip]}" for chip in used or plain])
            return Fact(bool(used), entry.source, shown)
    return _noted(log, kernel_log.remapping, "says nothing of interrupt remapping")


def _listed_groups(sources: Sources) -> Fact[Mapping[str, tuple[str, ...]]] | None:
    if not sources.entries("iommu.groups"):
        return None

    def read(text: str) -> Reading[Mapping[str, tuple[str, ...]]]:
        return iommu_text.listing(text).groups, shorten([row.rstrip() for row in text.split("\n") if row.strip()])

    return sources.fact(read, "iommu.groups")


def _default_domain(log: Fact[KernelLog]) -> Fact[str]:
    if log.value is None:
        return unknown(log.reason, log.source)
    found = iommu_text.default_domain(log.value)
    if found is None:
        return unknown(f"{log.source} has no line `iommu: Default domain type`", log.source)
    return Fact(found[0], log.source, found[1])


def topology(sources: Sources) -> Fact[Topology]:
    """Read ``nvidia-smi topo -m``."""

    def read(text: str) -> Reading[Topology]:
        return topology_text.parse(text), shorten(topology_text.excerpt(text))

    return sources.fact(read, "nvidia_smi.topo_m")


def p2p(sources: Sources) -> dict[str, Fact[P2pMatrix]]:
    """Read the peer-to-peer matrices by mode. Read and write always have an entry, others where they were asked for."""
    return {
        mode: _matrix(sources, mode) for mode in p2p_text.MODES if mode in ("r", "w") or sources.asked(f"{_P2P}{mode}")
    }


def _matrix(sources: Sources, mode: str) -> Fact[P2pMatrix]:
    return sources.fact(partial(_p2p_reading, mode), f"{_P2P}{mode}")


def _p2p_reading(mode: str, text: str) -> Reading[P2pMatrix]:
    return p2p_text.parse(text, mode), shorten(p2p_text.excerpt(text))
