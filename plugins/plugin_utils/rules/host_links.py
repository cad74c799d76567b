"""Rules C17, C24 and E4: the links of the GPUs, and what slows them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Gpu, PciFunction, Snapshot
from .common import has_no_gpu, log_excerpt
from .hypervisor import set_kernel_parameters
from .knowledge import number
from .passthrough import (
    HOST_ROLES,
    by_device,
    excerpt_of,
    host_gpus,
    log_notes,
    no_gpu,
    slot_of,
)
from .registry import Fleet, Verdict, rule, verdict

# --- C17, E4: links ---------------------------------------------------------------------------------------------------


def _under_load(gpu: Gpu | None) -> bool | None:
    """Whether a GPU worked when it was read, so that its link speed counts. None: not known."""
    if gpu is None:
        return None
    if gpu.pstate in ("P0", "P1"):
        return True
    if gpu.utilization_percent is not None and gpu.utilization_percent > number("pci.busy_utilization_percent"):
        return True
    return False if gpu.pstate is not None or gpu.utilization_percent is not None else None


def _limits(snapshot: Snapshot, gpu: PciFunction) -> tuple[float | None, int | None, PciFunction | None]:
    """Return (speed, width, port): what both ends of the link can do, as far as it is known."""
    port = (snapshot.pci.functions.value or {}).get(gpu.parent or "")
    speeds = [one.link_max_speed_gt for one in (gpu, port) if one is not None and one.link_max_speed_gt]
    widths = [one.link_max_width for one in (gpu, port) if one is not None and one.link_max_width]
    return min(speeds, default=None), min(widths, default=None), port


_RETRAIN = re.compile(r"pcieport ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): ")
_RESEAT = Fix(
    "Reseat the card, its riser and cables; check the slot's lanes and its bifurcation in the firmware setup",
    (
        "cat /sys/bus/pci/devices/BDF/current_link_width /sys/bus/pci/devices/BDF/max_link_width",
        "# switch the machine off before touching the card",
    ),
)
_POWER_CYCLE = Fix(
    "Power-cycle the host: take it off power for ten seconds; then look at power, riser and slot of the card",
    ("poweroff   # then switch it on again; a reboot may not bring the card back", "lspci -nn -d 10de:"),
)


@rule(
    "C17",
    "host-link",
    title="Each GPU's link has the width and the speed that both ends offer",
    roles=HOST_ROLES,
    severity="high",
    looks_at=("sysfs.pci", "lspci.vvv", "nvidia_smi.q", "kernel_log"),
    why="Half the lanes halve every copy over the bus; a card whose registers read all ones is gone.",
    restart="reboot",
    automation="never",
    risk="Work on the hardware: the machine is off for it.",
    verify="lspci -vvv -s BDF | grep -E 'LnkCap:|LnkSta:'   # under load",
    sources=("rtx6kpro captures", "club-3090", "recorded host with a dead card"),
    without_role=True,
)
def _links(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    functions = snapshot.pci.functions.value or {}
    retrained = by_device(log_notes(snapshot, "retraining"), _RETRAIN)
    gone = [
        one for bdf, one in functions.items() if one.off_bus and (one.is_gpu or one.vendor in (None, "ffff", "10de"))
    ]
    for slot in dict.fromkeys(slot_of(one.bdf) for one in gone):
        first = next(one for one in gone if slot_of(one.bdf) == slot)
        yield _off_the_bus(snapshot, first)
    dead = {slot_of(one.bdf) for one in gone}
    gpus = [one for one in host_gpus(snapshot) if slot_of(one.bdf) not in dead and not one.physfn]
    smi = {gpu.bus_id: gpu for gpu in snapshot.gpus.value or ()}
    for gpu in gpus:
        yield _judge_link(snapshot, gpu, smi.get(gpu.bdf))
    if not gone:
        for bdf, lines in sorted(retrained.items()):
            yield verdict(
                "warn",
                f"The link of port {bdf} failed to train again",
                log_excerpt(snapshot, lines),
                subject=bdf,
                severity="medium",
                fix=_RESEAT,
            )
    if not gpus and not gone and not retrained:
        yield no_gpu(snapshot)


def _off_the_bus(snapshot: Snapshot, one: PciFunction) -> Verdict:
    told = [f"link width register: {one.link_raw_width}"] if one.link_raw_width else []
    told += [f"header type {one.header_type}"] if one.header_type == "7f" else []
    lines = log_notes(snapshot, "retraining")
    return verdict(
        "fail",
        f"{one.bdf} is off the bus: its registers read all ones (a 'reset done' in the log does not say otherwise)",
        excerpt_of(one, *(told or ["configuration space: ff"])),
        *([log_excerpt(snapshot, lines)] if lines else []),
        subject=one.bdf,
        severity="critical",
        fix=_POWER_CYCLE,
        explains=("C18", "C19", "A5", "F1", "F16"),
    )


def _judge_link(snapshot: Snapshot, gpu: PciFunction, told: Gpu | None) -> Verdict:
    speed, width, port = _limits(snapshot, gpu)
    subject = gpu.bdf
    now = (
        f"link {gpu.link_speed_gt or '?'} GT/s x{gpu.link_width or '?'}, both ends: {speed or '?'} GT/s x{width or '?'}"
    )
    shown = [excerpt_of(gpu, now)]
    if port is not None:
        shown.append(excerpt_of(port, f"max {port.link_max_speed_gt or '?'} GT/s x{port.link_max_width or '?'}"))
    if gpu.link_width is None or width is None:
        return verdict(
            "unknown",
            f"The link width of {gpu.bdf} is not known",
            subject=subject,
            reason="lspci was not run as root" if gpu.access_denied else "its link registers were not read",
        )
    if gpu.link_width < width:
        return verdict(
            "fail",
            f"{gpu.bdf} runs on {gpu.link_width} of {width} lanes",
            *shown,
            subject=subject,
            fix=_RESEAT,
            explains=("D8", "D9"),
        )
    loaded = _under_load(told)
    slow = gpu.link_speed_gt is not None and speed is not None and gpu.link_speed_gt < speed
    if slow and loaded:
        return verdict(
            "fail",
            f"{gpu.bdf} runs at {gpu.link_speed_gt:g} GT/s under load; both ends offer {speed:g} GT/s",
            *shown,
            subject=subject,
            severity="medium",
            fix=_RESEAT,
            explains=("D8", "D9"),
        )
    at_speed = "" if slow or gpu.link_speed_gt is None else f" at {gpu.link_speed_gt:g} GT/s"
    rest = "; its speed was read idle and is not judged" if slow else ""
    return verdict("pass", f"{gpu.bdf} runs on all {width} lanes{at_speed}{rest}", *shown, subject=subject)


@rule(
    "E4",
    "idle-link-trap",
    title="Link speeds are read while the GPUs work",
    severity="info",
    looks_at=("nvidia_smi.q", "nvidia_smi.query_gpu", "sysfs.pci", "lspci.vvv"),
    why="An idle GPU runs its link at 2.5 GT/s to save power: lspci calls that downgraded, and it is no fault.",
    verify="put load on the GPU for two seconds, then read: nvidia-smi -q | grep -A12 'GPU Link Info'",
    sources=("RTX PRO 6000 capture", "bart #323"),
)
def _idle_links(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if snapshot.role.value == "guest":
        reason = "a guest's link registers are made up by QEMU: rule F22"
        yield verdict("not_applicable", "A guest sees no link", reason=reason)
        return
    gpus = [one for one in host_gpus(snapshot) if not one.off_bus and not one.physfn]
    if not gpus:
        yield no_gpu(snapshot)
        return
    smi = {gpu.bus_id: gpu for gpu in snapshot.gpus.value or ()}
    for gpu in gpus:
        told = smi.get(gpu.bdf)
        speed, _, _ = _limits(snapshot, gpu)
        loaded = _under_load(told)
        if gpu.link_speed_gt is None or speed is None:
            yield verdict(
                "unknown",
                f"The link speed of {gpu.bdf} is not known",
                subject=gpu.bdf,
                reason="its link registers were not read",
            )
        elif gpu.link_speed_gt >= speed:
            words = "" if loaded else ", even idle"
            shown = excerpt_of(gpu, f"{gpu.link_speed_gt:g} GT/s of {speed:g} GT/s")
            yield verdict("pass", f"The link of {gpu.bdf} runs at full speed{words}", shown, subject=gpu.bdf)
        elif loaded:
            yield verdict(
                "pass", f"The link speed of {gpu.bdf} was read under load: rule C17 judges it", subject=gpu.bdf
            )
        else:
            state = f" at {told.pstate}" if told and told.pstate else ""
            yield verdict(
                "info",
                f"{gpu.bdf} shows {gpu.link_speed_gt:g} of {speed:g} GT/s{state or ' with unknown load'}: an idle link "
                "is slow on purpose, so its speed is not judged; read it under load",
                excerpt_of(gpu, f"{gpu.link_speed_gt:g} GT/s of {speed:g} GT/s"),
                subject=gpu.bdf,
            )


# --- C24: power saving ------------------------------------------------------------------------------------------------


@rule(
    "C24",
    "pcie-pm-cmdline",
    title="Links are not put to sleep for power",
    roles=HOST_ROLES,
    severity="info",
    looks_at=("module_parameters", "proc.cmdline"),
    why="Power saving states of links add latency, and some boards lose a card on the way out of them.",
    restart="reboot",
    automation="ask",
    risk="Reboots this machine. An idle machine then draws some watts more.",
    verify="cat /sys/module/pcie_aspm/parameters/policy",
    sources=("rtx6kpro (field)", "kernel documentation, pcie_aspm"),
)
def _link_power(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if has_no_gpu(snapshot):
        yield no_gpu(snapshot)
        return
    kernel = snapshot.kernel
    line = kernel.command_line.value
    policy = (kernel.parameters.value or {}).get("pcie_aspm.policy", "")
    active = re.search(r"\[(\w+)\]", policy)
    shown = Excerpt("module_parameters", f"pcie_aspm.policy {policy}")
    if line is not None and line.last("pcie_aspm") == "off":
        yield verdict("pass", "PCIe power saving is off (pcie_aspm=off)", kernel.command_line)
    elif active and active[1] in ("powersave", "powersupersave"):
        yield verdict(
            "warn",
            f"The PCIe power policy is {active[1]}",
            shown,
            fix=Fix(
                "Switch it off",
                (
                    "echo performance > /sys/module/pcie_aspm/parameters/policy   # until the next boot",
                    *set_kernel_parameters(snapshot, "add pcie_aspm=off"),
                ),
            ),
        )
    elif active:
        yield verdict("pass", f"The PCIe power policy is {active[1]}", shown)
    else:
        reason = kernel.parameters.reason or "pcie_aspm has no policy here"
        yield verdict("unknown", "The PCIe power policy is not known", reason=reason)
