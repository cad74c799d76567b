"""Rules E: bare metal, where ACS and a translating IOMMU stand in the way of peer copies. Never for a hypervisor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.finding import Excerpt, Fix, Gain
from ..core.snapshot import CommandLine, PciFunction, Snapshot
from .common import SECURITY_NOTES, gpu_count, listed
from .hypervisor import iommu_off_tokens, set_kernel_parameters
from .machines import gpu_vms
from .passthrough import HOST_ROLES, bridges_above, host_gpus, no_gpu
from .registry import Fleet, Verdict, rule, verdict

_REDIRECTS = ("ReqRedir", "CmpltRedir", "UpstreamFwd")
_PORTS_DOWN = ("root port", "downstream port", "")


def _single(snapshot: Snapshot) -> Verdict | None:
    """Say that peer copies do not matter here, because there are no two GPUs; None where they do or may."""
    count = gpu_count(snapshot)
    if count.value is not None and count.value < 2:
        reason = f"peer-to-peer needs two GPUs, the machine has {count.value}"
        return verdict("not_applicable", "Peer copies do not matter here", reason=reason)
    return None


@rule(
    "E1",
    "bm-iommu-translating",
    title="The IOMMU of a bare-metal machine does not translate GPU accesses",
    roles=("bare_metal",),
    severity="high",
    looks_at=("sysfs.iommu", "kernel_log", "proc.cmdline"),
    why=(
        "NVIDIA's driver does not support peer copies over PCIe through a translating IOMMU: copies hold zeros, or the "
        "first all-reduce hangs."
    ),
    restart="reboot",
    automation="ask",
    risk=f"Reboots this machine. {SECURITY_NOTES['iommu']}",
    verify="cat /sys/kernel/iommu_groups/*/type | sort | uniq -c   # wanted for the GPUs: identity, or no group at all",
    sources=("CUDA programming guide, bare metal IOMMU", "tinygrad/open-gpu-kernel-modules #18", "vLLM #51513"),
)
def _translating(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    single = _single(snapshot)
    if single:
        yield single
        return
    iommu, line = snapshot.iommu, snapshot.kernel.command_line
    if iommu.units.known and not iommu.units.value:
        # The kernel prints "Default domain type: Translated" with iommu=off too.
        yield verdict("pass", "The IOMMU is off", iommu.units)
        return
    fix = Fix(
        "Set iommu=pt (keeps VFIO possible), or switch the IOMMU off in the firmware setup",
        set_kernel_parameters(snapshot, "add iommu=pt"),
    )
    explains = ("C22", "D6", "D7", "D8", "D9")
    groups, types = iommu.groups.value or {}, iommu.group_types.value or {}
    kinds = {
        gpu.bdf: types[group]
        for gpu in host_gpus(snapshot)
        for group, members in groups.items()
        if gpu.bdf in members and types.get(group) not in (None, "unknown")
    }
    if kinds:
        translated = [bdf for bdf, kind in kinds.items() if kind != "identity"]
        shown = Excerpt(iommu.group_types.source, "\n".join(f"{bdf}: {kind}" for bdf, kind in kinds.items()))
        if not translated:
            yield verdict("pass", "The IOMMU lets the GPUs through untranslated (identity)", shown)
        else:
            yield verdict(
                "fail",
                f"The IOMMU translates the accesses of {listed(translated)}: peer copies over PCIe cannot work",
                shown,
                line,
                fix=fix,
                explains=explains,
            )
        return
    if line.value is not None and iommu_off_tokens(line.value):
        yield verdict("pass", f"The IOMMU is off ({listed(iommu_off_tokens(line.value))})", line)
    elif line.value is not None and line.value.last("iommu") == "pt":
        yield verdict("pass", "The IOMMU lets host devices through untranslated (iommu=pt)", line)
    elif iommu.default_domain.value == "Passthrough":
        yield verdict("pass", "The IOMMU lets host devices through untranslated", iommu.default_domain)
    elif iommu.default_domain.value == "Translated" and line.value is not None and iommu.units.value:
        yield verdict(
            "fail",
            "The IOMMU translates what host devices access: peer copies over PCIe cannot work",
            iommu.default_domain,
            iommu.units,
            fix=fix,
            explains=explains,
        )
    else:
        reason = iommu.units.reason or iommu.default_domain.reason or "no IOMMU group of a GPU was read"
        yield verdict("unknown", "Whether the IOMMU translates GPU accesses is not known", reason=reason)


@rule(
    "E2",
    "bm-acs-redirect",
    title="No port above a GPU sends peer traffic the long way (ACS)",
    roles=("bare_metal",),
    severity="high",
    looks_at=("lspci.vvv", "sysfs.pci"),
    why="With redirection on, what one GPU writes to another goes up to the root complex, even below one switch.",
    automation="ask",
    risk=f"{SECURITY_NOTES['acs']} Not on a machine with several tenants, and never on a hypervisor.",
    verify="lspci -vvv | grep -E '^[0-9a-f]|ACSCtl'   # wanted above GPUs: all minus",
    sources=("NCCL user guide, troubleshooting", "NVIDIA/nccl #2079", "rtx6kpro captures"),
    gain=Gain("50 -> 103", "GB/s both ways below one switch", "rtx6kpro, PEX890xx pair: one site, not repeated here"),
)
def _redirect(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    single = _single(snapshot)
    if single:
        yield single
        return
    gpus = [one for one in host_gpus(snapshot) if not one.physfn]
    if not gpus:
        yield from _unnamed_ports(snapshot)
        return
    functions = snapshot.pci.functions.value or {}
    ways = {gpu.bdf: bridges_above(snapshot, gpu.bdf) or () for gpu in gpus}
    above = {bridge.bdf: bridge for way in ways.values() for bridge in way}
    judged = False
    for bdf, bridge in sorted(above.items()):
        if bridge.acs_ctl is None or bridge.port_type not in _PORTS_DOWN:
            continue
        judged = True
        below = [gpu for gpu, way in ways.items() if bridge in way]
        on = [name for name in _REDIRECTS if bridge.acs_ctl.get(name)]
        if on:
            yield verdict(
                "fail",
                f"Port {bdf}, above {listed(below)}, redirects peer traffic ({', '.join(on)})",
                _acs(bridge),
                subject=bdf,
                fix=_acs_fix(bdf),
                explains=("D8", "D9"),
            )
        else:
            yield verdict("pass", f"Port {bdf}, above {listed(below)}, does not redirect", _acs(bridge), subject=bdf)
    for one in functions.values():
        if one.bdf not in above and one.acs_ctl and any(one.acs_ctl.get(name) for name in _REDIRECTS) and one.is_bridge:
            yield verdict(
                "info",
                f"Port {one.bdf} redirects, but no GPU is known to be below it",
                _acs(one),
                subject=one.bdf,
            )
    blind = [gpu for gpu, way in ways.items() if not any(bridge.acs_ctl is not None for bridge in way)]
    if blind and any(bridge.access_denied for gpu in blind for bridge in ways[gpu]):
        yield verdict("unknown", f"ACS above {listed(blind)} is not known", reason="lspci was not run as root")
    elif blind and not (snapshot.pci.complete and all(_whole(way) for way in (ways[gpu] for gpu in blind))):
        reason = "the ports above or their ACS control registers were not read"
        yield verdict("unknown", f"ACS above {listed(blind)} is not known", reason=reason)
    elif not judged:
        yield verdict(
            "pass",
            "No port above a GPU has access control",
            Excerpt(gpus[0].source, f"no ACS capability on {listed(sorted(above))}"),
        )


def _whole(way: Sequence[PciFunction]) -> bool:
    """Whether every port's whole configuration space was read: then a missing capability is a reading."""
    return bool(way) and all(len(bridge.config_hex) == 2 * 4096 for bridge in way)


def _unnamed_ports(snapshot: Snapshot) -> Iterator[Verdict]:
    """Judge ``lspci -vvv | grep ACSCtl``: if no port at all redirects, none above a GPU does."""
    ports = [one for one in snapshot.pci.unnamed.value or () if one.acs_ctl is not None]
    if not ports:
        yield no_gpu(snapshot)
        return
    on = [one for one in ports if any((one.acs_ctl or {}).get(name) for name in _REDIRECTS)]
    if on:
        reason = "the excerpt does not say which ports these are: add the whole `lspci -vvv`"
        yield verdict(
            "unknown", f"{len(on)} of {len(ports)} ports redirect; whether above a GPU is not known", reason=reason
        )
    else:
        yield verdict("pass", f"None of {len(ports)} listed ports redirects peer traffic", snapshot.pci.unnamed)


def _acs(bridge: PciFunction) -> Excerpt:
    flags = " ".join(f"{name}{'+' if on else '-'}" for name, on in (bridge.acs_ctl or {}).items())
    return Excerpt(bridge.source or "lspci.vvv", f"{bridge.bdf} ACSCtl: {flags}")


def _acs_fix(bdf: str) -> Fix:
    return Fix(
        "Switch redirection off on this port at each boot, on a machine that is yours alone",
        (
            f"setpci -s {bdf} ECAP_ACS+0x6.w   # note the value: it is the way back",
            f"setpci -s {bdf} ECAP_ACS+0x6.w=0000   # until the next boot; then measure",
            "# for good: a systemd unit with these lines, or pci=config_acs= where the kernel has it",
        ),
        restart="none",
    )


# --- E3: a contradiction --------------------------------------------------------------------------------------------


@rule(
    "E3",
    "bm-iommu-off-with-vfio",
    title="The IOMMU is not off where devices are meant for VMs",
    roles=HOST_ROLES,
    severity="high",
    looks_at=("proc.cmdline", "sysfs.iommu", "sysfs.pci", "pve.conf"),
    why="Without an IOMMU no device can be passed: one of the two settings is a left-over of another use.",
    restart="reboot",
    automation="never",
    risk=f"Reboots this machine. {SECURITY_NOTES['iommu']}",
    verify="cat /proc/cmdline; ls /sys/class/iommu",
    sources=("kernel vfio documentation",),
)
def _off_with_vfio(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    line = snapshot.kernel.command_line
    off = iommu_off_tokens(line.value or CommandLine())
    if not off:
        if line.known:
            yield verdict("pass", "No kernel parameter switches the IOMMU off", line)
        else:
            yield verdict("unknown", "Whether the IOMMU was switched off is not known", reason=line.reason)
        return
    functions = (snapshot.pci.functions.value or {}).values()
    bound = [one.bdf for one in functions if one.driver == "vfio-pci"]
    vms = [config.vmid for config, _ in gpu_vms(snapshot)]
    if bound or vms:
        what = f"{listed(bound)} is bound to vfio-pci" if bound else f"VM {listed(vms)} has GPUs passed through"
        yield verdict(
            "fail",
            f"{listed(off)} switches the IOMMU off, but {what}",
            line,
            *([Excerpt("sysfs.pci", f"{bound[0]} driver: vfio-pci")] if bound else []),
            fix=Fix(
                "Decide what the machine is: remove the parameter for VMs, or the passthrough settings for bare metal",
                set_kernel_parameters(snapshot, f"remove {' '.join(off)}"),
            ),
            explains=("C1", "C7"),
        )
    elif snapshot.pci.functions.known or snapshot.vm.configs.known:
        yield verdict("pass", f"The IOMMU is off ({listed(off)}), and nothing is meant for a VM", line)
    else:
        reason = snapshot.pci.functions.reason
        yield verdict("unknown", "Whether a device is meant for a VM is not known", line, reason=reason)
