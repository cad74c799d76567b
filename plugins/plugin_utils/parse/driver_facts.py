"""Facts of the NVIDIA driver: how nvidia-smi answers, the GPUs, modules, packages, DKMS, NCCL's settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..core.evidence import Evidence
from ..core.snapshot import (
    AptChange,
    DkmsState,
    Driver,
    Fact,
    Gpu,
    Nccl,
    NvidiaSmi,
    Package,
    Setting,
)
from . import dkms, nvidia_query, nvidia_smi, packages
from . import driver as driver_text
from . import gpus as gpu_list
from . import nccl as nccl_text
from .facts import Reading, Sources, said
from .text import RefusedError, first_line, shorten

# Any of these may say how nvidia-smi ended; the plain call comes first.
_SMI_CALLS = tuple(f"nvidia_smi{call}" for call in ("", ".q", ".qx", ".L", ".query_gpu", ".topo_m"))
# Failures that hold for the whole driver, whichever call met them.
_SMI_FAILURES = ("no_driver", "version_mismatch", "unknown_error", "no_permission", "lost_gpu", "no_devices")


def smi(sources: Sources) -> Fact[NvidiaSmi]:
    """Say how nvidia-smi answered. A failure in any call counts; versions come from the first call that names them."""
    answers: list[tuple[Evidence, NvidiaSmi]] = []
    for entry in sources.asked(*_SMI_CALLS):
        plain = entry.source.split("@")[0] == "nvidia_smi"
        try:
            answer = nvidia_smi.answer(entry.text or (entry.reason if plain else ""), entry.rc)
        except RefusedError:
            # A call with other contents (a matrix, a CSV) says nothing of how the driver is.
            continue
        if plain or answer.state == "ok" or answer.state in _SMI_FAILURES:
            answers.append((entry, answer))
    if not answers:
        return sources.missing("nvidia_smi")
    entry, chosen = next((one for one in answers if one[1].state in _SMI_FAILURES), answers[0])
    for _, other in answers:
        chosen = replace(
            chosen,
            driver_version=chosen.driver_version or other.driver_version,
            cuda_version=chosen.cuda_version or other.cuda_version,
            lost=tuple(dict.fromkeys((*chosen.lost, *other.lost))),
        )
    excerpt = chosen.message or first_line(entry.text, r"NVIDIA-SMI \d|Driver Version|^GPU \d+: ")
    return Fact(chosen, entry.source, excerpt)


_GPU_READERS: tuple[tuple[str, Callable[[str], tuple[Gpu, ...]], str], ...] = (
    ("nvidia_smi.q", nvidia_query.query_text, r"^\s*(?:GPU [0-9A-F]{4}|Product Name)"),
    ("nvidia_smi.qx", nvidia_query.query_xml, r"<gpu id|<product_name>"),
    ("nvidia_smi.query_gpu", nvidia_query.query_csv, r","),
    ("nvidia_smi", nvidia_smi.table, r"\|\s*\d+\s.*[0-9A-F]{8}:"),
    ("nvidia_smi.L", nvidia_smi.gpu_list, r"^\s*(?:GPU \d+:|MIG )"),
)


def gpus(sources: Sources, smi: Fact[NvidiaSmi]) -> Fact[tuple[Gpu, ...]]:
    """Join every listing of GPUs. "No devices were found" is a listing too: an empty one."""
    readings: list[tuple[str, tuple[Gpu, ...]]] = []
    excerpt, refusal = "", ""
    for source, read, telling in _GPU_READERS:
        for entry in sources.entries(source):
            try:
                found = read(entry.text)
            except RefusedError as error:
                refusal = refusal or f"{entry.source}: {error}"
                continue
            if found:
                readings.append((entry.source, found))
                rows = [row.strip()[:200] for row in entry.text.split("\n") if re.search(telling, row)]
                excerpt = excerpt or shorten(rows)
    if readings:
        return Fact(gpu_list.merge(readings), readings[0][0], excerpt)
    if smi.value and smi.value.state == "no_devices":
        return Fact((), smi.source, smi.excerpt)
    if smi.value and smi.value.message:
        return sources.missing("nvidia_smi", refusal=f"{smi.source}: {smi.value.message}")
    return sources.missing("nvidia_smi.q", refusal=refusal)


def driver(sources: Sources, smi: Fact[NvidiaSmi]) -> Driver:
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
        fabric_manager=sources.fact(_whole_text, "systemctl.fabricmanager"),
    )


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
    held = [name for entry in sources.entries("apt.holds") for name in packages.holds(entry.stdout)]

    def read(text: str) -> Reading[Mapping[str, Package]]:
        found = packages.dpkg(text, held)
        rows = [row.strip() for row in text.split("\n") if re.search(r"nvidia|cuda|nccl", row)]
        return found, shorten(rows)

    return sources.fact(read, "dpkg")


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


def nccl(sources: Sources) -> Nccl:
    """Read NCCL's settings from files, units and what its log says it took from the environment."""
    settings: list[Setting] = []
    origin, rows = "", []
    for entry in sources.asked("etc.nccl.conf", "peerlane.services", "systemd.unit", *_NCCL_LOGS):
        kind = entry.source.split("@")[0]
        if kind in _NCCL_LOGS:
            found = nccl_text.log_settings(entry.stdout)
        elif kind == "etc.nccl.conf":
            found = nccl_text.conf(entry.stdout, "/etc/nccl.conf")
        else:
            found = nccl_text.services(entry.stdout)
        # A file that is not there, and a log that names no variable, differ: the first says that nothing is set.
        absent = kind == "etc.nccl.conf" and bool(sources.absent(kind))
        if found or absent or (entry.usable and kind not in _NCCL_LOGS):
            origin = origin or entry.source
            settings.extend(found)
            rows += [f"{one.origin}: {one.name}={one.value}" for one in found]
    fact: Fact[tuple[Setting, ...]] = sources.missing("etc.nccl.conf")
    if origin:
        fact = Fact(tuple(settings), origin, shorten(rows))
    return Nccl(
        settings=fact,
        version=sources.fact(lambda text: said(nccl_text.log_version(text), text, "NCCL version"), *_NCCL_LOGS),
    )


_NCCL_LOGS = ("nccl.log", "nccl_tests", "engine.log")
