"""Rules B9, B10, B14 to B16 and B22: firmware, mappings and device options of a VM that has GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..core.finding import Excerpt, Fix
from ..core.snapshot import MappingClaim, PciFunction, Snapshot, VmConfig
from .common import RISK_STOP, has_no_gpu, listed, stop_risk
from .join import guest_of
from .knowledge import number
from .machines import (
    Passed,
    absent,
    change_vm,
    conf_line,
    config_is_whole,
    display_functions,
    each_vm,
    full_bdf,
    peers_wanted,
    vm,
    vm_arguments,
    vmid,
    without_option,
)
from .peers import delivery
from .registry import Fleet, Verdict, rule, verdict

_GIB = 1 << 30


def stop_fix(
    rule_id: str, config: VmConfig, lines: Sequence[Passed], summary: str, *commands: str, libvirt: str
) -> Fix:
    """Return a fix that changes a VM's settings and needs a new QEMU process."""
    steps = change_vm(rule_id, config, *commands, libvirt=libvirt)
    return Fix(summary, steps, risk=stop_risk(display_functions(lines)))


# --- B9: mappings ---------------------------------------------------------------------------------------------------


def _broken_claim(snapshot: Snapshot, claim: MappingClaim) -> str:
    """Say why Proxmox would refuse this map line, or "" where nothing speaks against it."""
    functions = snapshot.pci.functions.value or {}
    for bdf in claim.bdfs:
        first = functions.get(bdf if "." in bdf else f"{bdf}.0")
        if first is None and snapshot.pci.complete:
            return f"there is no device {bdf}"
        if first is None or not first.vendor:
            continue
        found = f"{first.vendor}:{first.device}"
        if claim.vendor_device and claim.vendor_device != found:
            return f"{bdf} is {found}, not {claim.vendor_device}"
        if claim.iommu_group is not None and first.iommu_group not in (None, claim.iommu_group):
            return f"{bdf} is in IOMMU group {first.iommu_group}, not {claim.iommu_group}"
    return ""


@rule(
    "B9",
    "pve-hostpci-mapping",
    title="Every mapped device is where the mapping says, and free",
    roles=("hypervisor",),
    severity="info",
    looks_at=("pve.conf", "pve.mapping.pci", "pve.reservations", "sysfs.pci"),
    why=(
        "Proxmox compares a mapping with the hardware when the VM starts, and refuses the start where the address, the "
        "ids or the IOMMU group are others. Addresses change when a card is added or the firmware is updated."
    ),
    restart="vm_stop_start",
    automation="never",
    risk=RISK_STOP,
    verify="qm showcmd VMID --pretty | grep vfio-pci",
    sources=("qemu-server PCI.pm",),
    without_role=True,
)
@each_vm
def _mapping(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    mapped = [one for one in config.hostpci if one.mapping]
    held = _held_by_others(snapshot, config, lines)
    if held:
        yield verdict(
            "info",
            f"{listed(held)}: VM {config.vmid} does not start meanwhile",
            snapshot.vm.reservations,
            conf_line(config, *(one.name for one in lines)),
            subject=vm(config),
        )
    if not mapped:
        if not held:
            yield verdict(
                "not_applicable",
                f"VM {config.vmid} uses no mapping",
                subject=vm(config),
                reason="no hostpci line holds mapping=",
            )
        return
    names = [one.name for one in mapped]
    claims = snapshot.vm.mapping_claims
    if claims.value is None:
        yield verdict(
            "unknown",
            f"What the mappings of VM {config.vmid} mean is not known",
            conf_line(config, *names),
            subject=vm(config),
            reason=claims.reason,
        )
        return
    wrong = []
    for one in mapped:
        mine = [claim for claim in claims.value if claim.mapping == one.mapping]
        here = [claim for claim in mine if claim.bdfs]
        broken = [reason for claim in here if (reason := _broken_claim(snapshot, claim))]
        if not mine:
            wrong.append(f"there is no mapping {one.mapping}")
        elif not here:
            wrong.append(f"mapping {one.mapping} has no device on this node")
        elif len(broken) == len(here):
            wrong.append(f"mapping {one.mapping}: {broken[0]}")
    if wrong:
        yield verdict(
            "fail",
            f"VM {config.vmid} does not start: {listed(wrong)}",
            conf_line(config, *names),
            Excerpt(claims.source, "\n".join(claim.line for claim in claims.value if claim.line)),
            subject=vm(config),
            severity="high",
            fix=Fix(
                "Correct the mapping in the web interface (Datacenter, Resource Mappings), or name the address",
                ("lspci -Dnn -d 10de:", "cat /etc/pve/mapping/pci.cfg", f"qm config {vmid(config)} | grep hostpci"),
            ),
        )
    elif not snapshot.pci.functions.known:
        yield verdict(
            "unknown",
            f"Whether the mappings of VM {config.vmid} still fit the hardware is not known",
            conf_line(config, *names),
            claims,
            subject=vm(config),
            reason=snapshot.pci.functions.reason,
        )
    else:
        yield verdict(
            "pass",
            f"The mappings of VM {config.vmid} fit the devices of this node",
            conf_line(config, *names),
            claims,
            subject=vm(config),
        )


def _held_by_others(snapshot: Snapshot, config: VmConfig, lines: Sequence[Passed]) -> list[str]:
    """Return which of this VM's fixed devices another VM holds now."""
    held = snapshot.vm.reservations.value or {}
    found: dict[str, list[str]] = {}
    for one in lines:
        for path in one.line.paths:
            bdf = full_bdf(path)
            for function in [bdf] if "." in bdf else [f"{bdf}.{last}" for last in range(8)]:
                if held.get(function, config.vmid) != config.vmid:
                    found.setdefault(held[function], []).append(one.name)
    return [f"VM {other} holds the device of {listed(list(dict.fromkeys(names)))}" for other, names in found.items()]


# --- B10, B22: firmware ---------------------------------------------------------------------------------------------


def _largest_bar(function: PciFunction) -> int | None:
    sizes = [one.size_bytes for one in function.regions.values()]
    return max((size for size in sizes if size is not None), default=None)


@rule(
    "B10",
    "pve-bios-ovmf",
    title="The VM boots with OVMF, which places large BARs",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("pve.conf", "libvirt.domains", "sysfs.pci"),
    why=(
        "SeaBIOS may place large BARs above the end of the CPU's address space, without a word: memory that nobody can "
        "reach. OVMF without an EFI disk forgets its settings at every start."
    ),
    restart="vm_stop_start",
    automation="never",
    risk=f"{RISK_STOP} A guest that was installed for BIOS does not boot with OVMF: this is a new installation.",
    verify="ls -d /sys/firmware/efi   # in the guest",
    sources=("pve-docs qm-pci-passthrough", "measured on QEMU 7.2 with SeaBIOS and OVMF 2022.11"),
    without_role=True,
)
@each_vm
def _bios(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    bios = config.settings.get("bios")
    if bios is None and not config_is_whole(config, "bios"):
        yield absent(config, "bios", "The firmware")
        return
    large = number("mmio.large_bar_mib") << 20
    if bios == "ovmf":
        if "efidisk0" in config.settings:
            yield verdict("pass", f"VM {config.vmid} boots with OVMF", conf_line(config, "bios"), subject=vm(config))
        elif not config_is_whole(config, "efidisk0"):
            yield absent(config, "efidisk0", "The EFI disk")
        else:
            yield verdict(
                "warn",
                f"VM {config.vmid} has OVMF without an EFI disk: it forgets its boot entries at every start",
                conf_line(config, "bios", "efidisk0"),
                subject=vm(config),
                fix=stop_fix(
                    "B10",
                    config,
                    lines,
                    "Add an EFI disk without pre-enrolled Secure Boot keys",
                    f"qm set {vmid(config)} --efidisk0 STORAGE:1,efitype=4m,pre-enrolled-keys=0",
                    libvirt="<os firmware='efi'> brings an <nvram> of its own",
                ),
            )
        return
    displays = display_functions(lines)
    sizes = [_largest_bar(one) for one in displays]
    known = [size for size in sizes if size is not None]
    if known and max(known) >= large:
        yield verdict(
            "fail",
            f"VM {config.vmid} boots SeaBIOS with GPU memory windows of {max(known) // _GIB} GiB",
            conf_line(config, "bios"),
            Excerpt("sysfs.pci", "\n".join(f"{one.bdf} {_largest_bar(one)} bytes" for one in displays)),
            subject=vm(config),
            severity="high",
            fix=Fix(
                "Install the guest anew for UEFI, then change the firmware; do not change it under an installed guest",
                (
                    "# a guest that boots through EFI only (ls -d /sys/firmware/efi) can change at once:",
                    *change_vm(
                        "B10",
                        config,
                        f"qm set {vmid(config)} --bios ovmf",
                        f"qm set {vmid(config)} --efidisk0 STORAGE:1,efitype=4m,pre-enrolled-keys=0",
                        libvirt="<os firmware='efi'>, and no <loader>",
                    ),
                ),
                risk=f"{stop_risk(displays)} A guest that was installed for BIOS does not boot with OVMF.",
            ),
            explains=("B11",),
        )
    elif not known or len(known) < len(lines):
        yield verdict(
            "unknown",
            f"VM {config.vmid} boots SeaBIOS; whether its GPUs have large BARs is not known",
            conf_line(config, "bios"),
            subject=vm(config),
            reason=snapshot.pci.functions.reason or "the BAR sizes of the passed GPUs are not known on this host",
        )
    else:
        yield verdict(
            "pass",
            f"VM {config.vmid} boots SeaBIOS, and no GPU has a BAR of {large // _GIB} GiB or more",
            conf_line(config, "bios"),
            subject=vm(config),
        )


@rule(
    "B22",
    "ovmf-secureboot-keys",
    title="Secure Boot does not keep the NVIDIA modules out of the guest",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("pve.conf", "libvirt.domains", "mokutil.sb_state"),
    why=(
        "An EFI disk with pre-enrolled keys switches Secure Boot on: the guest's kernel then refuses NVIDIA modules "
        "that DKMS built, unless their key is enrolled."
    ),
    restart="vm_stop_start",
    automation="never",
    risk=f"{RISK_STOP} A new EFI disk loses the boot entries.",
    verify="mokutil --sb-state; modinfo -F signer nvidia   # in the guest",
    sources=("pve-docs qm", "recorded configuration of a GPU guest"),
    without_role=True,
)
@each_vm
def _secure_boot(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    disk = config.settings.get("efidisk0")
    if disk is None:
        if config.settings.get("bios", "seabios") != "ovmf" and config_is_whole(config, "efidisk0"):
            why = "the VM has no EFI disk"
            yield verdict("not_applicable", f"VM {config.vmid} has no Secure Boot", subject=vm(config), reason=why)
        elif config_is_whole(config, "efidisk0"):
            yield verdict("pass", f"VM {config.vmid} has no enrolled Secure Boot keys", subject=vm(config))
        else:
            yield absent(config, "efidisk0", "The EFI disk")
        return
    evidence = conf_line(config, "efidisk0")
    if config.option("efidisk0", "pre-enrolled-keys") not in ("1", "on", "yes", "true"):
        yield verdict("pass", f"VM {config.vmid} has no enrolled Secure Boot keys", evidence, subject=vm(config))
        return
    guest = guest_of(snapshot, config, fleet)
    state = guest.driver.secure_boot if guest else None
    smi = guest.driver.smi.value if guest else None
    if state is not None and state.value == "disabled":
        title = f"VM {config.vmid} has Secure Boot keys, and its guest has Secure Boot off"
        yield verdict("pass", title, evidence, state, subject=vm(config))
    elif state is not None and state.value == "enabled" and smi is not None and smi.state == "ok":
        title = f"VM {config.vmid} has Secure Boot on, and the guest's NVIDIA modules are accepted"
        yield verdict("info", title, evidence, state, subject=vm(config))
    else:
        refused = guest is not None and state is not None and state.value == "enabled"
        yield verdict(
            "warn",
            f"VM {config.vmid} has pre-enrolled Secure Boot keys: NVIDIA modules that DKMS builds need an enrolled key",
            evidence,
            *([state] if state is not None else []),
            subject=vm(config),
            severity="medium" if refused else None,
            fix=Fix(
                "In the guest, enrol the DKMS key (a console is needed at the next boot), or use signed modules",
                (
                    "# in the guest:",
                    "mokutil --sb-state",
                    "mokutil --import /var/lib/dkms/mok.pub   # Ubuntu: /var/lib/shim-signed/mok/MOK.der",
                    "# or switch Secure Boot off in the guest's firmware menu (press Esc while it starts)",
                ),
                restart="reboot",
            ),
        )


# --- B14, B15: options of a passed device ---------------------------------------------------------------------------


@rule(
    "B14",
    "pve-rombar",
    title="The ROM settings of passed GPUs can work",
    roles=("hypervisor",),
    severity="info",
    looks_at=("pve.conf", "libvirt.domains", "pve.rom_files"),
    why=(
        "A compute GPU needs no ROM in the guest: rombar=0 is fine and silences complaints about an invalid ROM. A "
        "romfile that is not in /usr/share/kvm stops the start."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="ls /usr/share/kvm; qm config VMID | grep romfile",
    sources=("qemu-server PCI.pm",),
    without_role=True,
)
@each_vm
def _rom(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    with_file = [one for one in lines if one.line.options.get("romfile")]
    known = snapshot.vm.rom_files
    if with_file and (config.manager == "libvirt" or known.value is None):
        yield verdict(
            "unknown",
            f"Whether VM {config.vmid} finds the ROM file of {listed([one.name for one in with_file])} is not known",
            conf_line(config, *(one.name for one in with_file)),
            subject=vm(config),
            reason=known.reason or "only /usr/share/kvm is listed",
        )
        return
    missing = [one for one in with_file if one.line.options["romfile"] not in (known.value or ())]
    off = [one.name for one in lines if one.line.flag("rombar") is False]
    if missing:
        files = listed([one.line.options["romfile"] for one in missing])
        yield verdict(
            "fail",
            f"VM {config.vmid} does not start: {files} is not in /usr/share/kvm",
            conf_line(config, *(one.name for one in missing)),
            known,
            subject=vm(config),
            severity="high",
            fix=stop_fix(
                "B14",
                config,
                lines,
                "Take the ROM file away: a compute GPU needs none",
                *(f"qm set {vmid(config)} --{one.name} '{without_option(_value(one), 'romfile')}'" for one in missing),
                libvirt="take <rom file='...'/> out of the hostdev",
            ),
        )
    elif off:
        title = f"{listed(off)} of VM {config.vmid} has no ROM in the guest, which is fine for compute"
        yield verdict("info", title, conf_line(config, *off), subject=vm(config))
    else:
        yield verdict("pass", f"No GPU of VM {config.vmid} has a ROM setting that stops it", subject=vm(config))


def _value(one: Passed) -> str:
    return one.line.line.partition(":")[2].strip()


@rule(
    "B15",
    "pve-driver-keep",
    title="Proxmox binds and resets the passed GPUs itself",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("pve.conf", "sysfs.pci"),
    why=(
        "With driver=keep Proxmox neither binds the device to vfio-pci nor resets it. That is right for virtual "
        "functions of a vendor driver, and wrong for a whole GPU."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="lspci -nnk -d 10de:   # Kernel driver in use: vfio-pci",
    sources=("qemu-server PCI.pm",),
    without_role=True,
)
@each_vm
def _driver_keep(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    kept = [one for one in lines if one.line.options.get("driver") == "keep"]
    whole = [one for one in kept if one.display is not None and not one.display.physfn]
    unsure = [one for one in kept if one.display is None]
    if whole:
        names = [one.name for one in whole]
        yield verdict(
            "warn",
            f"{listed(names)} of VM {config.vmid} has driver=keep, although it is a whole GPU",
            conf_line(config, *names),
            subject=vm(config),
            severity="medium",
            fix=stop_fix(
                "B15",
                config,
                lines,
                "Let Proxmox bind the GPU to vfio-pci",
                *(f"qm set {vmid(config)} --{one.name} '{without_option(_value(one), 'driver')}'" for one in whole),
                libvirt="<hostdev managed='yes'>",
            ),
            explains=("C7",),
        )
    elif unsure:
        yield verdict(
            "unknown",
            f"Whether {listed([one.name for one in unsure])} of VM {config.vmid} is a whole GPU is not known",
            conf_line(config, *(one.name for one in unsure)),
            subject=vm(config),
            reason=snapshot.pci.functions.reason or "the device is not in the list of PCI functions",
        )
    else:
        yield verdict("pass", f"Proxmox binds the GPUs of VM {config.vmid} itself", subject=vm(config))


# --- B16: an IOMMU in the guest -------------------------------------------------------------------------------------

_IOMMU_DEVICES = ("intel-iommu", "virtio-iommu-pci", "amd-iommu")


def _emulated_iommu(config: VmConfig, words: Sequence[str]) -> str:
    """Return the IOMMU that a VM's settings or QEMU's arguments give the guest, or ""."""
    named = config.option("machine", "viommu")
    if named:
        return named
    for flag, value in itertools.pairwise(words):
        if flag == "-device" and any(value.partition(",")[0] == one or f'"{one}"' in value for one in _IOMMU_DEVICES):
            return value.partition(",")[0]
    return ""


@rule(
    "B16",
    "pve-viommu",
    title="The guest has no emulated IOMMU between its GPUs",
    roles=("hypervisor", "guest"),
    severity="high",
    looks_at=("pve.conf", "libvirt.domains", "pve.running", "sysfs.iommu"),
    why=(
        "With an IOMMU in the guest every mapping is dynamic: QEMU maps the windows of the other GPUs only in its "
        "identity layout, its address width cuts large BARs, and CUDA rules out P2P through a translating IOMMU."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} Software in the guest that needs an IOMMU (nested VMs with devices) loses it.",
    verify="ls /sys/class/iommu   # in the guest: empty",
    sources=("CUDA programming guide", "QEMU hw/vfio"),
    without_role=True,
)
def _viommu(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if snapshot.role.value != "guest":
        yield from each_vm(_viommu_of_vm)(snapshot, fleet)
        return
    units = snapshot.iommu.units
    if has_no_gpu(snapshot):
        yield verdict("not_applicable", "This guest has no NVIDIA GPU", reason="no NVIDIA GPU on the PCI bus")
    elif units.value is None:
        yield verdict("unknown", "Whether this guest has an IOMMU is not known", reason=units.reason)
    elif not units.value:
        yield verdict("pass", "This guest has no IOMMU", units)
    elif delivery(snapshot) == "delivered":
        yield verdict(
            "info", f"This guest has an IOMMU ({listed(units.value)}), and peer data arrived all the same", units
        )
    else:
        several = len(snapshot.pci.gpus()) != 1
        yield verdict(
            "fail" if several else "warn",
            f"This guest has an emulated IOMMU ({listed(units.value)})"
            + (": P2P between its GPUs cannot be trusted" if several else ""),
            units,
            fix=Fix(
                "Take the IOMMU out of the VM on the hypervisor; with iommu=pt in the guest, test delivery first",
                (
                    "# on the hypervisor; VMID is this guest's id there",
                    "qm config VMID | grep -E '^machine|^args'   # machine: q35,viommu=...",
                ),
            ),
            explains=("D5", "D7") if several else (),
        )


def _viommu_of_vm(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    kind = _emulated_iommu(config, vm_arguments(config))
    running = _emulated_iommu(VmConfig(config.vmid), config.running_arguments.value or ())
    if not kind and not running:
        if "machine" not in config.settings and not config_is_whole(config, "machine"):
            yield absent(config, "machine", "Whether there is an emulated IOMMU")
        else:
            yield verdict("pass", f"VM {config.vmid} has no emulated IOMMU", subject=vm(config))
        return
    wanted = peers_wanted(snapshot, config)
    guest = guest_of(snapshot, config, fleet)
    if guest is not None and delivery(guest) == "delivered":
        title = f"VM {config.vmid} has an emulated IOMMU ({kind or running}), and peer data arrived all the same"
        yield verdict("info", title, conf_line(config, "machine"), subject=vm(config))
        return
    machine = without_option(config.settings.get("machine", "q35"), "viommu")
    yield verdict(
        "fail" if wanted else "warn",
        f"VM {config.vmid} {'has' if kind else 'still runs with'} an emulated IOMMU ({kind or running})"
        + (", which P2P does not go through" if wanted else ""),
        conf_line(config, "machine", *(["args"] if "args" in config.settings else [])),
        *([config.running_arguments] if not kind else []),
        subject=vm(config),
        fix=stop_fix(
            "B16",
            config,
            lines,
            "Take the emulated IOMMU out of the VM",
            f"qm set {vmid(config)} --machine '{machine}'   # and no -device *-iommu in its args",
            libvirt="remove <iommu .../>",
        ),
    )
