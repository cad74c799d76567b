"""What the judges of all families share: words, the kernel log, GPUs, what a change puts at stake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.finding import Excerpt, Gain
from ..core.snapshot import CommandLine, Fact, Gpu, LogLine, PciFunction, Snapshot
from .knowledge import gpu_model, version_tuple
from .views import view

# What a remediation puts at stake beyond its own purpose. A rule appends the notes that touch it to its risk.
SECURITY_NOTES: Mapping[str, str] = {
    "acs_override": "pcie_acs_override and allow_unsafe_interrupts weaken the isolation of guests.",
    "iommu": "iommu=pt or an IOMMU switched off removes the DMA protection of host drivers.",
    "acs": "Without ACS, devices below one switch reach each other unchecked.",
    "forced_p2p": "ForceP2P and the clique only tell software that an untested path works.",
    "mitigations": "mitigations=off is never needed.",
}

RISK_STOP = "Stops the virtual machine; a reboot from inside the guest is not enough."
RISK_RESET = "An RTX 5090 or RTX PRO 6000 Blackwell may not answer after a VM stop until its host is power-cycled."

# What a grant that really delivers brought elsewhere.
MENLO_GAIN = Gain("14 -> 0.45", "us copy latency", "Menlo, 8x RTX PRO 6000 in a KVM guest: one site, not repeated here")

VGPU_MODES = ("VGPU", "VF")
FOREIGN_DRIVERS = ("nouveau", "nova_core", "nova", "nova_drm", "nvidiafb")


# --- small things ---------------------------------------------------------------------------------------------------


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return ``a, b and c``; past ``most`` names, the rest as a count."""
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def counted(number: int, noun: str) -> str:
    """Return ``1 GPU`` or ``3 GPUs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def log_excerpt(snapshot: Snapshot, lines: Sequence[LogLine], most: int = 3) -> Excerpt:
    """Return the first of these kernel messages as an excerpt, with the count of the others."""
    shown = [f"{line.stamp} {line.text}".strip() for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"... and {len(lines) - most} more such lines")
    return Excerpt(snapshot.kernel.log.source or "kernel_log", "\n".join(shown))


def log_lines(snapshot: Snapshot, pattern: str, *words: str) -> tuple[LogLine, ...]:
    """Return the kernel messages that match, or nothing where the log is not known; see ``KernelLog.matching``."""
    log = snapshot.kernel.log.value
    return log.matching(pattern, *words) if log else ()


def nvrm_lines(snapshot: Snapshot) -> tuple[LogLine, ...]:
    """Return what the NVIDIA driver said in the kernel log: far fewer lines to search than all of it."""
    log = snapshot.kernel.log.value
    return log.notes.get("nvrm", ()) if log else ()


def in_container(snapshot: Snapshot) -> bool:
    """Whether this is surely a container: its kernel and modules are then those of the host below."""
    return snapshot.machine.container.value not in (None, "none")


def kernel_version(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the running kernel's version as numbers, empty where it is not known."""
    return version_tuple(snapshot.kernel.release.value or "")


def is_pve_kernel(release: str) -> bool:
    """Whether this kernel release was built by Proxmox."""
    return release.endswith("-pve")


def token(name: str, value: str | None) -> str:
    """Return a kernel command line token as it is written."""
    return name if value is None else f"{name}={value}"


def listed_items(line: CommandLine, key: str) -> tuple[str, ...]:
    """Return all items of a comma list that may be given several times (``pci=a,b pci=c``)."""
    return tuple(item for value in line.all(key) if value for item in value.split(","))


def driver_version(snapshot: Snapshot) -> str:
    """Return the version of the loaded driver, or "" where nothing tells it."""
    smi = snapshot.driver.smi.value
    return snapshot.driver.loaded_version.value or (smi.driver_version if smi else None) or ""


def versions_differ(first: str | None, second: str | None) -> bool:
    """Whether two versions are both known and differ (580.126 and 580.126.09 do not: one was cut)."""
    if not first or not second:
        return False
    shorter, longer = sorted((first.split("."), second.split(".")), key=len)
    return longer[: len(shorter)] != shorter


# --- GPUs -----------------------------------------------------------------------------------------------------------


@view
def gpu_count(snapshot: Snapshot) -> Fact[int]:
    """Return how many GPUs the machine surely has, or why that is not known. A cut paste proves no count."""
    if snapshot.pci.functions.known and snapshot.pci.complete:
        return Fact(len(snapshot.pci.gpus()), snapshot.pci.functions.source)
    smi = snapshot.driver.smi.value
    if snapshot.gpus.known and smi is not None and smi.state == "ok":
        return Fact(len(snapshot.gpus.value or ()), snapshot.gpus.source)
    for matrix in snapshot.p2p.values():
        if matrix.value is not None and not matrix.value.truncated:
            return Fact(len(matrix.value.gpus), matrix.source)
    topology = snapshot.topology.value
    if topology is not None and topology.gpus:
        # The header names every GPU, also where rows below it were cut.
        return Fact(len(topology.gpus), snapshot.topology.source)
    reason = snapshot.pci.functions.reason or "the list of PCI devices is only a part"
    return Fact(reason=f"the number of GPUs is not known: {reason}")


@view
def driver_gpu_count(snapshot: Snapshot) -> int | None:
    """Return how many GPUs the driver showed in any of its outputs, or None where it showed none of them.

    The longest list counts: a shorter one may be a cut paste.
    """
    driver, counts = snapshot.driver, []
    smi = driver.smi.value
    if snapshot.gpus.known and smi is not None and smi.state == "ok":
        counts.append(len(snapshot.gpus.value or ()))
    if driver.proc_gpus.known:
        counts.append(len(driver.proc_gpus.value or ()))
    if snapshot.topology.value is not None:
        counts.append(len(snapshot.topology.value.gpus))
    counts += [len(matrix.value.gpus) for matrix in snapshot.p2p.values() if matrix.value is not None]
    if not counts and smi is not None and smi.state == "no_devices":
        return 0
    return max(counts, default=None)


def device_id(gpu: Gpu) -> str | None:
    """Return the PCI device id (four hex digits) that ``nvidia-smi`` tells: ``0x2BB510DE`` is ``2bb5``."""
    for key, value in gpu.raw.items():
        if key.lower().replace("_", " ").replace(".", " ").endswith("device id") and value.lower().startswith("0x"):
            return value[2:6].lower()
    return None


@view
def has_no_gpu(snapshot: Snapshot) -> bool:
    """Whether a complete list of PCI functions holds no NVIDIA GPU."""
    return snapshot.pci.functions.known and snapshot.pci.complete and not snapshot.pci.gpus()


@view
def virtual_gpus(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the GPUs that are vGPUs or virtual functions: for them P2P over PCIe does not exist."""
    by_mode = [gpu.bus_id for gpu in snapshot.gpus.value or () if (gpu.virtualization_mode or "").upper() in VGPU_MODES]
    return tuple(dict.fromkeys([*by_mode, *(one.bdf for one in snapshot.pci.gpus() if one.physfn)]))


def stop_risk(gpus: Sequence[PciFunction]) -> str:
    """Say what stopping a VM with these GPUs risks. Unknown GPUs get the warning too."""
    models = [gpu_model(one.device) for one in gpus]
    if models and all(model is not None and not model.stop_start_risk for model in models):
        return RISK_STOP
    return f"{RISK_STOP} {RISK_RESET}"
