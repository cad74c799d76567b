"""Rules C14, C25 and H7: address translation services, NUMA nodes, and what shares a switch."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.finding import Excerpt, Fix
from ..core.snapshot import CommandLine, PciFunction, Snapshot
from .common import listed, listed_items
from .hypervisor import set_kernel_parameters
from .machines import gpu_vms, passed
from .passthrough import (
    FIRMWARE_RISK,
    HOST_ROLES,
    RDMA_CLASSES,
    bridges_above,
    excerpt_of,
    host_gpus,
    no_gpu,
)
from .registry import Fleet, Verdict, rule, verdict

# --- C14: address translation services --------------------------------------------------------------------------------


@rule(
    "C14",
    "ats",
    title="Network cards that share a VM with GPUs can translate addresses themselves",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("lspci.vvv", "sysfs.pci", "proc.cmdline", "pve.conf"),
    why=(
        "With ATS a card asks the IOMMU once and then reaches a peer below the same switch directly; without it "
        "GPUDirect RDMA in a VM takes the way over the root complex."
    ),
    restart="reboot",
    automation="never",
    risk="The setting lies in the card's firmware and needs a reset of the card, mostly a reboot of the host.",
    verify="lspci -vvv -s BDF | grep ATSCtl   # wanted: Enable+",
    sources=("NCCL user guide, troubleshooting", "NVIDIA AI Enterprise, optimizing VM configuration"),
)
def _ats(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    configs = snapshot.vm.configs
    if not configs.known:
        yield verdict("unknown", "Which network cards are passed to VMs is not known", reason=configs.reason)
        return
    line = snapshot.kernel.command_line
    off = "noats" in listed_items(line.value or CommandLine(), "pci")
    cards: dict[str, PciFunction] = {}
    for config, _ in gpu_vms(snapshot):
        for one in passed(snapshot, config):
            for function in one.functions:
                if function.class_code in RDMA_CLASSES and function.vendor == "15b3":
                    cards[function.bdf] = function
    if not cards:
        reason = (
            "no VM has a GPU and an RDMA network card; GeForce and RTX PRO cards have no such capability themselves"
        )
        yield verdict("not_applicable", "No RDMA card shares a VM with a GPU", reason=reason)
        return
    for bdf, card in sorted(cards.items()):
        if off:
            yield verdict(
                "fail",
                f"pci=noats switches ATS off, which {bdf} needs for GPUDirect RDMA in a VM",
                line,
                subject=bdf,
                fix=Fix("Remove pci=noats", set_kernel_parameters(snapshot, "remove noats from pci=")),
            )
        elif card.ats is None:
            denied = card.access_denied or (card.config_hex and len(card.config_hex) <= 512)
            reason = "lspci was not run as root" if denied else "its ATS capability was not read, or it has none"
            yield verdict("unknown", f"Whether {bdf} uses ATS is not known", subject=bdf, reason=reason)
        elif card.ats:
            yield verdict("pass", f"{bdf} uses ATS", excerpt_of(card, "ATSCtl: Enable+"), subject=bdf)
        else:
            yield verdict(
                "warn",
                f"ATS is off on {bdf}, an RDMA card in the VM of a GPU",
                excerpt_of(card, "ATSCtl: Enable-"),
                subject=bdf,
                severity="medium",
                fix=Fix(
                    "Switch ATS on in the card's firmware",
                    (
                        f"mlxconfig -d {bdf} query | grep ATS_ENABLED",
                        f"mlxconfig -d {bdf} set ATS_ENABLED=true",
                        "reboot",
                    ),
                ),
            )


# --- C25, H7: where the GPUs sit --------------------------------------------------------------------------------------


@rule(
    "C25",
    "host-numa-gpus",
    title="The host knows each GPU's NUMA node",
    roles=HOST_ROLES,
    severity="medium",
    looks_at=("sysfs.pci", "lspci.vvv", "memory"),
    why="Copies between nodes are slower, and only a known node lets memory and CPUs be taken from the right one.",
    restart="reboot",
    automation="never",
    risk=FIRMWARE_RISK,
    verify="cat /sys/bus/pci/devices/BDF/numa_node   # wanted: 0 or more on a machine with several nodes",
    sources=("rtx6kpro captures (53 against 39 GB/s across nodes)", "kernel ACPI _PXM"),
)
def _numa(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = [one for one in host_gpus(snapshot) if not one.physfn]
    if not gpus:
        yield no_gpu(snapshot)
        return
    known = snapshot.memory.node_cpus
    named = {one.numa_node for one in (snapshot.pci.functions.value or {}).values() if (one.numa_node or 0) >= 0}
    count = len(known.value) if known.value else len(named - {None})
    lost = [gpu for gpu in gpus if gpu.numa_node == -1]
    unread = [gpu for gpu in gpus if gpu.numa_node is None]
    shown = [excerpt_of(gpu, f"numa_node: {gpu.numa_node}") for gpu in gpus]
    if unread or count == 0:
        names = listed([gpu.bdf for gpu in unread]) or "the machine"
        yield verdict("unknown", f"The NUMA node of {names} is not known", reason="numa_node was not read")
    elif lost and count > 1:
        yield verdict(
            "warn",
            f"The firmware does not tell the NUMA node of {listed([gpu.bdf for gpu in lost])}, one of {count}",
            *shown,
            severity="medium",
            fix=Fix(
                "Update the firmware, and look there for SRAT, _PXM or 'NUMA nodes per socket' settings",
                ("grep . /sys/bus/pci/devices/*/numa_node | grep -v ':0$'", "numactl -H"),
            ),
        )
    elif len({gpu.numa_node for gpu in gpus}) > 1:
        nodes: dict[int | None, list[str]] = {}
        for gpu in gpus:
            nodes.setdefault(gpu.numa_node, []).append(gpu.bdf)
        text = "; ".join(
            f"node {node}: {listed(bdfs)}" for node, bdfs in sorted(nodes.items(), key=lambda one: one[0] or 0)
        )
        yield verdict("info", f"The GPUs sit on {len(nodes)} NUMA nodes ({text})", *shown)
    else:
        yield verdict("pass", f"All GPUs sit on NUMA node {max(gpus[0].numa_node or 0, 0)}", *shown)


@rule(
    "H7",
    "nvme-gpu-share",
    title="What shares a switch with the GPUs",
    roles=HOST_ROLES,
    severity="info",
    looks_at=("sysfs.pci", "lspci.vvv", "lspci.t"),
    why="Disks behind the same uplink take their share of it while a model loads or a bandwidth is measured.",
    verify="lspci -tv",
    sources=("PCI Express topology",),
)
def _shared_uplink(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = [one for one in host_gpus(snapshot) if not one.physfn]
    if not gpus:
        yield no_gpu(snapshot)
        return
    ways = {gpu.bdf: bridges_above(snapshot, gpu.bdf) for gpu in gpus}
    if not all(ways.values()):
        unknown = [bdf for bdf, way in ways.items() if not way]
        reason = "the ports above it were not read"
        yield verdict("unknown", f"What shares a switch with {listed(unknown)} is not known", reason=reason)
        return
    disks = [one for one in (snapshot.pci.functions.value or {}).values() if one.class_code == "0108"]
    shared: dict[str, list[str]] = {}
    for disk in disks:
        above = {bridge.bdf for bridge in bridges_above(snapshot, disk.bdf) or ()}
        for bdf, way in ways.items():
            common = next((bridge.bdf for bridge in way or () if bridge.bdf in above), None)
            if common:
                shared.setdefault(common, []).extend([bdf, disk.bdf])
    if not shared and not snapshot.pci.complete:
        reason = "the list of PCI devices is only a part"
        yield verdict("unknown", "Whether a disk shares a switch with a GPU is not known", reason=reason)
    elif not shared:
        yield verdict(
            "pass",
            "No NVMe disk shares a switch with a GPU",
            Excerpt(gpus[0].source, f"{len(disks)} NVMe disks, none below the GPUs' ports"),
        )
    for bridge, bdfs in sorted(shared.items()):
        names = listed(list(dict.fromkeys(bdfs)))
        yield verdict(
            "info",
            f"{names} share the uplink {bridge}: keep the disks idle while bandwidth is measured",
            Excerpt(gpus[0].source, f"below {bridge}: {' '.join(dict.fromkeys(bdfs))}"),
            subject=bridge,
        )
