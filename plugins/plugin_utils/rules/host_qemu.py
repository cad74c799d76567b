"""Rules C21 and C23: what QEMU could not map, and whether it can give a clique."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Snapshot, VmConfig
from ..parse import pci_config
from .common import (
    RISK_RESET,
    RISK_STOP,
    listed,
)
from .knowledge import number, version, version_text, version_tuple
from .machines import CLIQUE, Passed, change_vm, gpu_vms, restart_vm, vm, without_option
from .machines import vmid as vmid_of
from .passthrough import log_notes
from .registry import Fleet, Verdict, rule, verdict

# --- C21, C23: what QEMU says at a start ----------------------------------------------------------------------------

_MAP = re.compile(r"dma_map\([^,]+, (0x[0-9a-f]+), (0x[0-9a-f]+), [^)]*\) = (-\d+)")
_UNSUPPORTED = re.compile(
    r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): PCI peer-to-peer transactions on BARs are not"
)
_IOMMUFD = re.compile(r"IOMMU_IOAS_MAP failed: .*PCI BAR")


@rule(
    "C21",
    "vfio-p2p-map-failed",
    title="QEMU could map the GPUs' memory for their peers",
    roles=("hypervisor",),
    severity="critical",
    looks_at=("pve.start_log", "qemu.log", "kernel_log"),
    why=(
        "The BARs of the peers are not in the IOMMU's tables: no peer-to-peer access can work, and a clique would only "
        "make the driver believe that it does."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} {RISK_RESET}",
    verify="start the VM and read its task log: wanted is no line about peer-to-peer transactions",
    sources=("QEMU hw/vfio, series of 2025-02", "qemu-devel mailing list"),
    without_role=True,
)
def _p2p_map(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    logs = snapshot.vm.start_logs
    found = False
    for vmid, rows in (logs.value or {}).items():
        bad = _refused(rows)
        if bad:
            found = True
            shown = Excerpt(logs.source, "\n".join(bad[:3]))
            yield _map_failed(bad, shown, f"vm {vmid}", (snapshot.vm.configs.value or {}).get(vmid))
    bad = _refused([line.text for line in log_notes(snapshot, "p2p_map")])
    if bad:
        found = True
        yield _map_failed(bad, Excerpt(snapshot.kernel.log.source, "\n".join(bad[:3])), _device_of(bad))
    if found:
        return
    if snapshot.role.value != "hypervisor":
        reason = snapshot.role.reason or "the log of a VM's start was not read"
        yield verdict("unknown", "Whether QEMU could map the GPUs' memory is not known", reason=reason)
        return
    vms = [config.vmid for config, lines in gpu_vms(snapshot) if len(lines) > 1]
    if snapshot.vm.configs.known and not vms:
        yield verdict("not_applicable", "No VM has two GPUs", reason="peer-to-peer needs two")
        return
    read = [vmid for vmid in vms if vmid in (logs.value or {})]
    for vmid in read:
        yield verdict(
            "pass",
            f"The log of the last start of VM {vmid} names no BAR that QEMU could not map (what QEMU says later is not "
            "kept there)",
            Excerpt(logs.source, "\n".join((logs.value or {})[vmid][-2:])),
            subject=f"vm {vmid}",
        )
    if not read or len(read) < len(vms):
        rest = [vmid for vmid in vms if vmid not in read]
        yield verdict(
            "unknown",
            "Whether QEMU could map the GPUs' memory for their peers is not known",
            subject=f"vm {rest[0]}" if len(rest) == 1 else "",
            reason=logs.reason or "the log of the last start was not read",
        )


def _refused(rows: Sequence[str]) -> list[str]:
    """Return the lines that say that a BAR was not mapped. Tiny regions (a ROM, a quirk) do not count."""
    sizes = [int(hit[2], 16) for row in rows if (hit := _MAP.search(row))]
    if sizes and max(sizes) < number("mmio.smallest_bar1_mib") * 1024 * 1024:
        return []
    return [row for row in rows if _MAP.search(row) or _UNSUPPORTED.search(row) or _IOMMUFD.search(row)]


def _device_of(rows: Sequence[str]) -> str:
    return next((hit[1] for row in rows if (hit := _UNSUPPORTED.search(row))), "")


def _map_failed(rows: Sequence[str], shown: Excerpt, subject: str, config: VmConfig | None = None) -> Verdict:
    devices = list(dict.fromkeys(hit[1] for row in rows if (hit := _UNSUPPORTED.search(row))))
    if any(_IOMMUFD.search(row) for row in rows):
        summary = "Use VFIO's container backend in place of iommufd, which cannot map device memory"
        change = "# VM args: take out -object iommufd,... and iommufd=... of the devices"
    else:
        summary = "Place the guest's BARs where the IOMMU reaches: fewer address bits, and no virtual IOMMU"
        cpu = (config.settings.get("cpu") if config else None) or "host"
        bits = number("mmio.narrow_host_bits")
        change = (
            f"qm set {vmid_of(config)} --cpu {without_option(cpu, 'phys-bits')},phys-bits={bits}"
            if config
            else (
                f"# qm set VMID --cpu ...,phys-bits={bits} after a copy of the VM's .conf; then stop and start the VM"
            )
        )
    steps = ("# until that is solved: no x-nv-gpudirect-clique in args", change)
    return verdict(
        "fail",
        f"QEMU could not map {'the BARs of ' + listed(devices) if devices else 'a BAR'} into the IOMMU: peer-to-peer "
        "cannot work in this VM",
        shown,
        subject=subject,
        fix=Fix(summary, change_vm("C21", config, *steps, libvirt=change.removeprefix("# ")) if config else steps),
        explains=("D5", "D7", "D1"),
    )


_CLIQUE_ERROR = re.compile(r"NVIDIA GPUDirect Clique ID: (invalid [a-z ]+|unsupported [A-Za-z ]+)")
_CLIQUE_PLACE = 0xC8


@rule(
    "C23",
    "qemu-version-clique",
    title="QEMU can give the GPUs a P2P clique",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("kvm.version", "pve.version", "pve.conf", "sysfs.pci", "pve.start_log", "pve.qemu_binaries"),
    why=(
        "The clique's capability needs a free place in the card's configuration space: C8h, and only from QEMU 8.1 on "
        "also D4h where the card keeps MSI-X at C8h."
    ),
    restart="vm_stop_start",
    automation="never",
    risk=f"{RISK_STOP} {RISK_RESET}",
    verify="kvm --version; qm status VMID --verbose | grep running-qemu",
    sources=("QEMU hw/vfio/pci-quirks.c, commits dfbee78db8 and f6b30c1984f7",),
)
def _qemu_clique(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    errors = [line.text for line in log_notes(snapshot, "clique")]
    errors += [
        row for rows in (snapshot.vm.start_logs.value or {}).values() for row in rows if _CLIQUE_ERROR.search(row)
    ]
    for hit in dict.fromkeys(found[1] for row in errors if (found := _CLIQUE_ERROR.search(row))):
        yield verdict(
            "fail",
            f"QEMU refused the P2P clique: {hit.strip()}",
            Excerpt("pve.start_log", next(row for row in errors if hit in row)),
            fix=Fix(_ERROR_ADVICE.get(hit.strip(), "Update QEMU, then stop and start the VM"), ("kvm --version",)),
            explains=("D1", "D3"),
        )
    wanting = [(config, lines) for config, lines in gpu_vms(snapshot) if CLIQUE in config.settings.get("args", "")]
    if not wanting:
        if errors:
            return
        if snapshot.vm.configs.known:
            reason = "no args line sets x-nv-gpudirect-clique"
            yield verdict("not_applicable", "No VM asks for a P2P clique", reason=reason)
        else:
            yield verdict(
                "unknown", "Whether a VM asks for a P2P clique is not known", reason=snapshot.vm.configs.reason
            )
        return
    installed = snapshot.vm.qemu_version
    for config, lines in wanting:
        if installed.value is None:
            yield verdict(
                "unknown",
                f"Whether QEMU can give VM {config.vmid} a clique is not known",
                subject=vm(config),
                reason=installed.reason,
            )
            continue
        replaced = (snapshot.vm.qemu_replaced.value or {}).get(config.vmid)
        yield _judge_qemu(snapshot, config, lines, version_tuple(installed.value), bool(replaced))


_ERROR_ADVICE = {
    "invalid config space": "Update QEMU to 8.1 or later: the card keeps MSI-X where older ones put the capability",
    "invalid device vendor": "Take the clique away from devices that are no NVIDIA GPU",
    "unsupported PCI class": "Take the clique away from functions that are no display controller",
}


def _judge_qemu(
    snapshot: Snapshot, config: VmConfig, lines: Sequence[Passed], installed: tuple[int, ...], replaced: bool
) -> Verdict:
    vmid, fact, subject = config.vmid, snapshot.vm.qemu_version, vm(config)
    text = fact.value or ""
    package = "qemu-system-x86" if config.manager == "libvirt" else "pve-qemu-kvm"
    upgrade = Fix(
        f"Update QEMU to {version_text('qemu.clique_fallback')} or later, then stop and start the VM",
        (f"apt-get update && apt-get install {package}", restart_vm(config)),
    )
    if installed < version("qemu.clique"):
        return verdict(
            "fail", f"QEMU {text} does not know the P2P clique of VM {vmid}", fact, subject=subject, fix=upgrade
        )
    if installed >= version("qemu.clique_fallback"):
        if replaced:
            return verdict(
                "unknown",
                f"VM {vmid} still runs an older QEMU than the installed {text}",
                snapshot.vm.qemu_replaced,
                subject=subject,
                reason="its program file was replaced since the start; the version that runs was not read",
            )
        return verdict("pass", f"QEMU {text} can give VM {vmid} a P2P clique", fact, subject=subject)
    taken, unread = [], []
    for one in lines:
        places = pci_config.places(pci_config.read_hex(one.display.config_hex)) if one.display else ()
        if not places:
            unread.append(one.name)
        elif _CLIQUE_PLACE in places:
            taken.append(one.name)
    if taken:
        return verdict(
            "fail",
            f"QEMU {text} has no place for the P2P clique of {listed(taken)} in VM {vmid}: the card's own capability "
            "stands at C8h",
            fact,
            subject=subject,
            fix=upgrade,
            explains=("D1",),
        )
    if unread:
        return verdict(
            "unknown",
            f"Whether QEMU {text} has a place for the P2P clique of VM {vmid} is not known",
            fact,
            subject=subject,
            reason=f"the configuration space of {listed(unread)} was not read as root",
        )
    return verdict("pass", f"QEMU {text} can give VM {vmid} a P2P clique at C8h", fact, subject=subject)
