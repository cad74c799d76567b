"""Rules C3 and C4: interrupt remapping, and the parameter that hides its lack."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..core.finding import Excerpt, Fix
from ..core.snapshot import CommandLine, Snapshot
from .common import (
    SECURITY_NOTES,
)
from .hypervisor import set_kernel_parameters
from .passthrough import REBOOT_RISK
from .registry import Fleet, Verdict, rule, verdict

_UNSAFE = "vfio_iommu_type1.allow_unsafe_interrupts"
_YES = ("Y", "1", "y")


# --- C3, C4: interrupts ---------------------------------------------------------------------------------------------


@rule(
    "C3",
    "interrupt-remapping",
    title="Interrupt remapping is on",
    roles=("hypervisor",),
    severity="high",
    looks_at=("proc.interrupts", "kernel_log", "sysfs.iommu"),
    why="Without interrupt remapping VFIO refuses devices: a guest could send interrupts to the host with its DMA.",
    restart="reboot",
    automation="never",
    risk=f"{REBOOT_RISK} Firmware settings have to change.",
    verify="grep -c IR-PCI-MSI /proc/interrupts; dmesg | grep -iE 'interrupt remapping|IRQ remapping'",
    sources=("pve-docs qm-pci-passthrough", "kernel drivers/iommu"),
)
def _interrupt_remapping(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    iommu, remapping = snapshot.iommu, snapshot.iommu.interrupt_remapping
    if iommu.units.known and not iommu.units.value:
        yield verdict("not_applicable", "The IOMMU is off", iommu.units, reason="rule C1 judges that")
    elif remapping.value:
        yield verdict("pass", "Interrupt remapping is on", remapping)
    elif remapping.known or _log_says_nothing(snapshot):
        evidence = remapping if remapping.known else snapshot.kernel.log
        yield verdict(
            "fail",
            "Interrupt remapping is off: VFIO refuses to pass devices",
            evidence,
            fix=Fix(
                "Switch VT-d or AMD-Vi with interrupt remapping (x2APIC) on in the firmware setup; the module "
                "parameter allow_unsafe_interrupts only hides the lack",
                ("# reboot into the firmware setup: systemctl reboot --firmware-setup", "grep IR- /proc/interrupts"),
            ),
            explains=("C4",),
        )
    else:
        reason = remapping.reason
        if snapshot.kernel.log.known:
            reason += "; the kernel log does not reach back to the boot, so its silence proves nothing"
        yield verdict("unknown", "Whether interrupt remapping is on is not known", reason=reason)


def _log_says_nothing(snapshot: Snapshot) -> bool:
    """Whether the whole boot is in the log and an IOMMU spoke there, but not of interrupt remapping."""
    log = snapshot.kernel.log.value
    return log is not None and log.from_boot and snapshot.iommu.technology.known


@rule(
    "C4",
    "unsafe-interrupts",
    title="VFIO does not accept unsafe interrupts",
    roles=("hypervisor",),
    severity="high",
    looks_at=("module_parameters", "modprobe.d", "proc.cmdline", "proc.interrupts"),
    why="allow_unsafe_interrupts lets a guest inject interrupts into the host and into other guests.",
    restart="reboot",
    automation="ask",
    risk=f"{REBOOT_RISK} {SECURITY_NOTES['acs_override']} Where interrupt remapping is off, no VM with a passed device "
    "starts without the parameter.",
    verify="cat /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts   # wanted: N",
    sources=("kernel drivers/vfio/vfio_iommu_type1.c",),
)
def _unsafe_interrupts(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    kernel = snapshot.kernel
    running = (kernel.parameters.value or {}).get(_UNSAFE)
    line = kernel.command_line.value or CommandLine()
    configured = [
        row
        for row in kernel.modprobe.value or ()
        if re.match(r"options\s+vfio_iommu_type1\b.*\ballow_unsafe_interrupts=(?:1|[yY])", row)
    ]
    if line.last(_UNSAFE) in _YES:
        configured.append(f"{_UNSAFE}={line.last(_UNSAFE)}")
    if running is None and not configured:
        if kernel.modprobe.known and kernel.command_line.known and kernel.parameters.known:
            yield verdict("pass", "Nothing asks VFIO to accept unsafe interrupts", kernel.modprobe, kernel.command_line)
        else:
            missing = next(
                (one.reason for one in (kernel.parameters, kernel.modprobe, kernel.command_line) if not one.known), ""
            )
            yield verdict("unknown", "Whether VFIO accepts unsafe interrupts is not known", reason=missing)
        return
    if running not in _YES and not configured:
        yield verdict("pass", "VFIO refuses unsafe interrupts", Excerpt("module_parameters", f"{_UNSAFE} {running}"))
        return
    shown = [Excerpt("module_parameters", f"{_UNSAFE} {running}")] if running is not None else []
    shown += [Excerpt("modprobe.d" if one.startswith("options") else "proc.cmdline", one) for one in configured]
    needed = snapshot.iommu.interrupt_remapping.value is False
    steps = (
        "# /etc/modprobe.d: remove the option allow_unsafe_interrupts wherever it stands",
        *(
            set_kernel_parameters(snapshot, f"remove {_UNSAFE}")
            if line.has(_UNSAFE)
            else ("update-initramfs -u -k all",)
        ),
    )
    where = "VFIO accepts" if running in _YES else "From the next boot VFIO accepts"
    if snapshot.iommu.interrupt_remapping.value:
        state, words = "fail", "although interrupt remapping works: the parameter is not needed"
    elif needed:
        state, words = "warn", "because interrupt remapping is off: a guest can inject interrupts into the host"
    else:
        state, words = "warn", "and whether interrupt remapping would do is not known"
    fix = Fix("Remove the parameter" if not needed else "Switch interrupt remapping on, then remove it", steps)
    if state == "fail":
        yield verdict("fail", f"{where} unsafe interrupts, {words}", *shown, fix=fix)
    else:
        yield verdict("warn", f"{where} unsafe interrupts, {words}", *shown, severity="high", fix=fix)
