"""Snapshots for rule tests, built directly in their typed shape. All values are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Finding
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.measurement import (
    CollectiveRow,
    Copy,
    Device,
    Measurement,
    Timing,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import (
    Approval,
    AptChange,
    CommandLine,
    Cpu,
    DkmsState,
    Driver,
    Fact,
    Gpu,
    HostPci,
    Iommu,
    Kernel,
    KernelLog,
    Machine,
    Nccl,
    NvidiaSmi,
    P2pMatrix,
    Pci,
    PciFunction,
    Region,
    Setting,
    Snapshot,
    Topology,
    Vm,
    VmConfig,
    unknown,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import kernel_log
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

GIB = 1 << 30
MIB = 1 << 20

SERVER_BLACKWELL, RTX_3090, RTX_5090, RTX_6000_ADA, GTX_1080_TI = "2bb5", "2204", "2b85", "26b1", "1b06"


def fact(value: Any, excerpt: str = "", source: str = "made") -> Fact[Any]:
    return Fact(value, source=source, excerpt=excerpt or str(value)[:80])


def line(text: str) -> CommandLine:
    tokens = [part.partition("=") for part in text.split()]
    return CommandLine(tuple((key, value if equals else None) for key, equals, value in tokens))


def log(*texts: str, gap_s: float = 0) -> Fact[KernelLog]:
    """A kernel log of these messages, in this distance."""
    rows = (f"[{1 + at * gap_s:12.6f}] {text}" for at, text in enumerate(texts))
    return fact(kernel_log.parse("\n".join(rows)), "log", "kernel_log")


def snapshot(role: str | None = "bare_metal", host: str = "host", **parts: Any) -> Snapshot:
    told = fact(role, role or "", "detect_virt.vm") if role else unknown("nothing tells the role")
    return Snapshot(host=host, role=told, **parts)


# --- PCI ------------------------------------------------------------------------------------------------------------


def gpu_function(bdf: str = "0000:01:00.0", device: str = SERVER_BLACKWELL, **more: Any) -> PciFunction:
    return PciFunction(
        **{"bdf": bdf, "vendor": "10de", "device": device, "class_code": "0302", "source": "sysfs.pci", **more}
    )


def audio(bdf: str = "0000:01:00.1", **more: Any) -> PciFunction:
    return PciFunction(bdf=bdf, vendor="10de", device="22e8", class_code="0403", source="sysfs.pci", **more)


def port(bdf: str, **more: Any) -> PciFunction:
    return PciFunction(
        **{"bdf": bdf, "vendor": "8086", "device": "a110", "class_code": "0604", "source": "sysfs.pci", **more}
    )


def bars(*sizes: int, at: int | None = 0x380000000000) -> dict[int, Region]:
    return {index: Region(index, size, at, prefetchable=True) for index, size in enumerate(sizes)}


def pci(*functions: PciFunction, complete: bool = True, approvals: Mapping[str, Approval] | None = None) -> Pci:
    known = {one.bdf: one for one in functions}
    return Pci(
        functions=fact(known, "pci", "sysfs.pci"),
        approvals=fact(dict(approvals), "approvals", "sysfs.pci")
        if approvals is not None
        else unknown("config not read"),
        complete=complete,
    )


def gpus_on_bus(count: int, device: str = SERVER_BLACKWELL, **more: Any) -> list[PciFunction]:
    return [gpu_function(f"0000:{index + 1:02x}:00.0", device, **more) for index in range(count)]


def cliques(*ids: int | str | None) -> dict[str, Approval]:
    """Approvals of GPUs 01, 02 ...: a clique id, None for absent, or another state."""
    made = {}
    for index, one in enumerate(ids):
        state = one if isinstance(one, str) else "absent" if one is None else "present"
        made[f"0000:{index + 1:02x}:00.0"] = Approval(state, one if isinstance(one, int) else None, 0)
    return made


# --- driver ---------------------------------------------------------------------------------------------------------


def smi(state: str = "ok", **more: Any) -> Fact[NvidiaSmi]:
    return fact(NvidiaSmi(state, **more), more.get("message", state), "nvidia_smi")


def smi_gpus(count: int, **more: Any) -> Fact[tuple[Gpu, ...]]:
    return fact(
        tuple(Gpu(**{"index": one, "bus_id": f"0000:{one + 1:02x}:00.0", **more}) for one in range(count)),
        "gpus",
        "nvidia_smi.q",
    )


def matrix(mode: str, count: int, code: str = "OK", truncated: bool = False, **cells: str) -> Fact[P2pMatrix]:
    """A matrix with one code everywhere; cells by ``g0_1="NS"`` override single ordered pairs."""
    names = tuple(f"GPU{one}" for one in range(count))
    table = {(row, column): "X" if row == column else code for row in names for column in names}
    for key, value in cells.items():
        row, column = key[1:].split("_")
        table[(f"GPU{row}", f"GPU{column}")] = value
    return fact(P2pMatrix(mode, names, table, truncated=truncated), f"matrix {mode}", f"nvidia_smi.topo_p2p_{mode}")


def granted(count: int = 2, code: str = "OK", **cells: str) -> dict[str, Fact[P2pMatrix]]:
    return {mode: matrix(mode, count, code, **cells) for mode in ("r", "w")}


def topology(
    count: int, link: str = "PHB", numa: Mapping[str, str | None] | None = None, **links: str
) -> Fact[Topology]:
    names = tuple(f"GPU{one}" for one in range(count))
    table = {(row, column): "X" if row == column else link for row in names for column in names}
    for key, value in links.items():
        row, column = key[1:].split("_")
        table[(f"GPU{row}", f"GPU{column}")] = table[(f"GPU{column}", f"GPU{row}")] = value
    affinity = dict.fromkeys(names, "0-15")
    return fact(
        Topology(names, links=table, cpu_affinity=affinity, numa_affinity=dict(numa or {})), "topo", "nvidia_smi.topo_m"
    )


def settings(**values: str) -> Nccl:
    return Nccl(settings=fact(tuple(Setting(name, value, "/etc/nccl.conf") for name, value in values.items())))


# --- measurements ---------------------------------------------------------------------------------------------------


def delivered(count: int = 2, rung: int = 3) -> dict[str, tuple[Measurement, ...]]:
    """A value-checked all-reduce over peer paths of this many GPUs, without a wrong value."""
    devices = tuple(Device(one, host="h") for one in range(count))
    rows = (CollectiveRow(1024, 256, "float", "sum", Timing(20.0, 0.1, 0.1, 0), Timing(20.0, 0.1, 0.1, 0)),)
    return {
        "allreduce": (
            Measurement("allreduce", "nccl-tests", "ok", rung, devices, results=rows, transports=("P2P/CUMEM",),
                        source="nccl_tests", excerpt="# Out of bounds values : 0 OK"),
        )
    }  # fmt: skip


def not_delivered() -> dict[str, tuple[Measurement, ...]]:
    """A simpleP2P run whose data was wrong."""
    error = {"element": "0", "value": "nan", "expected": "0.000000"}
    line = "Verification error @ element 0: val = nan, ref = 0.000000"
    return {
        "p2p": (
            Measurement("p2p", "simpleP2P", "wrong_results", 1, (Device(0), Device(1)),
                        results=(Copy(("GPU0", "GPU1"), 20.0, False, error),), failure=line, source="simple_p2p",
                        excerpt=line),
        )
    }  # fmt: skip


# --- virtual machines -----------------------------------------------------------------------------------------------

WHOLE = {
    "bios": "ovmf",
    "cpu": "host",
    "machine": "q35",
    "memory": "65536",
    "ostype": "l26",
    "scsi0": "pool:vm-disk,size=64G",
    "smbios1": "uuid=aaaaaaaa-0000-0000-0000-000000000001",
}


def hostpci(index: int, value: str) -> HostPci:
    head, *rest = value.split(",")
    options = dict(part.split("=", 1) for part in rest)
    mapping = head.removeprefix("mapping=") if head.startswith("mapping=") else ""
    paths = () if mapping else tuple(head.removeprefix("host=").split(";"))
    return HostPci(index, paths, mapping, options, f"hostpci{index}: {value}")


def vm_config(
    *devices: str, vmid: str = "101", excerpt: bool = False, drop: Sequence[str] = (), **settings_: Any
) -> VmConfig:
    """A VM with these hostpci lines on top of a whole file (or of nothing, for an excerpt)."""
    fields = {name: settings_.pop(name) for name in list(settings_) if name in VmConfig.__dataclass_fields__}
    values = {} if excerpt else dict(WHOLE)
    values.update({key: str(value) for key, value in settings_.items()})
    for key in drop:
        values.pop(key, None)
    values.update({f"hostpci{index}": value for index, value in enumerate(devices)})
    made = VmConfig(
        vmid=vmid,
        settings=values,
        lines={key: f"{key}: {value}" for key, value in values.items()},
        hostpci=tuple(hostpci(index, value) for index, value in enumerate(devices)),
        source=f"pve.conf.{vmid}",
    )
    return replace(made, **fields)


TWO = ("0000:01:00.0,pcie=1", "0000:02:00.0,pcie=1")


def hypervisor(*configs: VmConfig, functions: Sequence[PciFunction] | None = None, **parts: Any) -> Snapshot:
    """A hypervisor with these VMs and two Blackwell server GPUs, unless other functions are given (None: two)."""
    known = (
        gpus_on_bus(2, driver="vfio-pci", regions=bars(128 * GIB, 64 * MIB)) if functions is None else list(functions)
    )
    vms = parts.pop("vm", None) or Vm(
        configs=fact({one.vmid: one for one in configs}, "conf", "pve.conf"), mappings=fact({}), cpu_models=fact({})
    )
    parts = {"pci": pci(*known), "cpu": Cpu(physical_bits=fact(46), vendor=fact("AuthenticAMD")), **parts}
    return snapshot("hypervisor", parts.pop("host", "node"), vm=vms, **parts)


def guest(count: int = 2, host: str = "guest", **parts: Any) -> Snapshot:
    """A KVM guest with this many Blackwell server GPUs that the driver sees as passed through."""
    made = {
        "machine": Machine(
            virt=fact("kvm"), sys_vendor=fact("QEMU"), product_name=fact("Standard PC (Q35 + ICH9, 2009)")
        ),
        "cpu": Cpu(model_name=fact("AMD EPYC 9575F 64-Core Processor"), vendor=fact("AuthenticAMD")),
        "pci": pci(*gpus_on_bus(count), approvals=cliques(*([None] * count))),
        "gpus": smi_gpus(count, virtualization_mode="Pass-Through"),
        "driver": Driver(smi=smi(driver_version="580.95.05")),
        **parts,
    }
    return snapshot("guest", host, **made)


# --- judging --------------------------------------------------------------------------------------------------------


def findings(rule: str, judged: Snapshot, *others: Snapshot) -> tuple[Finding, ...]:
    """Return what one rule says about one host of a fleet."""
    fleet = {one.host: one for one in (judged, *others)}
    return tuple(one for one in engine.judge(fleet)[judged.host] if one.rule == rule)


def verdicts(rule: str, judged: Snapshot, *others: Snapshot) -> list[str]:
    """Return the states that one rule gives."""
    return [one.state for one in findings(rule, judged, *others)]


__all__ = [
    "AptChange",
    "CommandLine",
    "Cpu",
    "DkmsState",
    "Driver",
    "Iommu",
    "Kernel",
    "Machine",
    "Vm",
    "unknown",
]
