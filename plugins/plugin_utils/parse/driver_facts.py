"""Facts of the NVIDIA driver: modules, units, device nodes, packages, DKMS, NCCL's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from ..core.snapshot import (
    AptChange,
    AptOutput,
    DkmsState,
    Driver,
    FabricReport,
    Fact,
    NvidiaSmi,
    Package,
)
from . import dkms, fabric, nvidia_facts, packages
from . import driver as driver_text
from .facts import Reading, Sources, said
from .nvidia_facts import Told
from .text import shorten


def driver(sources: Sources, smi: Fact[NvidiaSmi], told: Told) -> Driver:
    """Read what of the driver is loaded, on disk and in packages."""
    return Driver(
        smi=smi,
        loaded_version=sources.fact(_loaded_version, "proc.driver.nvidia.version"),
        loaded_flavour=sources.fact(_loaded_flavour, "proc.driver.nvidia.version"),
        module_version=sources.fact(_module_version, "modinfo.nvidia"),
        module_license=sources.fact(_module_license, "modinfo.nvidia"),
        library_version=sources.fact(driver_text.library_version, "nvidia_libraries"),
        params=sources.fact(_params, "proc.driver.nvidia.params"),
        proc_gpus=sources.fact(_proc_gpus, "proc.driver.nvidia.gpus"),
        dkms=_dkms(sources),
        packages=_packages(sources),
        apt_history=_apt_history(sources),
        secure_boot=_secure_boot(sources),
        fabric_manager=_fabric_manager(sources),
        persistence_daemon=sources.fact(_persistence_daemon, "systemctl.nvidia_units"),
        attached_gpus=told.attached,
        processes=told.processes,
        samples=told.samples,
        nvlinks=nvidia_facts.nvlinks(sources),
        device_nodes=sources.fact(_device_nodes, "nvidia_devices"),
        uvm_hmm_disabled=sources.fact(_hmm_disabled, "nvidia_uvm.parameters"),
        runtime_d3=sources.fact(_runtime_d3, "proc.driver.nvidia.power"),
        not_ready=sources.fact(_not_ready, *_CUDA_OUTPUTS),
        apt=_apt(sources),
    )


# Outputs in which CUDA's own words may stand.
_CUDA_OUTPUTS = ("engine.log", "nccl.log", "nccl_tests", "p2p_bandwidth_latency", "simple_p2p", "nvbandwidth")
_NOT_READY = re.compile(r"[^\n]*\bsystem not yet initialized[^\n]*")
_D3_PATH = re.compile(r"/gpus/([0-9a-fA-F:.]+)/power")


def _fabric_manager(sources: Sources) -> Fact[tuple[FabricReport, ...]]:
    found: list[FabricReport] = []
    origin, rows = "", []
    for entry in sources.asked("systemctl.fabricmanager"):
        reports = fabric.reports(entry.text, entry.source)
        if reports:
            origin = origin or entry.source
            found.extend(reports)
            rows += [row.strip()[:300] for row in entry.text.split("\n") if re.search("abric ?manager", row)]
    for entry in sources.entries("systemctl.nvidia_units"):
        state = fabric.unit_states(entry.stdout).get("nvidia-fabricmanager")
        if state and not any(one.state for one in found):
            origin = origin or entry.source
            found.append(FabricReport(state=state, source=entry.source))
            rows.append(f"nvidia-fabricmanager: {state}")
    if not found:
        return sources.missing("systemctl.fabricmanager")
    return Fact(tuple(found), origin, shorten(rows))


def _persistence_daemon(text: str) -> Reading[str]:
    state = fabric.unit_states(text).get("nvidia-persistenced")
    return (state, f"nvidia-persistenced: {state}") if state else None


def _device_nodes(text: str) -> Reading[tuple[str, ...]]:
    names = tuple(row.split()[-1].removeprefix("/dev/") for row in text.split("\n") if row.strip())
    return names, shorten(list(names)) or "(none)"


def _hmm_disabled(text: str) -> Reading[bool]:
    found = re.search(r"uvm_disable_hmm <==\s*([YN01])\b", text)
    return (found[1] in "Y1", f"uvm_disable_hmm: {found[1]}") if found else None


def _runtime_d3(text: str) -> Reading[Mapping[str, str]]:
    states = driver_text.runtime_d3(text)
    return (states, shorten([f"{bdf}: Runtime D3 {state}" for bdf, state in states.items()])) if states else None


def _not_ready(text: str) -> Reading[str]:
    found = _NOT_READY.search(text) if "system not yet initialized" in text else None
    return (found[0].strip()[-300:], found[0].strip()[-300:]) if found else None


def _apt(sources: Sources) -> Fact[tuple[AptOutput, ...]]:
    found: list[AptOutput] = []
    origin, rows = "", []
    for entry in sources.entries("apt.output"):
        one = packages.apt_output(entry.text, entry.command)
        if one.unmet or one.not_found or one.additional or one.removed or one.new:
            origin = origin or entry.source
            found.append(one)
            rows += packages.apt_excerpt(entry.text)
    return Fact(tuple(found), origin, shorten(rows)) if origin else sources.missing("apt.output")


def _loaded_version(text: str) -> Reading[str]:
    loaded = driver_text.loaded(text)
    return loaded.version, loaded.line


def _loaded_flavour(text: str) -> Reading[str]:
    loaded = driver_text.loaded(text)
    return loaded.flavour, loaded.line


def _module_version(text: str) -> Reading[str]:
    return said(driver_text.modinfo(text).version, text, r"^\s*version:")


def _module_license(text: str) -> Reading[str]:
    return said(driver_text.modinfo(text).license, text, r"^\s*license:")


def _params(text: str) -> Reading[Mapping[str, str]]:
    return said(driver_text.params(text) or None, text, r"RegistryDwords:|^\s*\w+:")


def _proc_gpus(text: str) -> Reading[tuple[str, ...]]:
    found = driver_text.proc_gpus(text)
    return found, shorten([f"/proc/driver/nvidia/gpus/{bdf}" for bdf in found])


def _whole_text(text: str) -> Reading[str]:
    rows = [row.rstrip() for row in text.split("\n") if row.strip()]
    return (text, shorten(rows)) if rows else None


def _dkms(sources: Sources) -> Fact[tuple[DkmsState, ...]]:
    states: list[DkmsState] = []
    origin, rows = "", []
    for entry in sources.entries("dkms.status", "dkms.log", "apt.output"):
        is_status = entry.source.split("@")[0] == "dkms.status"
        found = (dkms.status(entry.text) if is_status else ()) + dkms.failures(entry.text)
        if found or is_status:
            origin = origin or entry.source
            states.extend(found)
            pattern = r": (?:added|built|installed|broken)\b|headers for kernel|Bad return status|exit status|error: "
            rows += [row.strip() for row in entry.text.split("\n") if re.search(pattern, row)]
    if not origin:
        return sources.missing("dkms.status")
    return Fact(tuple(states), origin, shorten(rows))


def _packages(sources: Sources) -> Fact[Mapping[str, Package]]:
    held = tuple(name for entry in sources.entries("apt.holds") for name in packages.holds(entry.stdout))
    return sources.fact(partial(_dpkg, held), "dpkg")


def _dpkg(held: tuple[str, ...], text: str) -> Reading[Mapping[str, Package]]:
    found = packages.dpkg(text, held)
    rows = [row.strip() for row in text.split("\n") if re.search(r"nvidia|cuda|nccl", row)]
    return found, shorten(rows)


def _apt_history(sources: Sources) -> Fact[tuple[AptChange, ...]]:
    def read(text: str) -> Reading[tuple[AptChange, ...]]:
        found = packages.apt_history(text)
        started = {one.started for one in found[-3:]}
        blocks = [block for block in text.split("\n\n") if any(at in " ".join(block.split()) for at in started)]
        return found, shorten([row.strip()[:300] for block in blocks for row in block.split("\n") if row.strip()])

    return sources.fact(read, "apt.history")


def _secure_boot(sources: Sources) -> Fact[str]:
    fact = sources.fact(packages.secure_boot, "mokutil.sb_state")
    if fact.known:
        return fact
    firmware = sources.fact(packages.secure_boot_of_firmware, "boot")
    return firmware if firmware.known else fact
