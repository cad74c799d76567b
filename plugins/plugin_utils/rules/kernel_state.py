"""Rules H2 and H3: kernels with a bad record, and what a locked down kernel refuses."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Snapshot
from .common import has_no_gpu, in_container
from .knowledge import known_bad_kernel
from .passthrough import HOST_ROLES
from .registry import Fleet, Verdict, rule, verdict


@rule(
    "H2",
    "kernel-driver-known-bad",
    title="The running kernel has no bad record",
    roles=HOST_ROLES,
    severity="medium",
    looks_at=("uname", "proc.version"),
    why="Others saw this kernel do harm on machines like this one; the list names the report.",
    restart="reboot",
    automation="never",
    risk="Boots another kernel: its module for the driver must be there first (rule H4).",
    verify="uname -r",
    sources=("known_bad.yml, with the report of each entry",),
)
def _known_bad(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    release = snapshot.kernel.release
    if release.value is None:
        yield verdict("unknown", "Which kernel runs is not known", reason=release.reason)
        return
    if has_no_gpu(snapshot):
        reason = "no NVIDIA function on the PCI bus"
        yield verdict("not_applicable", "The machine has no NVIDIA GPU", reason=reason)
        return
    bad = known_bad_kernel(release.value)
    if bad is None:
        yield verdict("pass", f"Kernel {release.value} is on no list of bad records", release)
        return
    yield verdict(
        "warn",
        f"Kernel {release.value} has a bad record: {bad.seen}",
        release,
        Excerpt("known_bad.yml", f"{bad.id}: {bad.source} ({bad.date})"),
        severity="medium",
        fix=Fix(
            f"Boot {bad.instead}, which worked there",
            (
                "proxmox-boot-tool kernel list   # or: ls /boot/vmlinuz-*",
                "# Proxmox: proxmox-boot-tool kernel pin RELEASE && reboot",
            ),
        ),
    )


@rule(
    "H3",
    "kernel-lockdown",
    title="What the kernel's lockdown refuses",
    severity="info",
    looks_at=("lockdown", "kernel_log", "mokutil.sb_state"),
    why="Locked down, a kernel refuses modules without a valid signature, raw access to BARs, and setpci's writes.",
    verify="cat /sys/kernel/security/lockdown",
    sources=("kernel_lockdown(7)",),
)
def _lockdown(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    lockdown = snapshot.kernel.lockdown
    if in_container(snapshot):
        reason = "in a container this is the host's matter"
        yield verdict("not_applicable", "The kernel is not this machine's own", reason=reason)
    elif lockdown.value is None:
        yield verdict("unknown", "Whether the kernel is locked down is not known", reason=lockdown.reason)
    elif lockdown.value == "none":
        yield verdict("pass", "The kernel is not locked down", lockdown)
    else:
        yield verdict(
            "info",
            f"The kernel is locked down ({lockdown.value}): unsigned modules, setpci writes and access to BARs are "
            "refused (rule F6 judges the driver's signature)",
            lockdown,
        )
