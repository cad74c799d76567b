"""Rules B: the configuration of a Proxmox VM that has GPUs passed through."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Snapshot, VmConfig
from .common import MENLO_GAIN, RISK_STOP, listed, stop_risk
from .join import guest_of
from .knowledge import names, number
from .machines import (
    CLIQUE,
    Passed,
    absent,
    change_vm,
    conf_line,
    config_is_whole,
    cpu_type,
    device_sets,
    display_functions,
    dotted,
    each_vm,
    hides_kvm,
    peers_wanted,
    reports_host_cpu,
    restart_vm,
    runs_as_asked,
    split_arguments,
    vm,
    vm_arguments,
    vmid,
    with_function,
    without_option,
)
from .registry import Fleet, Verdict, rule, verdict

# --- B1, B2, B3: whether KVM is visible -----------------------------------------------------------------------------


def _model_hides(snapshot: Snapshot, config: VmConfig) -> bool | str:
    """Whether a custom CPU model hides KVM, or why that is not known."""
    kind = cpu_type(config) or ""
    if not kind.startswith("custom-"):
        return False
    if not snapshot.vm.cpu_models.known:
        return f"CPU model {kind} is defined in /etc/pve/virtual-guest/cpu-models.conf, which was not read"
    model = (snapshot.vm.cpu_models.value or {}).get(kind)
    if model is None:
        return f"CPU model {kind} is not in /etc/pve/virtual-guest/cpu-models.conf"
    return _true(model.get("hidden"))


def _true(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "on", "yes", "true")


@rule(
    "B1",
    "pve-cpu-hidden",
    title="The VM does not hide KVM from its guest",
    roles=("hypervisor",),
    severity="high",
    looks_at=("pve.conf", "pve.running", "pve.cpu_models"),
    why="hidden=1 starts QEMU with kvm=off: the NVIDIA driver then sees no hypervisor and ignores a P2P clique.",
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="tr '\\0' '\\n' < /proc/$(cat /run/qemu-server/VMID.pid)/cmdline | grep -c kvm=off   # wanted: 0",
    sources=("qemu-server CPUConfig.pm", "club-3090 #890"),
    gain=MENLO_GAIN,
    without_role=True,
)
@each_vm
def _hidden(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    setting = config.option("cpu", "hidden")
    model = _model_hides(snapshot, config) if setting is None else False
    by_args = hides_kvm(vm_arguments(config))
    running = hides_kvm(config.running_arguments.value or ())
    implied = setting is None and any(one.line.flag("x-vga") for one in lines)
    number_, raw = vmid(config), config.settings.get("cpu", "host")
    if _true(setting) or model is True or by_args:
        where = "its args" if by_args else "its CPU model" if model is True else "cpu: hidden=1"
        cpu = without_option(raw, "hidden") + (",hidden=0" if model is True else "")
        command = (
            f"qm set {number_} --cpu '{cpu}'" if not by_args else f"# remove kvm=off from args: of VM {config.vmid}"
        )
        yield verdict(
            "fail",
            f"VM {config.vmid} hides KVM from its guest ({where}), which switches P2P grants off",
            conf_line(config, "cpu", *(["args"] if by_args else [])),
            subject=vm(config),
            fix=Fix(
                "Show KVM to the guest",
                change_vm("B1", config, command, libvirt="<features><kvm>: remove <hidden state='on'/>"),
                risk=stop_risk(display_functions(lines)),
            ),
        )
    elif isinstance(model, str):
        yield verdict(
            "unknown",
            f"Whether VM {config.vmid} hides KVM is not known",
            conf_line(config, "cpu"),
            subject=vm(config),
            reason=model,
        )
    elif running and not implied:
        yield verdict(
            "fail",
            f"VM {config.vmid} still runs with kvm=off, although its configuration does not ask for it any more",
            config.running_arguments,
            conf_line(config, "cpu"),
            subject=vm(config),
            fix=Fix(
                "Stop and start the VM: the old QEMU process keeps the old command line",
                (restart_vm(config),),
                risk=stop_risk(display_functions(lines)),
            ),
        )
    elif "cpu" not in config.settings and not config_is_whole(config):
        yield absent(config, "cpu", "Whether KVM is hidden in the cpu line")
    else:
        yield verdict(
            "pass",
            f"The cpu line of VM {config.vmid} does not hide KVM",
            conf_line(config, "cpu"),
            subject=vm(config),
        )


def _line_without(one: Passed, option: str) -> str:
    """Return the value of a hostpci line without this option."""
    return without_option(one.line.line.partition(":")[2].strip(), option)


@rule(
    "B2",
    "pve-xvga-implies-kvm-off",
    title="No compute GPU has x-vga=1, which silently hides KVM",
    roles=("hypervisor",),
    severity="high",
    looks_at=("pve.conf", "pve.running"),
    why="x-vga=1 on any hostpci line makes Proxmox start QEMU with kvm=off, unless the cpu line says hidden=0.",
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} The default display comes back: keep a console (serial or vga) while you change it.",
    verify="tr '\\0' '\\n' < /proc/$(cat /run/qemu-server/VMID.pid)/cmdline | grep -c kvm=off   # wanted: 0",
    sources=("qemu-server PCI.pm", "club-3090 #890"),
    gain=MENLO_GAIN,
    without_role=True,
)
@each_vm
def _x_vga(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    with_vga = [one for one in lines if one.line.flag("x-vga")]
    if not with_vga:
        yield verdict("pass", f"No GPU of VM {config.vmid} has x-vga=1", subject=vm(config))
        return
    what = listed([one.name for one in with_vga])
    explicit = config.option("cpu", "hidden")
    if explicit is None:
        explicit = (snapshot.vm.cpu_models.value or {}).get(cpu_type(config) or "", {}).get("hidden")
    number_ = vmid(config)
    console = (f"qm set {number_} --vga std",) if config.settings.get("vga", "none") == "none" else ()
    fix = Fix(
        "Remove x-vga=1 from compute GPUs and keep a console",
        change_vm(
            "B2",
            config,
            *(f"qm set {number_} --{one.name} '{_line_without(one, 'x-vga')}'" for one in with_vga),
            *console,
        ),
        risk=stop_risk(display_functions(lines))
        + " The default display comes back: keep a console while you change it.",
    )
    evidence = (conf_line(config, *(one.name for one in with_vga), "cpu"),)
    if explicit is not None and not _true(explicit):
        yield verdict(
            "warn",
            f"x-vga=1 on {what} of VM {config.vmid} is pointless for compute; hidden=0 keeps KVM visible",
            *evidence,
            subject=vm(config),
            fix=fix,
        )
        return
    if explicit is not None:
        yield verdict(
            "info",
            f"x-vga=1 is set on {what} of VM {config.vmid}; KVM is hidden by the cpu line already (rule B1)",
            *evidence,
            subject=vm(config),
            fix=fix,
        )
        return
    wanted = peers_wanted(snapshot, config)
    yield verdict(
        "fail" if wanted else "info" if wanted is False else "warn",
        f"x-vga=1 on {what} of VM {config.vmid} hides KVM from the guest"
        + ("" if wanted else ": harmful as soon as the VM has two GPUs"),
        *evidence,
        subject=vm(config),
        severity=None if wanted else "info" if wanted is False else "medium",
        fix=fix,
    )


@rule(
    "B3",
    "pve-hv-vendor-id",
    title="No Windows settings on the VM of a Linux guest",
    roles=("hypervisor",),
    severity="info",
    looks_at=("pve.conf",),
    why=(
        "A Hyper-V vendor id is harmless while KVM's own signature is visible, because the driver scans all of "
        "them; together with kvm=off it hides the hypervisor. A Windows ostype switches such signatures on."
    ),
    restart="vm_stop_start",
    automation="never",
    risk=RISK_STOP,
    verify="qm config VMID | grep -E 'ostype|hv-vendor-id'",
    sources=("NVIDIA open-gpu-kernel-modules hypervisor.c", "qemu-server"),
    without_role=True,
)
@each_vm
def _hv_vendor(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    vendor = config.option("cpu", "hv-vendor-id")
    in_args = "hv_vendor_id" in config.settings.get("args", "") or "hv-vendor-id" in config.settings.get("args", "")
    windows = config.settings.get("ostype", "").startswith("win")
    hidden = _true(config.option("cpu", "hidden")) or hides_kvm(vm_arguments(config))
    guest = guest_of(snapshot, config, fleet) if windows else None
    if windows and guest is not None:
        yield verdict(
            "warn",
            f"VM {config.vmid} has a Windows ostype, but {guest.host} runs Linux in it",
            conf_line(config, "ostype"),
            subject=vm(config),
            fix=Fix(
                "Use the Linux ostype",
                change_vm("B3", config, f"qm set {vmid(config)} --ostype l26"),
                risk=stop_risk(display_functions(lines)),
            ),
        )
    elif vendor is not None or in_args:
        cpu = without_option(config.settings.get("cpu", "host"), "hidden", "hv-vendor-id")
        yield verdict(
            "warn" if hidden else "info",
            f"VM {config.vmid} sets a Hyper-V vendor id"
            + (" together with a hidden KVM: the driver then sees no hypervisor" if hidden else ", which is harmless"),
            conf_line(config, "args" if in_args else "cpu"),
            subject=vm(config),
            fix=Fix(
                "Show KVM to the guest and drop the vendor id",
                change_vm(
                    "B3",
                    config,
                    f"qm set {vmid(config)} --cpu '{cpu}'",
                    libvirt="<features>: remove <kvm><hidden state='on'/> and <hyperv><vendor_id .../>",
                ),
                risk=stop_risk(display_functions(lines)),
            )
            if hidden
            else None,
        )
    elif windows:
        yield verdict(
            "unknown",
            f"VM {config.vmid} has a Windows ostype; whether Linux runs in it is not known",
            conf_line(config, "ostype"),
            subject=vm(config),
            reason="the guest of this VM is not among the audited hosts",
        )
    else:
        yield verdict("pass", f"VM {config.vmid} has no Hyper-V vendor id and no Windows ostype", subject=vm(config))


# --- B4, B5: the CPU ------------------------------------------------------------------------------------------------


@rule(
    "B4",
    "pve-cpu-host",
    title="The VM has the host's CPU type",
    roles=("hypervisor",),
    severity="high",
    looks_at=("pve.conf", "pve.cpu_models"),
    why=(
        "Other CPU types have 40 address bits, too few for several large GPUs; many lack AVX2 or AVX-512 for the "
        "engine; the driver allows peer reads only on CPUs that it recognises; and NCCL's exception for AMD needs "
        "the real vendor."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} No live migration to other CPUs, which passed-through devices exclude anyway.",
    verify="grep -m1 'model name' /proc/cpuinfo   # in the guest: the host's model",
    sources=("qemu-server CPUConfig.pm", "NVIDIA open-gpu-kernel-modules p2p_caps.c", "club-3090 #584"),
    without_role=True,
)
@each_vm
def _cpu_host(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    kind = cpu_type(config)
    if kind is None and not config_is_whole(config):
        yield absent(config, "cpu", "The CPU type")
        return
    host = reports_host_cpu(snapshot, config)
    if host is True:
        yield verdict("pass", f"VM {config.vmid} has the host's CPU", conf_line(config, "cpu"), subject=vm(config))
        return
    if isinstance(host, str):
        yield verdict(
            "unknown",
            f"Whether VM {config.vmid} has the host's CPU is not known",
            conf_line(config, "cpu"),
            subject=vm(config),
            reason=host,
        )
        return
    default = "qemu64" if config.manager == "libvirt" else "kvm64"
    shown = kind or f"{default}, the default"
    lacking = " and lacks AVX2" if (kind or "kvm64") in names("cpu.types_without_avx2") else ""
    wanted = peers_wanted(snapshot, config)
    rest = [part for part in config.settings.get("cpu", "").split(",")[1:] if not part.startswith("reported-model")]
    cpu = ",".join(["host", *rest])
    copied = kind == "host-model"
    yield verdict(
        "fail" if wanted and not copied else "warn",
        f"VM {config.vmid} has CPU type {shown}, which is not the host's{lacking}",
        conf_line(config, "cpu"),
        subject=vm(config),
        severity=None if wanted and not copied else "medium",
        fix=Fix(
            "Give the guest the host's CPU",
            change_vm(
                "B4",
                config,
                f"qm set {vmid(config)} --cpu '{cpu}'",
                libvirt="<cpu mode='host-passthrough' check='none'/>",
            ),
            risk=stop_risk(display_functions(lines)),
        ),
    )


# --- B6, B7, B8: machine type and hostpci lines ---------------------------------------------------------------------


@rule(
    "B6",
    "pve-machine-q35",
    title="The VM has the q35 machine type",
    roles=("hypervisor",),
    severity="high",
    looks_at=("pve.conf",),
    why="PCIe config space, with link information and extended capabilities, exists only on q35.",
    restart="vm_stop_start",
    automation="never",
    risk=(
        f"{RISK_STOP} Network and disk names and PCI addresses change inside the guest: match interfaces by MAC "
        "address first, and keep console access."
    ),
    verify="cat /sys/class/dmi/id/product_name   # in the guest: Standard PC (Q35 ...)",
    sources=("pve-docs qm-pci-passthrough",),
    without_role=True,
)
@each_vm
def _machine(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    machine = config.settings.get("machine")
    if machine is None and not config_is_whole(config):
        yield absent(config, "machine", "The machine type")
        return
    if machine is not None and "q35" in (config.option("machine", "type", "type") or ""):
        yield verdict("pass", f"VM {config.vmid} is a q35 machine", conf_line(config, "machine"), subject=vm(config))
        return
    with_pcie = [one for one in lines if one.line.flag("pcie")]
    yield verdict(
        "fail",
        f"VM {config.vmid} is an i440fx machine"
        + (": it does not start with pcie=1" if with_pcie else ", which has no PCIe"),
        conf_line(config, "machine", *(one.name for one in with_pcie)),
        subject=vm(config),
        fix=Fix(
            "Change the machine type, with the console open",
            change_vm(
                "B6",
                config,
                f"qm set {vmid(config)} --machine q35",
                libvirt="<type machine='q35'>; remove all <controller type='pci'> and the guest's <address type='pci'>",
            ),
        ),
        explains=("B7",),
    )


@rule(
    "B7",
    "pve-hostpci-pcie1",
    title="Every GPU has a PCIe port of its own",
    roles=("hypervisor",),
    severity="high",
    looks_at=("pve.conf",),
    why=(
        "Without pcie=1 the GPU lands behind a conventional PCI bridge: the guest sees no link, and NCCL reads no "
        "speed."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="lspci -tv   # in the guest: each GPU below a port of its own",
    sources=("qemu-server PCI.pm", "pve-docs qm-pci-passthrough"),
    without_role=True,
)
@each_vm
def _pcie(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    # libvirt itself puts a device without an address on a root port of a q35 machine.
    placed = config.manager == "libvirt"
    bare = [one for one in lines if not one.line.flag("pcie") and not (placed and "pcie" not in one.line.options)]
    machine = config.settings.get("machine", "")
    if not bare and not config_is_whole(config, "hostpci~"):
        yield verdict(
            "unknown",
            f"The GPU lines of VM {config.vmid} that were read have pcie=1; there may be others",
            conf_line(config, *(one.name for one in lines)),
            subject=vm(config),
            reason="the configuration is only an excerpt, so other hostpci lines may be missing",
        )
        return
    if not bare:
        yield verdict(
            "pass",
            f"Every GPU of VM {config.vmid} has {'a PCIe port' if placed else 'pcie=1'}",
            conf_line(config, *(one.name for one in lines)),
            subject=vm(config),
        )
        return
    what = listed([one.name for one in bare])
    if "q35" not in machine and not config_is_whole(config):
        yield verdict(
            "unknown",
            f"{what} of VM {config.vmid} has no pcie=1; whether the machine type has PCIe is not known",
            conf_line(config, *(one.name for one in bare)),
            subject=vm(config),
            reason="the configuration is only an excerpt and holds no line machine:",
        )
        return
    if "q35" not in machine:
        yield verdict(
            "not_applicable",
            f"VM {config.vmid} has no PCIe at all",
            subject=vm(config),
            reason="pcie=1 needs the q35 machine type (rule B6)",
        )
        return
    sure = [one for one in bare if one.gpu]
    if not sure and len(bare) < len(lines):
        yield verdict(
            "unknown",
            f"{what} of VM {config.vmid} has no pcie=1; whether it is a GPU is not known",
            conf_line(config, *(one.name for one in bare)),
            subject=vm(config),
            reason=snapshot.pci.functions.reason or "the PCI devices of the host are not known",
        )
        return
    number_ = vmid(config)
    yield verdict(
        "fail",
        f"{what} of VM {config.vmid} has no {'PCIe port' if placed else 'pcie=1'}, so the guest sees no PCIe link",
        conf_line(config, *(one.name for one in bare)),
        subject=vm(config),
        fix=Fix(
            "Give each GPU a PCIe root port",
            change_vm(
                "B7",
                config,
                *(f"qm set {number_} --{one.name} '{_line_without(one, 'pcie')},pcie=1'" for one in bare),
                libvirt="the <address> of each hostdev: the bus of a <controller model='pcie-root-port'> of its own",
            ),
            risk=stop_risk(display_functions(lines)),
        ),
    )


@rule(
    "B8",
    "pve-hostpci-function",
    title="QEMU properties reach the GPUs that they are meant for",
    roles=("hypervisor",),
    severity="critical",
    looks_at=("pve.conf", "pve.running", "sysfs.pci"),
    why=(
        "A hostpci line without a function passes the whole slot. With more than one function QEMU names the "
        "devices hostpciN.0, hostpciN.1, which -set cannot address: the start ends with: there is no device "
        "hostpciN defined."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} The card's audio function stays on the host: harmless while no host driver uses it.",
    verify="qm showcmd VMID --pretty | grep -oE 'id=hostpci[0-9.]+'   # no id with a dot",
    sources=("measured on QEMU 7.2", "qemu-server cfg2cmd tests", "club-3090 #890"),
    without_role=True,
)
@each_vm
def _function(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    targets = {one.index for one in device_sets(vm_arguments(config))}
    whole = [one for one in lines if dotted(one) is not False]
    if not whole:
        yield verdict(
            "pass",
            f"Every GPU of VM {config.vmid} is one function with an undotted QEMU id",
            conf_line(config, *(one.name for one in lines)),
            subject=vm(config),
        )
        return
    hit = [one for one in whole if one.line.index in targets]
    running = config.running_arguments.value
    names_ = listed([one.name for one in hit or whole])
    if hit and running and runs_as_asked(config):
        yield verdict(
            "pass",
            f"VM {config.vmid} runs with its -set properties, so QEMU knows {names_}",
            config.running_arguments,
            subject=vm(config),
        )
    elif hit:
        unsure = any(dotted(one) is None for one in hit)
        yield verdict(
            "fail",
            f"The -set properties of VM {config.vmid} do not reach {names_}: no function of the slot is named there"
            + (" (only a card with a single function would work so)" if unsure else ", so the VM does not start"),
            conf_line(config, *(one.name for one in hit), "args"),
            subject=vm(config),
            fix=Fix(
                "Name function 0; this is right for cards with one function too",
                change_vm(
                    "B8",
                    config,
                    *(
                        f"qm set {vmid(config)} --{one.name} '{with_function(one)}'"
                        for one in hit
                        if not one.line.mapping
                    ),
                ),
                risk=stop_risk(display_functions(lines)),
            ),
            explains=("D3",),
        )
    elif any(one.line.mapping and not one.functions for one in whole):
        yield verdict(
            "unknown",
            f"Which devices {names_} of VM {config.vmid} passes is not known",
            conf_line(config, *(one.name for one in whole)),
            subject=vm(config),
            reason="the resource mapping could not be resolved: /etc/pve/mapping/pci.cfg was not read or lacks it",
        )
    else:
        yield verdict(
            "info",
            f"{names_} of VM {config.vmid} passes all functions of its slot: a later -set device.{whole[0].name} "
            "would not match",
            conf_line(config, *(one.name for one in whole)),
            subject=vm(config),
        )


# --- B12, B13: what runs, and whether it can start ------------------------------------------------------------------

_PENDING_KEYS = re.compile(r"cpu|machine|args|hostpci\d+|memory|numa\d*|bios|balloon|hugepages")


@rule(
    "B12",
    "pve-pending-not-applied",
    title="The VM runs with the configuration that it has",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("pve.qm_pending", "pve.conf", "pve.running"),
    why="A running QEMU process keeps the command line it was started with; a reboot inside the guest changes nothing.",
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="qm pending VMID; tr '\\0' '\\n' < /proc/$(cat /run/qemu-server/VMID.pid)/cmdline",
    sources=("qemu-server", "club-3090 #890"),
)
@each_vm
def _pending(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    keys = sorted({key for key in config.pending or () if _PENDING_KEYS.fullmatch(key)})
    deletes = sorted({key for key in config.pending_deletes if _PENDING_KEYS.fullmatch(key)})
    look = f"virsh dumpxml --inactive {vmid(config)}" if config.manager == "libvirt" else f"qm pending {vmid(config)}"
    fix = Fix(
        "Stop and start the VM so that it runs what is configured: a reboot inside the guest does not",
        (look, restart_vm(config)),
        risk=stop_risk(display_functions(lines)),
    )
    inside = _rebooted_inside(guest_of(snapshot, config, fleet), config)
    if keys or deletes:
        changes = [*keys, *(f"{key} (removed)" for key in deletes)]
        shown = [f"new {key}: {(config.pending or {}).get(key)}" for key in keys] + [f"del {key}" for key in deletes]
        yield verdict(
            "warn",
            f"VM {config.vmid} has changes that wait for a stop and start: {listed(changes)}{inside.words}",
            Excerpt("pve.qm_pending", "\n".join(shown)),
            *inside.evidence,
            subject=vm(config),
            severity="medium",
            fix=fix,
        )
        return
    if config.running.value is False:
        yield verdict(
            "pass", f"VM {config.vmid} is stopped: it will start as configured", config.running, subject=vm(config)
        )
        return
    arguments = config.running_arguments
    if arguments.known:
        different = _differences(config, lines)
        if different:
            yield verdict(
                "warn",
                f"VM {config.vmid} does not run as configured: {listed(different)}{inside.words}",
                arguments,
                *inside.evidence,
                conf_line(config, *(key for key in ("args", "cpu", "machine") if key in config.settings)),
                subject=vm(config),
                severity="medium",
                fix=fix,
            )
        else:
            yield verdict("pass", f"VM {config.vmid} runs as it is configured", arguments, subject=vm(config))
        return
    if config.pending is not None:
        yield verdict("pass", f"VM {config.vmid} has no pending changes", subject=vm(config))
        return
    yield verdict(
        "unknown",
        f"Whether VM {config.vmid} runs as configured is not known",
        subject=vm(config),
        reason=f"neither qm pending nor the command line of its process was read ({arguments.reason})",
    )


@dataclass(frozen=True)
class _Inside:
    """What tells that a guest was only rebooted from inside: words for a title, and the times."""

    words: str = ""
    evidence: tuple[Excerpt, ...] = ()


def _rebooted_inside(guest: Snapshot | None, config: VmConfig) -> _Inside:
    """Compare the guest's boot time with the start of its QEMU process, which a reboot from inside does not end."""
    started, changed = config.started_at, config.changed_at
    booted = guest.machine.booted_at if guest is not None else None
    if guest is None or booted is None or booted.value is None or started.value is None:
        return _Inside()
    if booted.value - started.value < number("vm.reboot_inside_s"):
        return _Inside()
    rows = [f"QEMU process started {_utc(started.value)}"]
    rows += [f"configuration changed {_utc(changed.value)}"] if changed.value is not None else []
    rows.append(f"{guest.host} booted {_utc(booted.value)}")
    words = f"; {guest.host} was only rebooted from inside, which keeps the old QEMU process"
    return _Inside(words, (Excerpt(started.source, "\n".join(rows)),))


def _utc(seconds: int) -> str:
    """Return a time of day in UTC; a number that is none as it is."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="minutes")
    except (ValueError, OverflowError, OSError):
        return f"at {seconds} s"


def _differences(config: VmConfig, lines: Sequence[Passed]) -> list[str]:
    running = list(config.running_arguments.value or ())
    text = "\n".join(running)
    found = []
    if not runs_as_asked(config):
        found.append("its args are not on the command line")
    asked = {one.index for one in device_sets(vm_arguments(config)) if one.name == CLIQUE}
    stale = {one.index for one in device_sets(running) if one.name == CLIQUE} - asked
    if stale and "args" in config.settings:
        found.append("it still has a clique that is configured no more")
    kind = cpu_type(config)
    cpu = next((value for flag, value in itertools.pairwise(running) if flag == "-cpu"), "")
    hides = _true(config.option("cpu", "hidden")) or any(one.line.flag("x-vga") for one in lines)
    if (
        hides_kvm(running)
        and not hides
        and not hides_kvm(vm_arguments(config))
        and not (kind or "").startswith("custom-")
    ):
        found.append("it runs with kvm=off")
    machine = next((value for flag, value in itertools.pairwise(running) if flag == "-machine"), "")
    wanted = config.option("machine", "type", "type") or ""
    if machine and wanted and ("q35" in machine) != ("q35" in wanted):
        found.append(f"it runs as machine {machine.split(',')[0]}, not {wanted}")
    if cpu and kind and not kind.startswith("custom-") and cpu.split(",")[0] != kind and "-" not in kind:
        found.append(f"it runs with cpu {cpu.split(',')[0]}, not {kind}")
    missing = [one.name for one in lines if not re.search(rf"\bid(?:=|\"\s*:\s*\"){one.name}\b", text)]
    if missing and running:
        found.append(f"{listed(missing)} is not among its devices")
    return found


_TYPOGRAPHIC = re.compile("[\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2013\u2014\u2212\u00a0]")


@rule(
    "B13",
    "pve-args-syntax",
    title="The extra QEMU arguments can be understood",
    roles=("hypervisor",),
    severity="high",
    looks_at=("pve.conf",),
    why="Bad arguments stop the VM from starting. If the only way in is through that guest, you are locked out.",
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="qm showcmd VMID --pretty",
    sources=("measured on QEMU 7.2", "qemu-server QemuServer.pm"),
    without_role=True,
)
@each_vm
def _args_syntax(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    raw = config.settings.get("args")
    if raw is None:
        yield verdict(
            "not_applicable",
            f"VM {config.vmid} has no arguments of its own",
            subject=vm(config),
            reason="there is no line args:",
        )
        return
    words = split_arguments(raw)
    complaints = []
    if "args" in config.duplicates:
        complaints.append("there are two args lines, and only the last one counts")
    if _TYPOGRAPHIC.search(raw):
        complaints.append("there are typographic quotes or dashes in it")
    if words is None:
        complaints.append("a quote is not closed")
    else:
        complaints += _bad_words(words, config)
    by_set = config.manager == "libvirt" and 'value="-set"' in config.lines.get("args", "")
    if by_set and not (config.running_arguments.known and runs_as_asked(config)):
        complaints.append("libvirt writes devices as JSON, which -set cannot address (use <qemu:override>)")
    if complaints:
        yield verdict(
            "fail",
            f"The args of VM {config.vmid} are wrong: {listed(complaints)}",
            conf_line(config, "args"),
            subject=vm(config),
            fix=Fix(
                "Write the arguments again, on one line, and look at the result before the VM is stopped",
                (
                    f"cp -a /etc/pve/qemu-server/{vmid(config)}.conf /root/{vmid(config)}.conf.before-B13",
                    f"qm set {vmid(config)} --args '...'",
                    f"qm showcmd {vmid(config)} --pretty",
                ),
            ),
            explains=("D3",),
        )
        return
    own = [word for word in words or () if CLIQUE not in word and word not in ("-set", "-global")]
    yield verdict(
        "info" if own else "pass",
        f"The args of VM {config.vmid} are well formed" + (": keep them when you add others" if own else ""),
        conf_line(config, "args"),
        subject=vm(config),
    )


def _bad_words(words: Sequence[str], config: VmConfig) -> list[str]:
    complaints = []
    known = {one.index for one in config.hostpci}
    json_ids = set(re.findall(r'"id"\s*:\s*"([^"]+)"', " ".join(one for one in words if one.startswith("{"))))
    for position, word in enumerate(words):
        if word not in ("-set", "--set"):
            continue
        value = words[position + 1] if position + 1 < len(words) else ""
        if not re.fullmatch(r"[^.=\s]+\.[^.=\s]+\.[^=\s]+=.*", value):
            complaints.append(f"-set is not followed by group.id.property=value ({value or 'nothing'})")
            continue
        group, device, rest = value.split(".", 2)
        target = re.fullmatch(r"host(?:pci|dev)(\d+)", device)
        if group == "device" and target and int(target.group(1)) not in known:
            complaints.append(f"-set names {device}, but there is no such line")
        if group == "device" and target and re.match(r"\d+\.", rest):
            complaints.append(f"-set cannot address the dotted id {device}.{rest.split('.')[0]}")
        if group == "device" and device in json_ids:
            complaints.append(f"-set cannot address {device}, which a JSON -device defines")
    return list(dict.fromkeys(complaints))
