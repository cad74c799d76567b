"""Rules B5 and B11: room in the guest's address space for the memory windows of its GPUs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from ..core.finding import Excerpt, Fix
from ..core.snapshot import PciFunction, Snapshot, VmConfig
from .common import RISK_STOP, counted, listed, log_excerpt, log_lines, stop_risk
from .knowledge import number
from .machines import (
    Passed,
    change_vm,
    conf_line,
    config_is_whole,
    cpu_type,
    display_functions,
    each_vm,
    reports_host_cpu,
    vm,
    vmid,
    without_option,
)
from .registry import Fleet, Verdict, rule, verdict

_GIB = 1 << 30
_MIB = 1 << 20


def _guest_bits(snapshot: Snapshot, config: VmConfig) -> int | str:
    """Return the guest's physical address bits, or why they are not known."""
    given = config.option("cpu", "phys-bits")
    host = snapshot.cpu.physical_bits
    if given is not None and given.isdigit():
        return int(given)
    if cpu_type(config) == "host-model":
        return "the address bits of a host-model CPU depend on the version of libvirt: look into the guest"
    as_host = reports_host_cpu(snapshot, config)
    if isinstance(as_host, str):
        return as_host
    if given == "host" or as_host:
        return host.value if host.value is not None else f"the host's address bits are not known ({host.reason})"
    if cpu_type(config) is None and not config_is_whole(config):
        return "the configuration is only an excerpt and holds no line cpu:"
    return number("mmio.default_guest_bits")


@rule(
    "B5",
    "pve-phys-bits",
    title="The guest has enough physical address bits for its GPUs",
    roles=("hypervisor",),
    severity="high",
    looks_at=("pve.conf", "proc.cpuinfo", "sysfs.pci"),
    why="OVMF places large BARs in the top eighth of the guest's address space: 40 bits leave 128 GiB for them.",
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="grep -m1 'address sizes' /proc/cpuinfo   # in the guest",
    sources=("qemu-server commit 980ee163", "measured on QEMU and OVMF"),
    without_role=True,
)
@each_vm
def _phys_bits(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    bits = _guest_bits(snapshot, config)
    host = snapshot.cpu.physical_bits.value
    evidence = (conf_line(config, "cpu"), snapshot.cpu.physical_bits)
    if isinstance(bits, str):
        yield verdict(
            "unknown", f"The address bits of VM {config.vmid} are not known", *evidence, subject=vm(config), reason=bits
        )
        return
    need = _need_bytes(lines)
    narrow = number("mmio.narrow_host_bits")
    flags = config.option("cpu", "flags") or ""
    if host is not None and host <= narrow < bits:
        yield verdict(
            "warn",
            f"VM {config.vmid} has {bits} address bits on a host with {host}: its IOMMU may not reach the GPUs' BARs",
            *evidence,
            subject=vm(config),
            severity="medium",
            fix=Fix(
                "Place the BARs where the IOMMU reaches them",
                change_vm(
                    "B5",
                    config,
                    f"qm set {vmid(config)} --cpu "
                    f"'{without_option(config.settings.get('cpu', 'host'), 'phys-bits')},phys-bits={host}'",
                    libvirt=f"<cpu mode='host-passthrough'>: <maxphysaddr mode='passthrough' limit='{host}'/>",
                ),
                risk=stop_risk(display_functions(lines)),
            ),
        )
    elif need is not None and need > _window_bytes(bits, None) and (host is None or bits < host):
        yield verdict(
            "fail",
            f"VM {config.vmid} has {bits} address bits: too few for {_gib(need)} of GPU memory windows",
            *evidence,
            subject=vm(config),
            fix=Fix(
                "Give the guest the host's CPU, and with it the host's address bits",
                change_vm("B5", config, f"qm set {vmid(config)} --cpu host", libvirt=_HOST_CPU),
                risk=stop_risk(display_functions(lines)),
            ),
            explains=("B11",),
        )
    elif reports_host_cpu(snapshot, config) is not True and bits > 40 and "+pdpe1gb" not in flags:
        yield verdict(
            "warn",
            f"OVMF may cut the {bits} address bits of VM {config.vmid} to 40: its CPU type lacks pdpe1gb",
            *evidence,
            subject=vm(config),
            fix=Fix(
                "Use the host's CPU, or add the flag",
                change_vm("B5", config, f"qm set {vmid(config)} --cpu host", libvirt=_HOST_CPU),
                risk=stop_risk(display_functions(lines)),
            ),
        )
    elif host is not None and bits >= host:
        yield verdict("pass", f"VM {config.vmid} has the host's {bits} address bits", *evidence, subject=vm(config))
    else:
        yield verdict(
            "info",
            f"VM {config.vmid} has {bits} address bits: OVMF has {_gib(_window_bytes(bits, None))} for large BARs",
            *evidence,
            subject=vm(config),
        )


# --- B11: MMIO space ------------------------------------------------------------------------------------------------


def _need_bytes(lines: Sequence[Passed]) -> int | None:
    """Return the sum of the BARs of a VM's GPUs, or None where one of them is not known."""
    total = 0
    for one in lines:
        if one.display is None or not one.display.regions:
            return None
        for function in one.functions:
            for region in function.regions.values():
                if region.size_bytes is None:
                    return None
                total += region.size_bytes
    return total


def _window_bytes(bits: int, knob_mib: int | None) -> int:
    """Return OVMF's 64-bit window: an eighth of the address space, or the knob where it is larger."""
    if bits < number("mmio.ovmf_dynamic_from_bits"):
        window = number("mmio.ovmf_legacy_window_gib") * _GIB
    else:
        window = 1 << (bits - number("mmio.ovmf_window_shift_bits"))
    return max(window, (knob_mib or 0) * _MIB)


def _gib(size: int) -> str:
    return f"{size / _GIB:.0f} GiB" if size % _GIB == 0 else f"{size / _GIB:.1f} GiB"


_KNOB = re.compile(r"X-PciMmio64Mb,string=(\d+)")


def _knob_steps(config: VmConfig, knob_mib: int) -> tuple[str, ...]:
    old = _KNOB.sub("", config.settings.get("args", ""))
    old = re.sub(r"-fw_cfg\s+name=opt/ovmf/\s*", "", old).strip()
    new = f"-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string={knob_mib}"
    return (f"qm set {vmid(config)} --args {shlex.quote(f'{old} {new}'.strip())}",)


_HOST_CPU = "<cpu mode='host-passthrough' check='none'/>"


def _knob_advice(knob_mib: int) -> str:
    word = f"name=opt/ovmf/X-PciMmio64Mb,string={knob_mib}"
    return f"<qemu:commandline>: <qemu:arg value='-fw_cfg'/> <qemu:arg value='{word}'/>"


def _power_above(size: int) -> int:
    power = 1
    while power < size:
        power *= 2
    return power


@rule(
    "B11",
    "mmio64-window",
    title="The guest has room for the memory windows of all its GPUs",
    roles=("hypervisor", "guest"),
    severity="critical",
    looks_at=("pve.conf", "sysfs.pci", "proc.cpuinfo", "kernel_log"),
    why=(
        "OVMF gives large BARs an eighth of the guest's address space. What does not fit gets no address, and a GPU "
        "without BARs does not start. A knob as large as the address space makes the firmware hang."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} Too large a value hangs the firmware with a black console: keep the old args.",
    verify="lspci -d 10de: -vv | grep -E 'Region|unassigned|ignored'   # in the guest: no BAR without an address",
    sources=("measured on QEMU 7.2 and OVMF 2022.11", "Proxmox forum 179366", "canonical/lxd #14381"),
    without_role=True,
)
def _mmio_window(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if snapshot.vm.configs.known:
        yield from each_vm(_window_of_vm)(snapshot, fleet)
        return
    if snapshot.role.value == "hypervisor":
        reason = snapshot.vm.configs.reason or "not collected"
        yield verdict("unknown", "The VM configurations are not known", reason=reason)
        return
    yield from _bars_of_guest(snapshot)


def _window_of_vm(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    found = _KNOB.search(config.settings.get("args", ""))
    knob = int(found.group(1)) if found else None
    bits = _guest_bits(snapshot, config)
    need = _need_bytes(lines)
    evidence = [conf_line(config, "cpu", "bios", *(["args"] if knob is not None else []))]
    if not isinstance(bits, str) and knob is not None and knob * _MIB >= 1 << bits:
        yield verdict(
            "fail",
            f"VM {config.vmid} asks OVMF for {_gib(knob * _MIB)} of MMIO space in {bits} address bits: its firmware "
            "hangs",
            *evidence,
            subject=vm(config),
            fix=Fix(
                "Make the knob smaller than half of the address space",
                change_vm(
                    "B11",
                    config,
                    *_knob_steps(config, (1 << (bits - 2)) // _MIB),
                    libvirt=_knob_advice((1 << (bits - 2)) // _MIB),
                ),
                risk=stop_risk(display_functions(lines)),
            ),
        )
        return
    bios = config.settings.get("bios")
    reason = ""
    if bios is None and not config_is_whole(config):
        reason = "the configuration is only an excerpt and holds no line bios:"
    elif bios != "ovmf":
        reason = "the VM boots SeaBIOS, whose placement cannot be predicted: look at the BARs inside the guest"
    elif isinstance(bits, str):
        reason = bits
    elif need is None:
        reason = "the BAR sizes of the passed GPUs are not known on this host"
    if reason or isinstance(bits, str) or need is None:
        yield verdict(
            "unknown",
            f"Whether VM {config.vmid} has room for the BARs of its GPUs is not known",
            *evidence,
            subject=vm(config),
            reason=reason,
        )
        return
    window = _window_bytes(bits, knob)
    if need <= window:
        yield verdict(
            "pass",
            f"VM {config.vmid} has {_gib(window)} of MMIO space for {_gib(need)} of GPU BARs",
            *evidence,
            subject=vm(config),
        )
        return
    yield verdict(
        "fail",
        f"VM {config.vmid} has {_gib(window)} of MMIO space for {_gib(need)} of GPU BARs: some GPUs will not start",
        *evidence,
        Excerpt("sysfs.pci", "\n".join(_bar_line(one.display) for one in lines if one.display)),
        subject=vm(config),
        fix=_window_fix(snapshot, config, need, bits, lines),
    )


def _bar_line(function: PciFunction) -> str:
    sizes = [f"BAR {index} {_size(region.size_bytes)}" for index, region in sorted(function.regions.items())]
    return f"{function.bdf} {', '.join(sizes)}"


def _size(size: int | None) -> str:
    if size is None:
        return "of unknown size"
    return _gib(size) if size >= _GIB else f"{size / _MIB:.0f} MiB"


def _window_fix(snapshot: Snapshot, config: VmConfig, need: int, bits: int, lines: Sequence[Passed]) -> Fix:
    host = snapshot.cpu.physical_bits.value
    steps: list[str] = []
    advice: list[str] = []
    if cpu_type(config) != "host":
        steps.append(f"qm set {vmid(config)} --cpu host")
        advice.append(_HOST_CPU)
        bits = host or bits
    power = _power_above(need)
    if need > _window_bytes(bits, None):
        if power * 2 < 1 << bits:
            steps += _knob_steps(config, power // _MIB)
            advice.append(_knob_advice(power // _MIB))
        else:
            advice.append(f"{_gib(need)} of BARs do not fit into {bits} address bits: pass fewer GPUs to this VM")
            steps.append(f"# {advice[-1]}")
    return Fix(
        "Give the guest the host's address bits first, then a larger OVMF window",
        change_vm("B11", config, *steps, libvirt=advice),
        risk=(
            f"{stop_risk(display_functions(lines))} Too large a value hangs the firmware with a black console: keep "
            "the old args."
        ),
    )


_NO_SPACE = r"BAR \d+.*(can't assign; no space|failed to assign|no space for)|BAR1 is 0M"
_INVALID_REGION = r"PCI I/O region assigned to your NVIDIA device is invalid"


def _bars_of_guest(snapshot: Snapshot) -> Iterator[Verdict]:
    gpus = snapshot.pci.gpus()
    sure_guest = snapshot.role.value == "guest"
    bdfs = {one.bdf for one in gpus}
    lines = tuple(
        line
        for line in log_lines(snapshot, _NO_SPACE, "no space", "failed to assign", "bar1 is 0m")
        if "BAR1 is 0M" in line.text or any(bdf in line.text or bdf[5:] in line.text for bdf in bdfs)
    )
    invalid = log_lines(snapshot, _INVALID_REGION, "your nvidia device is invalid")
    smallest = number("mmio.smallest_bar1_mib") * _MIB
    bad: list[PciFunction] = []
    small: list[PciFunction] = []
    for gpu in gpus:
        if not gpu.regions or gpu.off_bus:
            continue
        if any(region.address is None and region.size_bytes for region in gpu.regions.values()):
            bad.append(gpu)
        elif max((one.size_bytes or 0 for one in gpu.regions.values() if one.prefetchable), default=0) < smallest:
            small.append(gpu)
    evidence = [log_excerpt(snapshot, [*lines, *invalid])] if lines or invalid else []
    if bad or lines or invalid:
        named = bad or small
        what = listed([one.bdf for one in named]) or "An NVIDIA GPU"
        yield verdict(
            "fail",
            f"{what} has no address for its large BAR"
            + (": the guest's MMIO window is too small" if sure_guest else ""),
            *evidence,
            Excerpt(named[0].source or "lspci", "\n".join(map(_bar_line, named))) if named else snapshot.pci.functions,
            fix=Fix(
                "Give the VM the host's CPU type first, then a larger OVMF window, on the hypervisor",
                (
                    "# on the hypervisor; VMID is this guest's id there",
                    "cp -a /etc/pve/qemu-server/VMID.conf /root/VMID.conf.before-B11",
                    "qm set VMID --cpu host",
                    "# still short: value in MiB, the next power of two above the sum of all BARs, below half of the",
                    "# address space; append it to the args that are there",
                    "qm set VMID --args '-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=2097152'",
                    "qm shutdown VMID && qm start VMID",
                    "# way back: cp /root/VMID.conf.before-B11 /etc/pve/qemu-server/VMID.conf, then stop and start",
                ),
            ),
            explains=("A5", "F1"),
        )
        return
    known = [one for one in gpus if one.regions]
    if small:
        yield verdict(
            "fail" if snapshot.pci.complete else "unknown",
            f"{listed([one.bdf for one in small])} shows no BAR of {number('mmio.smallest_bar1_mib')} MiB or more",
            Excerpt(small[0].source or "lspci", "\n".join(map(_bar_line, small))),
            reason="" if snapshot.pci.complete else "the list of PCI devices is only a part, so a BAR may be cut off",
            explains=("A5", "F1") if snapshot.pci.complete else (),
        )
    elif known and len(known) == len(gpus):
        yield verdict("pass", f"All BARs of {counted(len(known), 'GPU')} have an address", snapshot.pci.functions)
    elif snapshot.pci.functions.known and snapshot.pci.complete and not gpus:
        yield verdict("not_applicable", "There is no NVIDIA GPU here", reason="no NVIDIA GPU on the PCI bus")
    else:
        reason = snapshot.pci.functions.reason or "the BARs of the GPUs were not read"
        yield verdict("unknown", "Whether all GPU BARs have an address is not known", reason=reason)
