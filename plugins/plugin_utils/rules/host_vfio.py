"""Rules C of VFIO: what else drives a passed GPU, the boot console, resets and sleep."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..core.finding import Excerpt, Fix
from ..core.snapshot import CommandLine, MemoryRange, PciFunction, Snapshot
from ..parse.kernel_log import RefusedBar, refused_bars
from .common import (
    FOREIGN_DRIVERS,
    RISK_RESET,
    counted,
    has_no_gpu,
    kernel_version,
    listed,
    listed_items,
    log_excerpt,
)
from .hypervisor import set_kernel_parameters
from .knowledge import gpu_model, version, version_text
from .machines import Passed
from .passthrough import REBOOT_RISK, by_device, excerpt_of, log_notes, no_passed_gpu, passed_gpus, slot_of, vfio_ids
from .registry import Fleet, Verdict, rule, verdict

_YES = ("Y", "1", "y")


# --- C6, C8, C9: who takes the device first -------------------------------------------------------------------------

_KINDS = {"0403": "audio", "0c03": "USB", "0c80": "USB-C", "0300": "display", "0302": "display"}


@rule(
    "C6",
    "gpu-audio-same-group",
    title="The other functions of a passed GPU are not driven by the host",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("sysfs.pci", "lspci.vvv", "pve.conf", "modprobe.d"),
    why="A card's audio and USB functions share its IOMMU group: a host driver on one of them blocks the GPU.",
    restart="reboot",
    automation="ask",
    risk=f"{REBOOT_RISK} ids= takes every function with that id, also of a card that the host needs.",
    verify="lspci -nnk -d 10de:",
    sources=("pve-docs qm-pci-passthrough", "recorded hosts with four functions to a card"),
)
def _siblings(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = passed_gpus(snapshot)
    if not gpus:
        yield no_passed_gpu(snapshot)
        return
    functions = snapshot.pci.functions.value or {}
    for gpu, vmid, line in gpus:
        others = [
            one
            for bdf, one in functions.items()
            if slot_of(bdf) == slot_of(gpu.bdf) and bdf != gpu.bdf and not one.physfn
        ]
        yield _judge_siblings(snapshot, gpu, vmid, line, others)


def _judge_siblings(
    snapshot: Snapshot, gpu: PciFunction, vmid: str, line: Passed | None, others: Sequence[PciFunction]
) -> Verdict:
    subject = gpu.bdf
    if not others:
        if snapshot.pci.complete:
            return verdict(
                "not_applicable",
                f"{gpu.bdf} is the only function of its card",
                subject=subject,
                reason="the slot has no other function",
            )
        return verdict(
            "unknown",
            f"Whether the card of {gpu.bdf} has more functions is not known",
            subject=subject,
            reason="the list of PCI devices is only a part; options vfio-pci ids= must name every function of the slot",
        )
    shown = [excerpt_of(one, f"driver: {_driver(one)}") for one in (gpu, *others)]
    held = [one for one in others if one.driver not in (None, "", "vfio-pci")]
    unread = [one for one in others if one.driver is None]
    config = (snapshot.vm.configs.value or {}).get(vmid)
    waits = (
        line is not None and line.line.all_functions and config is not None and config.running.value is False
    ) or gpu.driver == ""
    if held:
        names = listed([f"{one.bdf} ({_KINDS.get(one.class_code or '', 'function')}, {one.driver})" for one in held])
        ids = ",".join(
            dict.fromkeys(f"{one.vendor}:{one.device}" for one in (gpu, *others) if one.vendor and one.device)
        )
        fix = Fix(
            "Bind all functions of the card to vfio-pci",
            (
                f"echo 'options vfio-pci ids={ids}' > /etc/modprobe.d/vfio.conf",
                *(f"echo 'softdep {one.driver} pre: vfio-pci' >> /etc/modprobe.d/vfio.conf" for one in held),
                "update-initramfs -u -k all",
                "reboot",
            ),
        )
        if waits:
            return verdict(
                "warn",
                f"{names} of a passed card belongs to the host until the VM starts",
                *shown,
                subject=subject,
                fix=fix,
            )
        return verdict(
            "fail",
            f"{gpu.bdf} is for a VM, but the host drives {names} of the same card",
            *shown,
            subject=subject,
            fix=fix,
            explains=("C5",),
        )
    if unread:
        bound = [one.bdf for one in (gpu, *others) if one.driver == "vfio-pci"]
        if not bound:
            return verdict(
                "unknown",
                f"Who drives the other functions of {gpu.bdf} is not known",
                *shown,
                subject=subject,
                reason="the driver of these functions was not read",
            )
        return verdict(
            "info",
            f"{listed(bound)} {'is' if len(bound) == 1 else 'are'} seen bound to vfio-pci; "
            f"{listed([one.bdf for one in unread])} of the same card {'is' if len(unread) == 1 else 'are'} not",
            *shown,
            subject=subject,
        )
    return verdict("pass", f"No host driver holds another function of {gpu.bdf}", *shown, subject=subject)


def _driver(one: PciFunction) -> str:
    return "not read" if one.driver is None else one.driver or "none"


@rule(
    "C8",
    "host-driver-blacklist",
    title="No graphics driver of the host can take a passed GPU first",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("modprobe.d", "proc.modules", "proc.cmdline", "sysfs.pci"),
    why=(
        "A driver that probes the card before vfio-pci leaves it in a state that a guest may not recover; the new "
        "nova_core driver took one of two cards on a 7.0 Proxmox kernel."
    ),
    restart="reboot",
    automation="ask",
    risk=f"{REBOOT_RISK} A blacklisted driver is missing for a card that the host itself shows its console on.",
    verify="lsmod | grep -E 'nouveau|nvidia|nova'; lspci -nnk -d 10de:",
    sources=("pve-docs qm-pci-passthrough", "aikitoria/open-gpu-kernel-modules #24"),
)
def _blacklist(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = passed_gpus(snapshot)
    if not gpus:
        yield no_passed_gpu(snapshot)
        return
    kernel = snapshot.kernel
    if kernel.modprobe.value is None:
        reason = kernel.modprobe.reason
        yield verdict("unknown", "Whether host drivers are kept off the passed GPUs is not known", reason=reason)
        return
    kept = _kept_off(kernel.modprobe.value, kernel.command_line.value or CommandLine())
    loaded = {name for name in kernel.modules.value or {} if name in (*FOREIGN_DRIVERS, "nvidia")}
    named = {_module(name) for gpu, _, _ in gpus for name in gpu.modules}
    possible = sorted((named & {*FOREIGN_DRIVERS, "nvidia"}) | loaded)
    free = [name for name in possible if name not in kept]
    # One that serves a GPU which stays on the host is there on purpose.
    serving = {one.driver for one in snapshot.pci.gpus() if one.bdf not in {gpu.bdf for gpu, _, _ in gpus}}
    threat = [name for name in free if name in loaded and name not in serving]
    if threat:
        yield verdict(
            "fail",
            f"{listed(threat)} {'is' if len(threat) == 1 else 'are'} loaded on this hypervisor and may take a passed "
            "GPU before vfio-pci",
            kernel.modules,
            kernel.modprobe,
            fix=_blacklist_fix(threat),
            explains=("C7",),
        )
    elif not kernel.modules.known and not named:
        reason = kernel.modules.reason
        yield verdict("unknown", "Which graphics drivers of the host could take a GPU is not known", reason=reason)
    elif [name for name in free if name not in serving]:
        rest = [name for name in free if name not in serving]
        yield verdict(
            "warn",
            f"Nothing keeps {listed(rest)} off the passed GPUs at the next boot",
            kernel.modprobe,
            *(excerpt_of(gpu, f"modules: {' '.join(gpu.modules)}") for gpu, _, _ in gpus[:1]),
            fix=_blacklist_fix(rest),
        )
    else:
        shown = f" ({listed(sorted(kept & {*FOREIGN_DRIVERS, 'nvidia'}))} kept off)" if kept else ""
        yield verdict("pass", f"No graphics driver of the host can take a passed GPU first{shown}", kernel.modprobe)


def _module(name: str) -> str:
    return name.replace("-", "_")


def _kept_off(modprobe: Sequence[str], line: CommandLine) -> set[str]:
    """Return the modules that are blacklisted, replaced by ``install M /bin/false``, or load after vfio-pci."""
    kept = {_module(item) for key in ("modprobe.blacklist", "module_blacklist") for item in listed_items(line, key)}
    for row in modprobe:
        words = row.split()
        if (len(words) >= 2 and words[0] == "blacklist") or (
            len(words) >= 3
            and ((words[0] == "install" and words[2].endswith(("/false", "/true"))) or _loads_after_vfio(words))
        ):
            kept.add(_module(words[1]))
    # nvidia_drm and the others load only with nvidia; nova_drm only with nova_core.
    return kept | ({"nova_drm"} if "nova_core" in kept else set())


def _loads_after_vfio(words: Sequence[str]) -> bool:
    after = words[words.index("pre:") + 1 :] if words[0] == "softdep" and "pre:" in words else ()
    return "vfio-pci" in after or "vfio_pci" in after


def _blacklist_fix(drivers: Sequence[str]) -> Fix:
    return Fix(
        "Let vfio-pci load first, or blacklist the drivers where the host needs none of them",
        (
            *(f"echo 'softdep {name} pre: vfio-pci' >> /etc/modprobe.d/vfio.conf" for name in drivers),
            f"# or: echo 'blacklist {drivers[0]}' >> /etc/modprobe.d/blacklist-gpu.conf",
            "update-initramfs -u -k all",
            "reboot",
        ),
    )


@rule(
    "C9",
    "vfio-early-bind",
    title="The initial RAM disk knows the VFIO configuration",
    roles=("hypervisor",),
    severity="low",
    looks_at=("modprobe.d", "modules_load.d", "initramfs", "kernel_log"),
    why="modprobe options count in the initial RAM disk, where drivers load first; it keeps a copy of its build.",
    restart="reboot",
    automation="ask",
    risk=REBOOT_RISK,
    verify="lsinitramfs /boot/initrd.img-$(uname -r) | grep -E 'vfio|modprobe.d'",
    sources=("pve-docs qm-pci-passthrough", "Debian initramfs-tools"),
)
def _early_bind(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    kernel = snapshot.kernel
    ids, asked = vfio_ids(snapshot), [one for one in kernel.modules_load.value or () if one.startswith("vfio")]
    virqfd = "vfio_virqfd" in asked and kernel_version(snapshot) >= version("kernel.vfio_virqfd_gone")
    if virqfd:
        yield verdict(
            "info",
            f"vfio_virqfd is asked for, which kernels from {version_text('kernel.vfio_virqfd_gone')} on have built in: "
            "the error in the log is harmless",
            kernel.modules_load,
            subject="vfio_virqfd",
        )
    if not ids and not asked:
        if kernel.modprobe.known and kernel.modules_load.known:
            yield verdict(
                "not_applicable",
                "No VFIO module is configured for the boot",
                kernel.modprobe,
                reason="Proxmox binds the devices when a VM starts",
            )
        else:
            missing = kernel.modprobe.reason or kernel.modules_load.reason
            yield verdict("unknown", "Which VFIO modules load at boot is not known", reason=missing)
        return
    disk = kernel.initramfs.value
    if disk is None:
        yield verdict("unknown", "What the initial RAM disk holds is not known", reason=kernel.initramfs.reason)
        return
    update = Fix("Build the initial RAM disk anew", ("update-initramfs -u -k all", "reboot"))
    stale = (
        disk.config_modified_at is not None
        and disk.modified_at is not None
        and disk.config_modified_at > disk.modified_at
    )
    if stale:
        yield verdict(
            "warn",
            f"{disk.newest_config} is newer than {disk.image}: the change does not count yet",
            kernel.initramfs,
            fix=update,
            explains=("C7",),
        )
    elif ids and disk.image and disk.modules is not None and "vfio_pci" not in disk.modules:
        early = sorted({"nouveau", "nvidia", "snd_hda_intel", "nova_core"} & set(disk.modules))
        if early:
            yield verdict(
                "warn",
                f"vfio-pci is not in the initial RAM disk, but {listed(early)} {'is' if len(early) == 1 else 'are'}",
                kernel.initramfs,
                fix=Fix(
                    "Add vfio-pci to the initial RAM disk",
                    ("echo vfio-pci >> /etc/initramfs-tools/modules", "update-initramfs -u -k all", "reboot"),
                ),
                explains=("C7",),
            )
        else:
            yield verdict("pass", "No driver in the initial RAM disk comes before vfio-pci", kernel.initramfs)
    elif disk.modified_at is None or not disk.image:
        reason = "only a listing of the disk was given, not its age"
        yield verdict("unknown", "Whether the initial RAM disk is up to date is not known", reason=reason)
    else:
        yield verdict("pass", "The initial RAM disk is newer than the VFIO configuration", kernel.initramfs)


# --- C11: the boot console ------------------------------------------------------------------------------------------

_FRAMEBUFFERS = ("BOOTFB", "simplefb", "efifb", "vesafb", "simple-framebuffer")


@rule(
    "C11",
    "boot-framebuffer-holds-bar",
    title="The host's boot console does not hold memory of a passed GPU",
    roles=("hypervisor",),
    severity="high",
    looks_at=("kernel_log", "proc.iomem", "sysfs.pci"),
    why="The firmware's framebuffer lies in the boot GPU's memory; VFIO cannot reserve the BAR while the host owns it.",
    restart="reboot",
    automation="ask",
    risk=f"{REBOOT_RISK} No local console is left: make sure that SSH or a BMC works first.",
    verify="dmesg | grep \"can't reserve\"; grep -E 'BOOTFB|efifb|simplefb' /proc/iomem   # wanted: nothing",
    sources=("siderolabs/talos #14356", "recorded Proxmox host with one GPU"),
    without_role=True,
)
def _framebuffer(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    refused: dict[str, list[RefusedBar]] = {}
    for one in refused_bars(log_notes(snapshot, "bar_reserved")):
        refused.setdefault(one.bdf, []).append(one)
    for bdf, bars in sorted(refused.items()):
        names = list(dict.fromkeys(f"BAR {one.bar}" for one in bars))
        yield verdict(
            "fail",
            f"VFIO cannot reserve {listed(names)} of {bdf} (at least {counted(len(bars), 'message')}): the boot "
            "framebuffer holds it",
            log_excerpt(snapshot, [one.line for one in bars]),
            subject=bdf,
            fix=_console_fix(snapshot),
        )
    gpus = [gpu for gpu, _, _ in passed_gpus(snapshot) if gpu.bdf not in refused]
    ranges = snapshot.pci.memory_map.value
    for gpu in gpus:
        holder = _holder(gpu, ranges or ())
        if holder is not None:
            yield verdict(
                "fail",
                f"The boot framebuffer ({holder.name}) lies in a BAR of {gpu.bdf}, which is meant for a VM",
                Excerpt("proc.iomem", f"{holder.start:x}-{holder.end:x} : {holder.name}"),
                excerpt_of(gpu, f"boot_vga: {gpu.boot_vga}"),
                subject=gpu.bdf,
                fix=_console_fix(snapshot),
            )
        elif ranges is not None:
            yield verdict("pass", f"No boot framebuffer lies in {gpu.bdf}", snapshot.pci.memory_map, subject=gpu.bdf)
        elif not refused:
            boot = " It is the boot GPU (boot_vga=1)." if gpu.boot_vga else ""
            yield verdict(
                "unknown",
                f"Whether the boot framebuffer holds memory of {gpu.bdf} is not known",
                subject=gpu.bdf,
                reason=(snapshot.pci.memory_map.reason or "/proc/iomem was not read") + boot,
            )
    if not refused and not gpus:
        yield no_passed_gpu(snapshot)


def _holder(gpu: PciFunction, ranges: Sequence[MemoryRange]) -> MemoryRange | None:
    for one in ranges:
        if not one.name.startswith(_FRAMEBUFFERS):
            continue
        for region in gpu.regions.values():
            start, size = region.address, region.size_bytes
            if start is not None and size and start <= one.start < start + size:
                return one
    return None


def _console_fix(snapshot: Snapshot) -> Fix:
    return Fix(
        "Let the host show its console on another card, an iGPU or the BMC; without one, keep the kernel off the "
        "framebuffer",
        set_kernel_parameters(snapshot, "add initcall_blacklist=sysfb_init"),
    )


# --- C19, C20: resets -----------------------------------------------------------------------------------------------

_GAVE_UP = re.compile(r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): not ready \d+ms after [^;]+; giving up")
_SLOW = re.compile(
    r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): timed out waiting for pending transaction; performing"
)


@rule(
    "C19",
    "gpu-reset-method",
    title="Passed GPUs come back after a reset",
    roles=("hypervisor",),
    severity="high",
    looks_at=("kernel_log", "sysfs.pci"),
    why=(
        "A VM start resets its GPUs. Some cards do not answer again after that until their host is power-cycled: "
        "reported for RTX 5090 and RTX PRO 6000, not for H100, B200 and 4090."
    ),
    restart="none",
    automation="never",
    risk="A reset method that does not suit the card may hang the bus: try it with no VM of value running.",
    verify="two stops and starts of the VM in a row; then: cat /sys/bus/pci/devices/BDF/current_link_width",
    sources=("NVIDIA open-gpu-kernel-modules #853", "CloudRift and guiahardware.es reports"),
    without_role=True,
)
def _reset_method(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    dead = by_device(log_notes(snapshot, "reset_failed"), _GAVE_UP)
    slow = by_device(log_notes(snapshot, "reset_slow"), _SLOW)
    functions = snapshot.pci.functions.value or {}
    for bdf, lines in sorted(dead.items()):
        yield verdict(
            "fail",
            f"{bdf} did not come back after a reset: the host needs a power cycle",
            log_excerpt(snapshot, lines),
            subject=bdf,
            fix=_reset_fix(bdf, functions.get(bdf)),
            explains=("C17", "A5"),
        )
    for bdf, lines in sorted(slow.items()):
        if bdf not in dead:
            yield verdict(
                "warn",
                f"{bdf} still had transactions open when it was reset: 'reset done' does not say that it works",
                log_excerpt(snapshot, lines),
                subject=bdf,
                severity="medium",
                fix=_reset_fix(bdf, functions.get(bdf)),
            )
    gpus = [gpu for gpu, _, _ in passed_gpus(snapshot)]
    if snapshot.role.value != "hypervisor" or not gpus:
        if not dead and not slow:
            yield no_passed_gpu(snapshot)
        return
    for gpu in gpus:
        model = gpu_model(gpu.device)
        if gpu.bdf in dead or gpu.bdf in slow:
            continue
        methods = f"reset methods: {' '.join(gpu.reset_methods)}" if gpu.reset_methods else "reset methods not read"
        if model is not None and model.stop_start_risk:
            yield verdict(
                "info",
                f"{gpu.bdf} ({model.name}) is of a model that was seen not to come back after a VM stop ({methods})",
                excerpt_of(gpu, methods),
                subject=gpu.bdf,
            )
        elif snapshot.kernel.log.value is not None:
            yield verdict(
                "pass" if snapshot.kernel.log.value.from_boot else "info",
                f"The kernel log names no failed reset of {gpu.bdf}",
                snapshot.kernel.log,
                subject=gpu.bdf,
            )
        else:
            yield verdict(
                "unknown",
                f"Whether {gpu.bdf} comes back after a reset is not known",
                subject=gpu.bdf,
                reason=snapshot.kernel.log.reason,
            )


def _reset_fix(bdf: str, function: PciFunction | None) -> Fix:
    now = " ".join(function.reset_methods) if function and function.reset_methods else "not read"
    return Fix(
        "Power-cycle the host (a reboot may not do), update VBIOS and firmware, then try another reset method",
        (
            f"cat /sys/bus/pci/devices/{bdf}/reset_method   # now: {now}",
            f"echo bus > /sys/bus/pci/devices/{bdf}/reset_method   # lost at a reboot; or flr: try one",
            "# shut the guest's driver down before the VM: systemctl stop the model services first",
        ),
        risk=RISK_RESET,
    )


@rule(
    "C20",
    "vfio-idle-d3",
    title="An unused GPU is not put to sleep by vfio-pci where resets fail",
    roles=("hypervisor",),
    severity="low",
    looks_at=("module_parameters", "kernel_log"),
    why="vfio-pci lets an unused card fall into D3; cards that fail their reset often fail on the way out of it.",
    restart="reboot",
    automation="ask",
    risk=f"{REBOOT_RISK} An unused card then draws some watts more.",
    verify="cat /sys/module/vfio_pci/parameters/disable_idle_d3",
    sources=("kernel drivers/vfio/pci", "CloudRift report"),
)
def _idle_d3(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    parameters = snapshot.kernel.parameters
    given = (parameters.value or {}).get("vfio_pci.disable_idle_d3")
    trouble = [line for line in log_notes(snapshot, "reset_failed") if _GAVE_UP.search(line.text)]
    trouble += [line for line in log_notes(snapshot, "reset_slow") if _SLOW.search(line.text)]
    shown = Excerpt("module_parameters", f"vfio_pci.disable_idle_d3 {given}")
    if has_no_gpu(snapshot) or (parameters.known and given is None):
        reason = "vfio_pci is not loaded" if parameters.known else "the machine has no NVIDIA GPU"
        yield verdict("not_applicable", "vfio-pci holds no unused GPU", reason=reason)
    elif given is None:
        yield verdict("unknown", "Whether vfio-pci lets unused GPUs sleep is not known", reason=parameters.reason)
    elif trouble and given not in _YES:
        yield verdict(
            "warn",
            "A passed device had trouble with resets, and vfio-pci lets unused devices fall into D3",
            shown,
            log_excerpt(snapshot, trouble),
            fix=Fix(
                "Keep unused devices awake",
                (
                    "echo 'options vfio-pci disable_idle_d3=1' >> /etc/modprobe.d/vfio.conf",
                    "update-initramfs -u -k all",
                    "reboot",
                ),
            ),
        )
    else:
        words = "keeps unused devices awake" if given in _YES else "lets unused devices sleep, and no reset failed"
        yield verdict("pass", f"vfio-pci {words}", shown)
