"""Which kind of machine this is. Advice for one role is harm for another, so no role is ever assumed."""

from __future__ import annotations

import re
from typing import Any

from ..core.snapshot import Cpu, Fact, Gpu, Kernel, Machine, Pci, Role, unknown
from .facts import Sources
from .machine import VIRTUAL_MACHINES
from .text import first_line

# What only a Proxmox node has.
_PVE_SOURCES = (
    "pve.version",
    "pve.running",
    "pve.showcmd",
    "pve.reservations",
    "pve.qm_pending",
    "pve.mapping.pci",
    "pve.cpu_models",
    "kvm.version",
)
_VIRTUAL_VENDORS = re.compile(r"QEMU|VMware|Xen|innotek|Parallels|OpenStack|Bochs", re.IGNORECASE)
_VIRTUAL_PRODUCTS = re.compile(r"Standard PC|^KVM|Virtual Machine|VMware|VirtualBox|OpenStack|HVM domU|Google Compute")
_VIRTUAL_LOG = r"^Hypervisor detected: |^DMI: (?:QEMU|VMware|Red Hat KVM)"
_VFIO_LOG = r"\bvfio-pci [0-9a-f]{4}:|\bvfio_pci: add \["
_PVE_BOOT = re.compile(r"root=ZFS=\S*/ROOT/pve|/dev/mapper/pve-root|boot=zfs\b|-pve\b")
# PCI ids that exist in virtual machines only: QEMU's standard VGA, virtio (Red Hat), Hyper-V's own devices.
_VIRTUAL_IDS = {("1234", "1111"): "QEMU's standard VGA", ("8086", "29c0"): "QEMU's q35 host bridge"}
_VIRTUAL_PCI_VENDORS = {"1af4": "a virtio device", "1414": "a Hyper-V device"}
_RED_HAT = "Red Hat, Inc. Virtio"


def decide(
    sources: Sources,
    machine: Machine,
    cpu: Cpu,
    kernel: Kernel,
    pci: Pci,
    gpus: Fact[tuple[Gpu, ...]],
) -> Fact[Role]:
    """Return the role with the line that tells it, or unknown with what to collect.

    A hypervisor's own files and processes come first (it may itself be a guest), then the inventory, then a virtual
    machine's marks, then weaker marks of a hypervisor, then ``systemd-detect-virt``'s or the processor's word that
    nothing is virtual.
    """
    told = (
        _hypervisor_files(sources)
        or _guest_by_inventory(sources)
        or _guest_by_name(machine, cpu, kernel)
        or _guest_by_devices(pci, gpus.value or ())
        or _hypervisor_marks(sources, kernel, pci)
        or _bare_metal(machine, cpu)
    )
    return told or unknown(
        "nothing tells whether this is bare metal, a hypervisor or a guest: add the output of `systemd-detect-virt`",
        "detect_virt.vm",
    )


def _is(role: Role, fact: Fact[Any]) -> Fact[Role]:
    return Fact(role, fact.source, fact.excerpt)


def _hypervisor_files(sources: Sources) -> Fact[Role] | None:
    confs = [entry for entry in sources.evidence if entry.source.startswith("pve.conf.") and entry.stdout.strip()]
    if confs:
        text = confs[0].stdout
        line = first_line(text, r"^(?:hostpci\d+|machine|cpu|memory):") or first_line(text, r"\S")
        return Fact("hypervisor", confs[0].source, line)
    for entry in sources.entries("libvirt.domains", "libvirt.running"):
        # libvirt alone makes no hypervisor of GPUs: a workstation may have it too.
        line = first_line(entry.stdout, r"<hostdev\b[^>]*type=['\"]pci['\"]|\bvfio-pci\b")
        if line:
            return Fact("hypervisor", entry.source, line)
    for entry in sources.entries(*_PVE_SOURCES, "qemu.log"):
        if entry.stdout.strip():
            return Fact("hypervisor", entry.source, first_line(entry.stdout, r"\S"))
    return None


def _guest_by_inventory(sources: Sources) -> Fact[Role] | None:
    """Read what the inventory says, or that its hypervisor's outputs lay in the same paste (``apart``)."""
    hypervisor = sources.evidence.inventory.get("hypervisor")
    if not hypervisor:
        return None
    if any(entry.pasted for entry in sources.evidence):
        return Fact("guest", "paste", f"beside the outputs of its hypervisor {hypervisor}")
    return Fact("guest", "inventory", f"hypervisor: {hypervisor}")


def _guest_by_name(machine: Machine, cpu: Cpu, kernel: Kernel) -> Fact[Role] | None:
    if machine.virt.value in VIRTUAL_MACHINES:
        return _is("guest", machine.virt)
    if machine.sys_vendor.value and _VIRTUAL_VENDORS.search(machine.sys_vendor.value):
        return _is("guest", machine.sys_vendor)
    if machine.product_name.value and _VIRTUAL_PRODUCTS.search(machine.product_name.value):
        return _is("guest", machine.product_name)
    if cpu.flags.value and "hypervisor" in cpu.flags.value:
        return Fact("guest", cpu.flags.source, "flags: ... hypervisor ...")
    if kernel.log.value:
        lines = kernel.log.value.matching(_VIRTUAL_LOG, "hypervisor detected: ", "dmi: ")
        if lines:
            return Fact("guest", kernel.log.source, lines[0].text)
    return None


def _guest_by_devices(pci: Pci, gpus: tuple[Gpu, ...]) -> Fact[Role] | None:
    source = pci.functions.source
    for gpu in gpus:
        if gpu.virtualization_mode in ("Pass-Through", "VGPU"):
            return Fact("guest", gpu.sources[0], f"Virtualization Mode : {gpu.virtualization_mode}")
    for function in (pci.functions.value or {}).values():
        what = _VIRTUAL_IDS.get((function.vendor or "", function.device or ""))
        what = what or _VIRTUAL_PCI_VENDORS.get(function.vendor or "")
        if what or function.name.startswith(_RED_HAT):
            return Fact("guest", source, f"{function.bdf} {function.name or what}")
    # A card sits behind a port of the board. Only an emulator puts one on the root bus.
    places = [(one.bdf, source) for one in pci.gpus()] + [(gpu.bus_id, gpu.sources[0]) for gpu in gpus]
    for bdf, source in places:
        if bdf.startswith("0000:00:"):
            return Fact("guest", source, f"{bdf}: a GPU on the root bus")
    return None


def _hypervisor_marks(sources: Sources, kernel: Kernel, pci: Pci) -> Fact[Role] | None:
    for function in (pci.functions.value or {}).values():
        if function.driver == "vfio-pci" and (function.is_nvidia or (function.class_code or "").startswith("03")):
            return Fact("hypervisor", pci.functions.source, f"{function.bdf} driver: vfio-pci")
    for line in kernel.modprobe.value or ():
        if re.match(r"options vfio[-_]pci .*\bids=", line):
            return Fact("hypervisor", kernel.modprobe.source, line)
    if kernel.log.value:
        vfio = kernel.log.value.matching(_VFIO_LOG, "vfio-pci ", "vfio_pci: add [")
        if vfio:
            return Fact("hypervisor", kernel.log.source, vfio[0].text)
    if kernel.command_line.value and _PVE_BOOT.search(kernel.command_line.excerpt):
        return _is("hypervisor", kernel.command_line)
    if (kernel.release.value or "").endswith("-pve"):
        return _is("hypervisor", kernel.release)
    for entry in sources.entries("dkms.status", "dkms.log", "apt.output", "initramfs.log"):
        line = first_line(entry.stdout, r"\d+\.\d+\.\d+-\d+-pve\b")
        if line:
            return Fact("hypervisor", entry.source, line)
    return None


def _bare_metal(machine: Machine, cpu: Cpu) -> Fact[Role] | None:
    if machine.virt.value == "none":
        return _is("bare_metal", machine.virt)
    if cpu.flags.value and not machine.virt.known:
        return Fact("bare_metal", cpu.flags.source, "flags: ... (without hypervisor)")
    return None
