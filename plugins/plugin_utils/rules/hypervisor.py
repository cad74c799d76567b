"""Rules C: the hypervisor below the guests: IOMMU, binding, boot parameters, ACS."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..core.finding import Excerpt, Fix
from ..core.snapshot import CommandLine, Fact, PciFunction, Snapshot
from .common import (
    FOREIGN_DRIVERS,
    SECURITY_NOTES,
    counted,
    is_pve_kernel,
    kernel_version,
    listed,
    listed_items,
    log_excerpt,
    token,
)
from .knowledge import version, version_text
from .machines import Passed
from .passthrough import REBOOT_RISK, bridges_above, log_notes, no_passed_gpu, passed_gpus, vfio_ids
from .registry import Fleet, Verdict, rule, verdict

_OFF = ("iommu", "intel_iommu", "amd_iommu")


def iommu_off_tokens(line: CommandLine) -> list[str]:
    """Return the kernel parameters that switch the IOMMU off."""
    return [token(key, "off") for key in _OFF if line.last(key) == "off"]


def boot_loader(snapshot: Snapshot) -> Fact[str]:
    """Return grub or systemd-boot, from what was read or from what the command line itself shows."""
    kernel = snapshot.kernel
    if kernel.boot_loader.known:
        return kernel.boot_loader
    line = kernel.command_line.value
    if line is not None and line.has("BOOT_IMAGE"):
        return Fact("grub", kernel.command_line.source, "BOOT_IMAGE is on the command line")
    if line is not None and (line.last("root") or "").startswith("ZFS=") and line.last("boot") == "zfs":
        return Fact("systemd-boot", kernel.command_line.source, kernel.command_line.excerpt)
    return kernel.boot_loader


def set_kernel_parameters(snapshot: Snapshot, change: str) -> tuple[str, ...]:
    """Return the steps that change the kernel command line with this machine's boot loader."""
    loader = boot_loader(snapshot).value
    grub = ("cp -a /etc/default/grub /root/grub.bak", f"# /etc/default/grub, GRUB_CMDLINE_LINUX_DEFAULT: {change}")
    systemd = (
        "cp -a /etc/kernel/cmdline /root/cmdline.bak",
        f"# /etc/kernel/cmdline, one line: {change}",
        "proxmox-boot-tool refresh",
    )
    if loader == "grub":
        return (*grub, "update-grub", "reboot")
    if loader == "systemd-boot":
        return (*systemd, "reboot")
    return ("# a GRUB host:", *grub, "update-grub", "# a systemd-boot host (ZFS on UEFI):", *systemd, "reboot")


# --- C1, C2: the IOMMU ----------------------------------------------------------------------------------------------


@rule(
    "C1",
    "iommu-enabled",
    title="The IOMMU of the hypervisor is on",
    roles=("hypervisor",),
    severity="critical",
    looks_at=("sysfs.iommu", "proc.cmdline", "proc.cpuinfo", "uname"),
    why="Without an IOMMU no VM gets a PCI device. A kernel message alone proves nothing: the ring buffer wraps.",
    restart="reboot",
    automation="ask",
    risk=f"{REBOOT_RISK} Firmware settings may have to change first.",
    verify="ls /sys/class/iommu; ls /sys/kernel/iommu_groups | wc -l",
    sources=("pve-docs qm-pci-passthrough",),
)
def _iommu_enabled(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    iommu, kernel = snapshot.iommu, snapshot.kernel
    off = iommu_off_tokens(kernel.command_line.value or CommandLine())
    groups = iommu.groups.value or {}
    if iommu.units.value or (groups and not iommu.units.known):
        yield verdict("pass", f"The IOMMU is on, with {counted(len(groups), 'group')}", iommu.units, iommu.groups)
        return
    if iommu.units.value and iommu.groups.known and not groups:
        yield verdict("fail", "There is an IOMMU, but no IOMMU group", iommu.units, iommu.groups)
        return
    vendor = snapshot.cpu.vendor.value
    if off:
        yield verdict(
            "fail",
            f"The kernel was booted with {listed(off)}: no VM can get a PCI device",
            kernel.command_line,
            iommu.units,
            fix=Fix(
                "Remove the parameter from the boot configuration",
                set_kernel_parameters(snapshot, f"remove {' '.join(off)}"),
            ),
            explains=("C7",),
        )
        return
    if not iommu.units.known:
        yield verdict(
            "unknown",
            "Whether the IOMMU is on is not known",
            kernel.command_line,
            reason=f"/sys/class/iommu was not read ({iommu.units.reason}); kernel messages alone do not prove it",
        )
        return
    line, running = kernel.command_line.value, kernel_version(snapshot)
    needs_option = (
        vendor == "GenuineIntel"
        and line is not None
        and line.last("intel_iommu") != "on"
        and bool(running)
        and running < version("kernel.intel_iommu_default_on")
    )
    if needs_option:
        fix = Fix(
            f"Kernels before {version_text('kernel.intel_iommu_default_on')} need intel_iommu=on",
            set_kernel_parameters(snapshot, "add intel_iommu=on"),
        )
    else:
        technology = {"GenuineIntel": "VT-d", "AuthenticAMD": "AMD-Vi (also called IOMMU; SVM is not it)"}
        fix = Fix(
            f"Switch {technology.get(vendor or '', 'VT-d or AMD-Vi')} on in the firmware setup"
            + ("; on AMD the kernel needs no parameter for it" if vendor == "AuthenticAMD" else ""),
            ("# reboot into the firmware setup: systemctl reboot --firmware-setup", "ls /sys/class/iommu"),
        )
    yield verdict(
        "fail",
        "The IOMMU of this hypervisor is off: no VM can get a PCI device",
        iommu.units,
        kernel.command_line,
        fix=fix,
        explains=("C7",),
    )


@rule(
    "C2",
    "iommu-mode-pt",
    title="The IOMMU mode of host drivers",
    roles=("hypervisor",),
    severity="low",
    looks_at=("kernel_log", "proc.cmdline", "sysfs.iommu"),
    why=(
        "iommu=pt only speeds up devices that the host itself uses; devices of VMs have domains of their own either "
        "way."
    ),
    restart="reboot",
    automation="ask",
    risk=f"{REBOOT_RISK} {SECURITY_NOTES['iommu']}",
    verify="dmesg | grep 'Default domain type'",
    sources=("pve-docs qm-pci-passthrough",),
)
def _iommu_mode(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    iommu, line = snapshot.iommu, snapshot.kernel.command_line
    if iommu.units.known and not iommu.units.value:
        yield verdict("not_applicable", "The IOMMU is off", iommu.units, reason="rule C1 judges that")
    elif (line.value is not None and line.value.last("iommu") == "pt") or iommu.default_domain.value == "Passthrough":
        yield verdict("pass", "Host drivers bypass the IOMMU (iommu=pt)", iommu.default_domain, line)
    elif iommu.default_domain.known:
        yield verdict(
            "info",
            f"Host drivers go through the IOMMU ({iommu.default_domain.value}); guests' devices are not affected",
            iommu.default_domain,
        )
    else:
        reason = iommu.default_domain.reason or "neither the kernel log nor the command line says it"
        yield verdict("unknown", "The IOMMU mode of host drivers is not known", reason=reason)


# --- C5, C7: which devices, and who drives them ---------------------------------------------------------------------

_NOT_VIABLE = r"group (\d+) is not viable"


@rule(
    "C5",
    "iommu-group-isolation",
    title="The IOMMU group of each passed GPU holds nothing that the host uses",
    roles=("hypervisor",),
    severity="critical",
    looks_at=("sysfs.iommu", "sysfs.pci", "pve.conf", "kernel_log"),
    why="The group is the unit of isolation: QEMU refuses a device whose group has a member with a host driver.",
    restart="reboot",
    automation="never",
    risk="Another slot or firmware ACS is the cure. An ACS override only claims isolation.",
    verify="for d in /sys/kernel/iommu_groups/*/devices/*; do echo $d; done | sort -V",
    sources=("pve-docs qm-pci-passthrough", "kernel vfio documentation"),
    without_role=True,
)
def _group_isolation(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    groups, functions = snapshot.iommu.groups.value or {}, snapshot.pci.functions.value or {}
    not_viable = [line for line in log_notes(snapshot, "not_viable") if re.search(_NOT_VIABLE, line.text)]
    for found in dict.fromkeys(re.search(_NOT_VIABLE, line.text) for line in not_viable):
        if found is not None:
            yield _not_viable(snapshot, found[1], groups.get(found[1], ()))
    if not_viable:
        return
    gpus = passed_gpus(snapshot)
    if not gpus:
        yield no_passed_gpu(snapshot)
        return
    owners = {one.bdf: vmid for gpu, vmid, line in gpus for one in (line.functions if line else (gpu,))}
    for gpu, vmid, _ in gpus:
        group = next((name for name, members in groups.items() if gpu.bdf in members), None)
        if group is None:
            yield verdict(
                "unknown",
                f"The IOMMU group of {gpu.bdf} is not known",
                subject=gpu.bdf,
                reason=snapshot.iommu.groups.reason or "it is in no group that was read",
            )
            continue
        yield _judge_group(snapshot, gpu, vmid, group, groups[group], owners, functions)


def _not_viable(snapshot: Snapshot, group: str, members: Sequence[str]) -> Verdict:
    functions = snapshot.pci.functions.value or {}
    endpoints = [bdf for bdf in members if not (bdf in functions and _harmless(functions[bdf]))]
    bridges = [bdf for bdf in members if bdf not in endpoints]
    what = listed(endpoints) if endpoints else "every endpoint of the group"
    return verdict(
        "fail",
        f"IOMMU group {group} is not viable: {what} must be bound to vfio-pci before the VM starts",
        log_excerpt(snapshot, log_notes(snapshot, "not_viable")),
        Excerpt(snapshot.iommu.groups.source or "sysfs.iommu", f"group {group}: {' '.join(members) or 'not listed'}"),
        subject=f"group {group}",
        why="Every endpoint function of the group needs vfio-pci."
        + (f" {listed(bridges)} is a bridge and needs no binding." if bridges else " PCI bridges need no binding."),
        fix=Fix(
            "Bind each endpoint of the group to vfio-pci",
            tuple(f"driverctl set-override {bdf} vfio-pci" for bdf in endpoints) or ("# list the group first",),
        ),
        explains=("C7",),
    )


def _harmless(function: PciFunction) -> bool:
    """Bridges and host bridges carry no DMA of their own."""
    return (function.class_code or "")[:4] in ("0604", "0600")


def _judge_group(
    snapshot: Snapshot,
    gpu: PciFunction,
    vmid: str,
    group: str,
    members: Sequence[str],
    owners: dict[str, str],
    functions: object,
) -> Verdict:
    known = snapshot.pci.functions.value or {}
    slot = gpu.bdf.rpartition(".")[0]
    others = [bdf for bdf in members if bdf.rpartition(".")[0] != slot]
    foreign = [bdf for bdf in others if not (bdf in known and _harmless(known[bdf]))]
    shown = Excerpt(snapshot.iommu.groups.source or "sysfs.iommu", f"group {group}: {' '.join(members)}")
    if not foreign:
        return verdict("pass", f"{gpu.bdf} shares IOMMU group {group} with nothing of the host", shown, subject=gpu.bdf)
    unread = [bdf for bdf in foreign if bdf not in known or known[bdf].driver is None]
    bound = [bdf for bdf in foreign if bdf not in unread and known[bdf].driver not in ("", "vfio-pci")]
    same_vm = all(owners.get(bdf) == vmid for bdf in foreign)
    if bound and not same_vm:
        drivers = [f"{bdf} ({known[bdf].driver})" for bdf in bound]
        return verdict(
            "fail",
            f"{gpu.bdf} shares IOMMU group {group} with {listed(drivers)}, which the host uses",
            shown,
            subject=gpu.bdf,
            fix=Fix(
                "Move one of them to a slot on CPU lanes, or switch ACS on in the firmware: Proxmox "
                "cannot split a group",
                ("lspci -tv", f"ls /sys/kernel/iommu_groups/{group}/devices"),
            ),
            explains=("C7",),
        )
    if unread:
        return verdict(
            "unknown",
            f"{gpu.bdf} shares IOMMU group {group} with {listed(unread)}, whose driver is not known",
            shown,
            subject=gpu.bdf,
            reason="class or driver of these functions was not read",
        )
    return verdict(
        "pass" if same_vm and vmid else "warn",
        f"{gpu.bdf} shares IOMMU group {group} with {listed(foreign)}: they can only go to the same VM",
        shown,
        subject=gpu.bdf,
        fix=Fix("Pass them to one VM, or use another slot", (f"ls /sys/kernel/iommu_groups/{group}/devices",)),
    )


@rule(
    "C7",
    "vfio-bound",
    title="Each passed GPU is bound to vfio-pci",
    roles=("hypervisor",),
    severity="high",
    looks_at=("sysfs.pci", "pve.conf", "modprobe.d", "pve.running"),
    why="A GPU that a host driver holds cannot be handed to a VM, or is left in a state that the guest cannot use.",
    restart="reboot",
    automation="ask",
    risk=f"{REBOOT_RISK} ids= takes every card with that id, also one that the host needs: bind by address then.",
    verify="lspci -nnk -d 10de:",
    sources=("pve-docs qm-pci-passthrough", "aikitoria/open-gpu-kernel-modules #24"),
    without_role=True,
)
def _vfio_bound(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = passed_gpus(snapshot)
    ids = vfio_ids(snapshot)
    if not gpus:
        yield no_passed_gpu(snapshot)
    for gpu, vmid, line in gpus:
        yield _judge_binding(snapshot, gpu, vmid, line, f"{gpu.vendor}:{gpu.device}" in ids)


def _judge_binding(snapshot: Snapshot, gpu: PciFunction, vmid: str, line: Passed | None, by_id: bool) -> Verdict:
    config = (snapshot.vm.configs.value or {}).get(vmid)
    running = config.running.value if config else None
    shown = Excerpt(gpu.source or "sysfs.pci", f"{gpu.bdf} driver: {gpu.driver or 'none'}")
    where = f" of VM {vmid}" if vmid else ""
    if line is not None and line.line.options.get("driver") == "keep":
        return verdict(
            "not_applicable",
            f"{gpu.bdf}{where} keeps its host driver on purpose",
            Excerpt(config.source if config else "pve.conf", line.line.line),
            subject=gpu.bdf,
            reason="its hostpci line says driver=keep, which suits virtual functions with a vendor driver",
        )
    if gpu.driver == "vfio-pci":
        return verdict("pass", f"{gpu.bdf}{where} is bound to vfio-pci", shown, subject=gpu.bdf)
    if gpu.driver is None:
        reason = "the driver of this function was not read, or cut off"
        if by_id:
            reason += (
                "; options vfio-pci ids= names it, which alone does not bind it: look at lspci -nnk, and where it "
                "is not bound, at the initramfs, at softdep lines, and at the slot's other functions, which ids= "
                "must name too"
            )
        return verdict(
            "unknown",
            f"Whether {gpu.bdf}{where} is bound to vfio-pci is not known",
            shown,
            subject=gpu.bdf,
            reason=reason,
        )
    rebind = Fix(
        "Bind the GPU to vfio-pci by its address, before any other driver",
        (
            f"driverctl set-override {gpu.bdf} vfio-pci",
            "# or by id for every such card: /etc/modprobe.d/vfio.conf",
            f"echo 'options vfio-pci ids={gpu.vendor}:{gpu.device}' >> /etc/modprobe.d/vfio.conf",
            "echo 'softdep nouveau pre: vfio-pci' >> /etc/modprobe.d/vfio.conf",
            "echo 'softdep nvidia pre: vfio-pci' >> /etc/modprobe.d/vfio.conf",
            "update-initramfs -u -k all",
            "reboot",
        ),
    )
    if gpu.driver == "":
        if running:
            return verdict(
                "fail",
                f"VM {vmid} is running, but {gpu.bdf} is bound to no driver",
                shown,
                subject=gpu.bdf,
                fix=rebind,
            )
        if by_id and not vmid:
            return verdict(
                "fail",
                f"options vfio-pci ids= names {gpu.vendor}:{gpu.device}, but {gpu.bdf} is not bound to vfio-pci",
                shown,
                subject=gpu.bdf,
                why=(
                    "vfio-pci was not loaded early enough: it is missing in the initramfs or another module came first."
                ),
                fix=rebind,
            )
        if running is None:
            return verdict(
                "unknown",
                f"{gpu.bdf}{where} has no driver, which is right only while the VM is stopped",
                shown,
                subject=gpu.bdf,
                reason="whether the VM is running was not read",
            )
        return verdict("pass", f"{gpu.bdf}{where} has no driver; Proxmox binds it at the start", shown, subject=gpu.bdf)
    host_driver = gpu.driver in (*FOREIGN_DRIVERS, "nvidia")
    return verdict(
        "fail",
        f"{gpu.bdf}{where} is held by {gpu.driver}"
        + (", a driver of the host" if host_driver else ", not by vfio-pci"),
        shown,
        subject=gpu.bdf,
        fix=rebind,
    )


# --- C10, C12: boot parameters --------------------------------------------------------------------------------------

_MATTERS = re.compile(r"(.*iommu.*|pci.*|vfio.*|hugepages.*|default_hugepagesz|initcall_blacklist|isolcpus)")
_LOADERS_OWN = ("BOOT_IMAGE", "initrd", "root", "ro", "rw", "quiet", "splash", "boot", "rootflags")


def _missing_tokens(wanted: CommandLine, running: CommandLine) -> list[str]:
    have = set(running.tokens)
    items = {(key, item) for key, value in running.tokens if value for item in value.split(",")}
    return [
        token(key, value)
        for key, value in dict.fromkeys(wanted.tokens)
        if key not in _LOADERS_OWN
        and (key, value) not in have
        and not (value and all((key, item) in items for item in value.split(",")))
    ]


@rule(
    "C10",
    "boot-cmdline-applied",
    title="The kernel runs with the parameters that the boot configuration names",
    severity="high",
    looks_at=("proc.cmdline", "etc.default.grub", "etc.kernel.cmdline", "boot", "proxmox_boot_tool.status"),
    roles=("hypervisor",),
    why=(
        "GRUB's file does nothing where systemd-boot starts the machine (ZFS on UEFI), and no file does before a "
        "refresh."
    ),
    restart="reboot",
    automation="ask",
    risk=REBOOT_RISK,
    verify="cat /proc/cmdline",
    sources=("pve-docs system-booting", "recorded Proxmox host on ZFS"),
    without_role=True,
)
def _cmdline_applied(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    kernel = snapshot.kernel
    running, loader = kernel.command_line, boot_loader(snapshot)
    if running.value is None:
        yield verdict("unknown", "The running kernel's parameters are not known", reason=running.reason)
        return
    grub, systemd = kernel.grub_default, kernel.etc_kernel_cmdline
    if not (grub.known or systemd.known):
        reason = grub.reason or "neither /etc/default/grub nor /etc/kernel/cmdline was read"
        yield verdict("unknown", "The boot configuration is not known", running, reason=reason)
        return
    in_grub = _missing_tokens(grub.value, running.value) if grub.value is not None else []
    in_systemd = _missing_tokens(systemd.value, running.value) if systemd.value is not None else []
    if loader.value == "systemd-boot":
        only_grub = [one for one in in_grub if _MATTERS.fullmatch(one.partition("=")[0])]
        if only_grub and _one_missing(only_grub, systemd.value):
            yield verdict(
                "fail",
                f"{listed(only_grub)} {_stands(only_grub)} in /etc/default/grub, but systemd-boot starts this machine",
                grub,
                running,
                fix=Fix(
                    "Write the parameters where systemd-boot reads them",
                    set_kernel_parameters(snapshot, f"add {' '.join(only_grub)}"),
                ),
                explains=("C1",),
            )
            return
        if not systemd.known:
            reason = systemd.reason or "/etc/kernel/cmdline was not read"
            yield verdict("unknown", "What systemd-boot would start with is not known", running, reason=reason)
            return
        missing, fact, place = in_systemd, systemd, "/etc/kernel/cmdline"
    elif loader.value == "grub" or not systemd.known:
        if not grub.known:
            reason = grub.reason or "/etc/default/grub was not read"
            yield verdict("unknown", "What GRUB would start with is not known", running, reason=reason)
            return
        missing, fact, place = in_grub, grub, "/etc/default/grub"
    elif not grub.known:
        missing, fact, place = in_systemd, systemd, "/etc/kernel/cmdline"
    else:
        yield verdict(
            "unknown",
            "Which boot configuration counts is not known",
            running,
            reason=loader.reason or "the boot loader was not read, and both files exist",
        )
        return
    if not missing:
        yield verdict("pass", f"The kernel runs with the parameters of {place}", running, fact)
        return
    by_whom = f" ({loader.value} starts this machine)" if loader.known else ""
    matters = [one for one in missing if _MATTERS.fullmatch(one.partition("=")[0])]
    apply = "proxmox-boot-tool refresh" if place == "/etc/kernel/cmdline" else "update-grub"
    yield verdict(
        "fail" if matters else "warn",
        f"{listed(missing)} {_stands(missing)} in {place}{by_whom}, but not on the running kernel's command line",
        fact,
        running,
        fix=Fix("Apply the boot configuration and reboot", (apply, "reboot")),
        explains=("C1",) if matters else (),
    )


def _stands(tokens: Sequence[str]) -> str:
    return "stands" if len(tokens) == 1 else "stand"


def _one_missing(tokens: Sequence[str], line: CommandLine | None) -> bool:
    """Whether one of these tokens is not in this command line (True where there is none)."""
    return line is None or any(one not in {token(*pair) for pair in line.tokens} for one in tokens)


@rule(
    "C12",
    "acs-override-cmdline",
    title="No ACS override pretends isolation",
    roles=("hypervisor",),
    severity="high",
    looks_at=("proc.cmdline", "kernel_log", "uname", "sysfs.iommu"),
    why=(
        "The override only claims isolation. Peer DMA may bypass the IOMMU, so a VM can reach another VM or the "
        "host, and untranslated guest addresses may hit the wrong device. It never creates P2P."
    ),
    restart="reboot",
    automation="ask",
    risk=(
        f"{REBOOT_RISK} {SECURITY_NOTES['acs_override']} Groups grow together again: VMs that shared one may not start."
    ),
    verify="dmesg | grep 'ACS overrides enabled'   # wanted: nothing",
    sources=("proxmox/pve-kernel patches",),
)
def _acs_override(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    line = snapshot.kernel.command_line
    warned = log_notes(snapshot, "acs_override")
    if line.value is None and not warned:
        yield verdict("unknown", "Whether an ACS override is set is not known", reason=line.reason)
        return
    items = listed_items(line.value or CommandLine(), "pcie_acs_override")
    if not items and not warned:
        yield verdict("pass", "No ACS override is set", line)
        return
    release = snapshot.kernel.release.value or ""
    shown = token("pcie_acs_override", ",".join(items)) if items else "an ACS override"
    if release and not is_pve_kernel(release) and not warned:
        yield verdict(
            "warn",
            f"{shown} is set, but kernel {release} is not Proxmox's: mainline kernels ignore it",
            line,
            fix=Fix("Remove it", set_kernel_parameters(snapshot, f"remove {shown}")),
        )
        return
    yield verdict(
        "fail",
        f"{shown} makes the kernel claim an isolation between devices that may not exist",
        line,
        *([log_excerpt(snapshot, warned)] if warned else []),
        _gpu_groups(snapshot),
        fix=Fix(
            "Remove it and use slots with real ACS",
            set_kernel_parameters(snapshot, f"remove {shown}"),
        ),
    )


def _gpu_groups(snapshot: Snapshot) -> Excerpt:
    bdfs = {gpu.bdf for gpu, _, _ in passed_gpus(snapshot)}
    groups = [
        f"group {name}: {' '.join(members)}"
        for name, members in sorted((snapshot.iommu.groups.value or {}).items(), key=lambda one: one[0].zfill(6))
        if bdfs & set(members)
    ]
    source = snapshot.iommu.groups.source or "sysfs.iommu"
    return Excerpt(source, "\n".join(groups) or "which groups it split is not known")


# --- C13: ACS -------------------------------------------------------------------------------------------------------


@rule(
    "C13",
    "acs-hypervisor-keep",
    title="ACS is on above every passed GPU",
    roles=("hypervisor",),
    severity="critical",
    looks_at=("lspci.vvv", "sysfs.pci", "proc.cmdline"),
    why=(
        "A guest's DMA carries guest addresses, which must reach the IOMMU to be translated. With redirection off a "
        "switch routes them by address: to a wrong device, or nowhere. Advice to disable ACS is for bare metal only."
    ),
    restart="reboot",
    automation="never",
    risk=f"{REBOOT_RISK} {SECURITY_NOTES['acs']}",
    verify="lspci -vvv | grep -E '^[0-9a-f]|ACSCtl'",
    sources=("NCCL user guide, troubleshooting", "club-3090"),
)
def _acs_kept(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    line = snapshot.kernel.command_line.value or CommandLine()
    disabling = [
        token("pci", item)
        for value in line.all("pci")
        for item in (value or "").split(",")
        if item.startswith(("disable_acs_redir", "config_acs"))
    ]
    units = snapshot.iommu.units
    if units.known and not units.value:
        yield verdict("not_applicable", "The IOMMU is off, so no VM has a GPU", units, reason="rule C1 judges that")
        return
    gpus = passed_gpus(snapshot)
    if not gpus:
        yield no_passed_gpu(snapshot)
    for gpu, _, _ in gpus:
        yield _judge_acs(snapshot, gpu, disabling)


def _judge_acs(snapshot: Snapshot, gpu: PciFunction, disabling: Sequence[str]) -> Verdict:
    way = bridges_above(snapshot, gpu.bdf)
    if disabling:
        return verdict(
            "fail",
            f"The kernel was told to switch ACS redirection off ({listed(disabling)}) on a host that passes {gpu.bdf}",
            snapshot.kernel.command_line,
            subject=gpu.bdf,
            fix=Fix(
                "Remove the parameter: it is for bare metal",
                set_kernel_parameters(snapshot, f"remove {' '.join(disabling)}"),
            ),
        )
    read = [one for one in way or () if one.acs_ctl is not None]
    if way is None or not read:
        denied = any(one.access_denied for one in way or ())
        reason = (
            "lspci was not run as root, so ACS is unknown, not absent"
            if denied
            else "the ports above this GPU or their ACS control registers were not read"
        )
        return verdict("unknown", f"ACS above {gpu.bdf} is not known", subject=gpu.bdf, reason=reason)
    weak = [one for one in read if not ((one.acs_ctl or {}).get("ReqRedir") and (one.acs_ctl or {}).get("UpstreamFwd"))]
    shown = Excerpt(
        read[0].source or "lspci.vvv",
        "\n".join(
            f"{one.bdf} ACSCtl: " + " ".join(f"{key}{'+' if on else '-'}" for key, on in (one.acs_ctl or {}).items())
            for one in read
        ),
    )
    if not weak:
        return verdict("pass", f"ACS redirection is on above {gpu.bdf}", shown, subject=gpu.bdf)
    off = [one for one in weak if not any((one.acs_ctl or {}).values())]
    return verdict(
        "fail" if off else "warn",
        f"ACS redirection is off on {listed([one.bdf for one in weak])}, above {gpu.bdf}, which is passed to a VM",
        shown,
        subject=gpu.bdf,
        severity=None if off else "medium",
        fix=Fix(
            "Find and remove what switched it off (setpci in a unit or rc.local); do not switch ACS off on a "
            "hypervisor",
            ("grep -rnE 'setpci|ECAP_ACS' /etc/systemd/system /etc/rc.local /usr/local/sbin 2>/dev/null", "reboot"),
        ),
    )
