"""Rules A: what the machine is, and whether its GPUs are all there."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Snapshot
from .common import (
    MENLO_GAIN,
    RISK_STOP,
    counted,
    driver_gpu_count,
    has_no_gpu,
    listed,
    log_excerpt,
    log_lines,
    virtual_gpus,
)
from .join import Home, home_of
from .knowledge import names
from .machines import gpu_lines
from .registry import Fleet, Verdict, rule, verdict

_OTHER_HYPERVISORS = ("vmware", "xen", "amazon", "google", "microsoft", "oracle", "parallels", "bhyve")
_EMULATED_CPU = ("qemu virtual cpu", "qemu tcg", "common kvm processor")


@rule(
    "A1",
    "virt-detect",
    title="What kind of machine this is",
    severity="info",
    looks_at=("detect_virt.vm", "proc.cpuinfo", "dmi"),
    why="Every other rule depends on the role: ACS and IOMMU advice for a hypervisor is the opposite of bare metal's.",
    sources=("systemd virt.c",),
    without_role=True,
)
def _virt_detect(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    machine, role = snapshot.machine, snapshot.role
    virt = (machine.virt.value or "").lower()
    if not role.known:
        yield verdict(
            "unknown",
            "The role of this machine is not known",
            machine.virt,
            reason=role.reason or machine.virt.reason or "systemd-detect-virt was not run",
        )
        return
    what = {"bare_metal": "bare metal", "hypervisor": "a hypervisor", "guest": "a virtual machine"}[str(role.value)]
    if virt in _OTHER_HYPERVISORS and not _is_qemu(snapshot):
        yield verdict(
            "info",
            f"This is a virtual machine under {virt}: rules about a KVM hypervisor do not apply to it",
            machine.virt,
            role,
        )
        return
    if role.value == "guest" and virt in ("qemu", "microsoft"):
        yield verdict(
            "info",
            f"This is a virtual machine, and systemd-detect-virt says {virt}, not kvm: rule A2 judges why",
            machine.virt,
            snapshot.cpu.model_name,
        )
        return
    yield verdict("pass", f"This machine is {what}", role, machine.virt)


def _is_qemu(snapshot: Snapshot) -> bool:
    machine = snapshot.machine
    return machine.sys_vendor.value == "QEMU" or (machine.product_name.value or "").startswith("Standard PC")


@rule(
    "A2",
    "hypervisor-signature-visible",
    title="The NVIDIA driver can see that it runs under KVM",
    roles=("guest",),
    severity="high",
    looks_at=("detect_virt.vm", "nvidia_smi.q", "proc.cpuinfo", "dmi"),
    why=(
        "The driver looks for a hypervisor signature in CPUID. Without it the GPU does not count as passed through, "
        "and the capability with the P2P clique is not even read."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} Linux guests never needed a hidden KVM; some Windows software dislikes a visible one.",
    verify="systemd-detect-virt; nvidia-smi -q | grep 'Virtualization Mode'",
    sources=("NVIDIA open-gpu-kernel-modules hypervisor.c", "club-3090 #890"),
    gain=MENLO_GAIN,
)
def _signature_visible(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    machine, cpu = snapshot.machine, snapshot.cpu
    modes = {gpu.virtualization_mode for gpu in snapshot.gpus.value or () if gpu.virtualization_mode}
    evidence = (machine.virt, snapshot.gpus) if modes else (machine.virt, cpu.model_name)
    virt = (machine.virt.value or "").lower()
    if modes & {"VGPU", "Host VGPU", "Host VSGA", "VF"}:
        yield verdict("not_applicable", "The GPUs are virtual ones", *evidence, reason="rule A4 judges vGPUs")
        return
    if "Pass-Through" in modes and "None" not in modes:
        yield verdict("pass", "The driver sees its GPUs as passed through", *evidence)
        return
    model = (cpu.model_name.value or "").lower()
    real_cpu = bool(model) and not model.startswith(_EMULATED_CPU)
    hidden = virt == "qemu" and real_cpu
    without_kvm_leaf = virt == "microsoft" and _is_qemu(snapshot)
    if "None" in modes or hidden or without_kvm_leaf:
        said = "Virtualization Mode is None" if "None" in modes else f"systemd-detect-virt says {virt}"
        approvals = snapshot.pci.approvals.value or {}
        cliques = any(one.state == "present" for one in approvals.values())
        yield verdict(
            "fail",
            f"KVM is hidden from this guest ({said}), so the driver cannot grant P2P",
            *evidence,
            severity="critical" if cliques else None,
            fix=Fix(
                "Let the guest see KVM: remove hidden=1 and x-vga=1 on the hypervisor (rules B1 and B2)",
                (
                    "# on the hypervisor; VMID is this guest's id there",
                    "cp -a /etc/pve/qemu-server/VMID.conf /root/VMID.conf.before-A2",
                    "qm set VMID --cpu host",
                    "qm config VMID | grep -E 'hidden|x-vga'",
                    "qm shutdown VMID && qm start VMID",
                    "# way back: cp /root/VMID.conf.before-A2 /etc/pve/qemu-server/VMID.conf, then stop and start",
                ),
            ),
            explains=("D1", "D5"),
        )
        return
    if virt == "kvm" and _is_qemu(snapshot):
        yield verdict("pass", "KVM is visible in this guest", machine.virt, machine.sys_vendor)
        return
    if not virt:
        reason = f"neither systemd-detect-virt ({machine.virt.reason}) nor nvidia-smi -q says it"
    elif virt == "kvm":
        reason = (
            "systemd-detect-virt says kvm, which proves it only where DMI says QEMU; run nvidia-smi -q with a driver"
        )
    elif virt == "qemu":
        reason = "the CPU model does not tell real KVM from emulation; run nvidia-smi -q with a loaded driver"
    else:
        reason = f"the hypervisor is {virt}; run nvidia-smi -q with a loaded driver"
    yield verdict("unknown", "Whether the driver sees a hypervisor is not known", *evidence, reason=reason)


@rule(
    "A3",
    "container-detect",
    title="Whether this is a container",
    severity="info",
    looks_at=("detect_virt.container",),
    why="In a container the kernel, the PCI devices and the modules belong to the host below.",
    sources=("systemd-detect-virt(1)",),
    without_role=True,
)
def _container(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    container = snapshot.machine.container
    if not container.known:
        yield verdict("unknown", "Whether this is a container is not known", reason=container.reason)
    elif container.value == "none":
        yield verdict("pass", "This is no container", container)
    else:
        below = " On Proxmox the driver of an lxc container is the hypervisor's." if container.value == "lxc" else ""
        yield verdict(
            "info",
            f"This is a {container.value} container: kernel, PCI and module facts are those of the host below",
            container,
            why=f"What cannot be read in here is unknown, not absent.{below}",
        )


@rule(
    "A4",
    "vgpu-or-vf",
    title="GPUs are whole ones, not vGPUs or virtual functions",
    roles=("guest",),
    severity="high",
    looks_at=("nvidia_smi.q", "sysfs.pci"),
    why="For virtual functions the driver switches P2P reads and writes off; vGPUs have no P2P over PCIe by design.",
    restart="vm_stop_start",
    automation="never",
    risk=RISK_STOP,
    verify="nvidia-smi -q | grep 'Virtualization Mode'",
    sources=("NVIDIA open-gpu-kernel-modules", "NVIDIA vGPU user guide"),
)
def _virtual_functions(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    virtual = virtual_gpus(snapshot)
    if virtual:
        several = len(virtual) > 1
        yield verdict(
            "fail" if several else "info",
            f"{listed(virtual)} {'are virtual GPUs' if several else 'is a virtual GPU'}: no P2P over PCIe, by design",
            snapshot.gpus,
            fix=Fix(
                "Pass the physical functions to the guest, where P2P is wanted; a clique does not help here",
                ("# on the hypervisor; VMID is this guest's id there", "qm config VMID | grep -E 'hostpci|mdev'"),
            ),
            explains=("D1", "D5"),
        )
    elif any(gpu.virtualization_mode for gpu in snapshot.gpus.value or ()):
        yield verdict("pass", "No GPU of this guest is a vGPU or a virtual function", snapshot.gpus)
    elif has_no_gpu(snapshot):
        yield verdict("not_applicable", "This guest has no NVIDIA GPU", reason="no NVIDIA GPU on the PCI bus")
    else:
        reason = snapshot.gpus.reason or "nvidia-smi -q gave no Virtualization Mode"
        yield verdict("unknown", "Whether the GPUs are whole ones is not known", reason=reason)


_PROBE_TROUBLE = (
    r"probe .*failed with error -1|probe of .* failed with error|RmInitAdapter failed|BAR1 is 0M|fallen off the bus"
    r"|None of the NVIDIA devices were initiali[sz]ed|PCI I/O region assigned to your NVIDIA device is invalid"
)
_PROBE_WORDS = (
    "failed with error",
    "rminitadapter failed",
    "bar1 is 0m",
    "fallen off the bus",
    "none of the nvidia devices",
    "your nvidia device is invalid",
)


@rule(
    "A5",
    "all-gpus-present",
    title="Every GPU that was passed through works in the guest",
    roles=("guest",),
    severity="critical",
    looks_at=("sysfs.pci", "nvidia_smi.L", "proc.driver.nvidia.gpus", "kernel_log", "pve.conf"),
    why="Where the guest's 64-bit MMIO space is short, some GPUs get no BAR and vanish while the others work.",
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="lspci -d 10de: | grep -cE 'VGA|3D'; nvidia-smi -L | wc -l",
    sources=("measured on QEMU and OVMF", "Rackspace blog 2025-12-03"),
    without_role=True,
)
def _all_present(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    trouble = log_lines(snapshot, _PROBE_TROUBLE, *_PROBE_WORDS)
    smi = snapshot.driver.smi.value
    answered = smi is not None and smi.state == "ok"
    home = home_of(snapshot, fleet) if snapshot.role.value == "guest" else "the role of this machine is not known"
    evidence = (snapshot.pci.functions, snapshot.gpus, snapshot.driver.proc_gpus)
    on_bus = len(snapshot.pci.gpus()) if snapshot.pci.functions.known and snapshot.pci.complete else None
    if on_bus is not None and isinstance(home, Home) and home.host in fleet:
        sure = [one for one in gpu_lines(fleet[home.host], home.config) if one.gpu]
        if len(sure) > on_bus:
            yield verdict(
                "fail",
                f"{counted(len(sure), 'GPU')} are passed to this guest, but only {on_bus} on its PCI bus",
                snapshot.pci.functions,
                *(Excerpt(home.config.source or "pve.conf", one.line.line) for one in sure),
                fix=_look_at_start(home.config.vmid),
                explains=("F1",),
            )
            return
    in_driver = driver_gpu_count(snapshot)
    if on_bus is not None and in_driver is not None and in_driver < on_bus:
        yield verdict(
            "fail",
            f"The driver uses {in_driver} of the {on_bus} NVIDIA GPUs on the PCI bus",
            *evidence,
            *([log_excerpt(snapshot, trouble)] if trouble else []),
            fix=_look_at_log(),
            explains=("F1",),
        )
    elif trouble and not answered:
        yield verdict(
            "fail",
            "The driver refused an NVIDIA GPU: the kernel log says that its start failed",
            log_excerpt(snapshot, trouble),
            fix=_look_at_log(),
            explains=("F1",),
        )
    elif on_bus is not None and in_driver is not None:
        if on_bus == 0:
            yield verdict("not_applicable", "There is no NVIDIA GPU here", reason="no NVIDIA GPU on the PCI bus")
        else:
            yield verdict("pass", f"The driver uses all of the {counted(on_bus, 'GPU')} on the PCI bus", *evidence)
    else:
        missing = "the list of PCI devices" if on_bus is None else "the driver's list of GPUs"
        detail = snapshot.pci.functions.reason if on_bus is None else snapshot.driver.smi.reason
        yield verdict(
            "unknown",
            "Whether all GPUs are present is not known",
            reason=f"{missing} is missing or only a part{f' ({detail})' if detail else ''}",
        )


def _look_at_log() -> Fix:
    return Fix(
        "Find out why the driver refused them: short MMIO space first (rule B11), then module flavour (F2), then "
        "hardware",
        ("dmesg | grep -E 'NVRM|BAR|probe'", "lspci -d 10de: -vv | grep -E '^[0-9a-f]|Region'"),
    )


def _look_at_start(vmid: str) -> Fix:
    return Fix(
        "Read why the hypervisor did not hand them over, then give the guest enough MMIO space (rule B11)",
        (f"qm showcmd {vmid} --pretty | grep hostpci", "journalctl -b | grep -E 'vfio|qm|kvm' | tail -50"),
    )


@rule(
    "A6",
    "guest-chipset",
    title="The guest's chipset has PCIe root ports",
    roles=("guest",),
    severity="info",
    looks_at=("dmi", "sysfs.pci", "lspci.vvv"),
    why=(
        "Only the q35 chipset has PCIe ports. A GPU on the root bus or behind a PCI bridge has no PCIe link in the "
        "guest: NCCL then reads no speed, and ATS or Resizable BAR cannot be negotiated."
    ),
    restart="vm_stop_start",
    automation="never",
    risk=RISK_STOP,
    verify="lspci -tv",
    sources=("QEMU", "NCCL issue 811"),
    without_role=True,
)
def _chipset(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    functions = snapshot.pci.functions.value or {}
    bridge = functions.get("0000:00:00.0")
    product = snapshot.machine.product_name.value or ""
    name = bridge.name if bridge else ""
    bridge_id = f"{bridge.vendor}:{bridge.device}" if bridge else ""
    q35 = "Q35" in product or bridge_id == "8086:29c0" or "82G33" in name
    i440 = "i440FX" in product or bridge_id == "8086:1237" or "82441FX" in name
    evidence = [snapshot.machine.product_name]
    shown = [Excerpt(bridge.source or "lspci", f"{bridge.bdf} {name or bridge_id}")] if bridge else []
    if snapshot.role.value != "guest" and not (q35 or i440):
        yield verdict("unknown", "The chipset of a guest is not known", reason="neither role nor chipset is known")
        return
    rootless = [
        one for one in snapshot.pci.gpus() if one.bdf.startswith("0000:00:") or _behind_legacy(one.bdf, snapshot)
    ]
    if i440:
        yield verdict(
            "warn",
            "This guest has the i440FX chipset: its GPUs have no PCIe",
            *evidence,
            *shown,
            severity="medium",
            fix=Fix("Give the VM the q35 machine type on the hypervisor (rule B6)", _LOOK_AT_VM),
        )
    if rootless:
        gpus = [one.bdf for one in rootless]
        yield verdict(
            "warn",
            f"{listed(gpus)} {'sit' if len(gpus) > 1 else 'sits'} on the guest's root bus without a PCIe root port",
            *shown,
            Excerpt(rootless[0].source or "lspci", "\n".join(f"{one.bdf} {one.name}".strip() for one in rootless)),
            severity="medium",
            fix=Fix("Give each GPU a PCIe root port: pcie=1 in its hostpci line (rule B7)", _LOOK_AT_VM),
        )
    if i440 or rootless:
        return
    if q35 and snapshot.pci.functions.known and not snapshot.pci.complete:
        title = "The guest has the q35 chipset; not all its PCI devices are known"
        yield verdict("info", title, *evidence, *shown, reason="a GPU without a root port may be missing from the list")
    elif q35:
        yield verdict("pass", "The guest has the q35 chipset", *evidence, *shown)
    else:
        reason = snapshot.machine.product_name.reason or "neither the product name nor device 00:00.0 names a chipset"
        yield verdict("unknown", "The chipset of this guest is not known", reason=reason)


_LOOK_AT_VM = ("# on the hypervisor; VMID is this guest's id there", "qm config VMID | grep -E 'machine|hostpci'")


def _behind_legacy(bdf: str, snapshot: Snapshot) -> bool:
    functions = snapshot.pci.functions.value or {}
    parent = functions.get(functions[bdf].parent or "") if bdf in functions else None
    return parent is not None and f"{parent.vendor}:{parent.device}" in names("pci.emulated_legacy_bridges")
