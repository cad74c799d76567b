"""Rules C18 and C22: PCIe errors, and accesses that the IOMMU refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ..core.finding import Fix
from ..core.snapshot import AerEvent, CommandLine, IommuFault, PciFunction, Snapshot
from .common import SECURITY_NOTES, counted, has_no_gpu, listed_items, log_excerpt
from .hypervisor import set_kernel_parameters
from .knowledge import number
from .passthrough import (
    HOST_ROLES,
    RDMA_CLASSES,
    bridges_above,
    excerpt_of,
    host_gpus,
    no_gpu,
)
from .registry import Fleet, Verdict, rule, verdict

# --- C18: PCIe errors -----------------------------------------------------------------------------------------------


@rule(
    "C18",
    "aer-host",
    title="No PCIe errors on the way to the GPUs",
    roles=HOST_ROLES,
    severity="high",
    looks_at=("sysfs.pci", "lspci.vvv", "kernel_log", "proc.cmdline"),
    why="Errors on a link come before a card falls off the bus (Xid 79). A guest cannot see them; only its host can.",
    restart="reboot",
    automation="never",
    risk="Work on the hardware: the machine is off for it.",
    verify="grep . /sys/bus/pci/devices/*/aer_dev_*   # twice, a minute of load apart: the counters must not grow",
    sources=("kernel documentation, AER statistics", "recorded log of a root port"),
    without_role=True,
)
def _aer(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    line = snapshot.kernel.command_line
    if "noaer" in listed_items(line.value or CommandLine(), "pci"):
        yield verdict(
            "warn",
            "pci=noaer hides PCIe errors: nothing can be said of the links",
            line,
            subject="pci=noaer",
            severity="medium",
            fix=Fix("Remove it", set_kernel_parameters(snapshot, "remove noaer from pci=")),
        )
    log = snapshot.kernel.log.value
    events: dict[str, list[AerEvent]] = {}
    for event in log.aer if log else ():
        events.setdefault(event.bdf, []).append(event)
    gpus = [one for one in host_gpus(snapshot) if not one.physfn]
    ways = {gpu.bdf: bridges_above(snapshot, gpu.bdf) for gpu in gpus}
    below = {bridge.bdf: gpu for gpu, way in ways.items() for bridge in way or ()} | {gpu.bdf: gpu.bdf for gpu in gpus}
    whole = bool(gpus) and all(ways.values())
    for bdf, found in sorted(events.items()):
        function = (snapshot.pci.functions.value or {}).get(bdf)
        # With the whole tree known, an error elsewhere is none of the GPUs'.
        if not whole or bdf in below or (function is not None and function.class_code in RDMA_CLASSES):
            yield _judge_events(snapshot, bdf, found, below.get(bdf))
    judged = set(events)
    functions = snapshot.pci.functions.value or {}
    wanted = [functions[bdf] for bdf in dict.fromkeys(below) if bdf in functions]
    # What an excerpt tells of a port or a device without ids is worth saying too.
    wanted += [one for one in functions.values() if one.vendor is None and one.aer is not None and one not in wanted]
    for one in wanted:
        if one.bdf not in judged:
            yield from _judge_counters(snapshot, one)
    if not events and not wanted:
        yield no_gpu(snapshot)


def _judge_events(snapshot: Snapshot, bdf: str, events: Sequence[AerEvent], gpu: str | None) -> Verdict:
    severe = [one for one in events if one.severity != "correctable"]
    kinds = list(dict.fromkeys(bit for one in events for bit in one.bits))
    layers = list(dict.fromkeys(one.layer for one in events if one.layer))
    where = "" if gpu == bdf else f", above {gpu}" if gpu else ""
    where += f" ({', '.join([*layers, *kinds])})" if layers or kinds else ""
    lines = [one for one in snapshot.kernel.log.value.lines if bdf in one.text] if snapshot.kernel.log.value else []
    shown = log_excerpt(snapshot, lines)
    if severe:
        worst = "fatal" if any(one.severity == "fatal" for one in severe) else "nonfatal"
        return verdict(
            "fail",
            f"{bdf} reported {counted(len(severe), 'uncorrectable PCIe error')}, {worst}{where}",
            shown,
            subject=bdf,
            fix=_ERROR_FIX,
            explains=("F15",),
        )
    rate = _per_minute(events)
    often = rate is not None and rate > number("aer.fail_per_minute")
    span = _span(events)
    words = f" within {span:g} s" if span is not None and len(events) > 1 else ""
    text = f"{bdf} corrected {counted(len(events), 'PCIe error')}{words}{where}"
    if often:
        return verdict("fail", text, shown, subject=bdf, severity="medium", fix=_ERROR_FIX, explains=("F15",))
    return verdict("warn", text, shown, subject=bdf, severity="medium", fix=_ERROR_FIX, explains=("F15",))


_ERROR_FIX = Fix(
    "Reseat the card, its riser or retimer and its power; as a trial, a lower PCIe generation in the firmware setup",
    (
        "grep . /sys/bus/pci/devices/*/aer_dev_correctable | grep -v ' 0$'   # under load, twice",
        "# as a trial: pcie_aspm=off on the kernel command line",
    ),
)


def _seconds(event: AerEvent) -> float | None:
    found = re.fullmatch(r"\s*(\d{1,9}\.\d{1,9})", event.stamp)
    return float(found[1]) if found else None


def _span(events: Sequence[AerEvent]) -> float | None:
    """Return the seconds between the first and the last event, where the log counts seconds since boot."""
    times = [moment for moment in map(_seconds, events) if moment is not None]
    return round(max(times) - min(times), 2) if len(times) == len(events) and times else None


def _per_minute(events: Sequence[AerEvent]) -> float | None:
    """Return the rate of the events, or None where they are too few or carry no fine time."""
    span = _span(events)
    if span is None or len(events) < number("aer.events_for_a_rate"):
        return None
    return len(events) * 60 / max(span, 1.0)


def _judge_counters(snapshot: Snapshot, one: PciFunction) -> Iterator[Verdict]:
    subject = one.bdf
    if one.off_bus:
        yield verdict(
            "not_applicable", f"{subject} is off the bus", subject=subject, reason="its counters say nothing: rule C17"
        )
        return
    if one.aer is None and one.aer_status is None:
        yield verdict(
            "unknown",
            f"The PCIe errors of {subject} are not known",
            subject=subject,
            reason="lspci was not run as root" if one.access_denied else "its error counters were not read",
        )
        return
    totals = {severity: _total(counts) for severity, counts in (one.aer or {}).items()}
    shown = [excerpt_of(one, *(f"{severity}: {total}" for severity, total in totals.items()))] if totals else []
    severe = totals.get("fatal", 0) + totals.get("nonfatal", 0)
    kinds = [name for severity in ("fatal", "nonfatal", "correctable") for name in _nonzero(one, severity)]
    if severe:
        yield verdict(
            "fail",
            f"{subject} counted {counted(severe, 'uncorrectable PCIe error')} since boot ({', '.join(kinds)})",
            *shown,
            subject=subject,
            fix=_ERROR_FIX,
            explains=("F15",),
        )
    elif totals.get("correctable"):
        yield verdict(
            "info",
            f"{subject} corrected {counted(totals['correctable'], 'PCIe error')} since boot ({', '.join(kinds)}): read "
            "the counter twice under load to see whether it grows",
            *shown,
            subject=subject,
        )
    elif one.aer_status or one.lane_errors:
        lanes = f"; errors on {counted(len(one.lane_errors), 'lane')}" if one.lane_errors else ""
        bits = ", ".join(one.aer_status or ())
        yield verdict(
            "info",
            f"{subject} has error bits from some time since its last reset set ({bits or 'none'}{lanes})",
            excerpt_of(one, bits, f"LaneErrStat: {' '.join(map(str, one.lane_errors or ()))}"),
            subject=subject,
        )
    elif one.aer == {} and one.aer_status is None:
        yield verdict(
            "info",
            f"{subject} exposes no error counters: errors on its link would not be seen there",
            excerpt_of(one, "aer_dev_*: absent"),
            subject=subject,
        )
    else:
        # Without its ids this is a part of what sysfs tells: the rest may say that the function fell off the bus.
        yield verdict(
            "pass" if one.vendor else "info",
            f"{subject} counted no PCIe error since boot",
            *(shown or [excerpt_of(one)]),
            subject=subject,
        )


def _total(counts: Mapping[str, int]) -> int:
    total = next((count for name, count in counts.items() if name.startswith("TOTAL")), None)
    return total if total is not None else sum(counts.values())


def _nonzero(one: PciFunction, severity: str) -> list[str]:
    counts = (one.aer or {}).get(severity, {})
    return [f"{name} {count}" for name, count in counts.items() if count and not name.startswith("TOTAL")]


# --- C22: accesses that the IOMMU refused ---------------------------------------------------------------------------


@rule(
    "C22",
    "iommu-page-faults",
    title="The IOMMU refused no access of a GPU",
    roles=HOST_ROLES,
    severity="critical",
    looks_at=("kernel_log",),
    why=(
        "A GPU that reaches for a peer through a translating IOMMU faults, and the copy holds zeros. That no fault is "
        "logged proves nothing: copies can fail without one."
    ),
    restart="reboot",
    automation="never",
    risk=SECURITY_NOTES["iommu"],
    verify="dmesg -w | grep -E 'IO_PAGE_FAULT|DMAR: .DMA'   # while peer copies run: wanted is silence",
    sources=("CUDA programming guide", "tinygrad/open-gpu-kernel-modules #18", "recorded fault storms"),
    without_role=True,
)
def _faults(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    log = snapshot.kernel.log
    if log.value is None:
        yield verdict("unknown", "Whether the IOMMU refused accesses is not known", reason=log.reason)
        return
    by_bdf: dict[str, list[IommuFault]] = {}
    for fault in log.value.faults:
        by_bdf.setdefault(fault.bdf, []).append(fault)
    functions = snapshot.pci.functions.value or {}
    said = False
    for bdf, faults in sorted(by_bdf.items()):
        function = functions.get(bdf)
        device = _faulting_device(function, faults)
        if device is None:
            continue
        said = True
        yield _fault_verdict(snapshot, bdf, faults, device, log.value.suppressed)
    if not said:
        if has_no_gpu(snapshot):
            yield no_gpu(snapshot)
        else:
            yield verdict(
                "pass" if log.value.from_boot else "info",
                "The kernel log names no refused access of a GPU (which proves nothing by itself)",
                log,
            )


def _faulting_device(function: PciFunction | None, faults: Sequence[IommuFault]) -> str | None:
    """Return what a faulting device is (GPU, network card, device), or None where it is none of ours."""
    drivers = {one.driver for one in faults}
    if (function is not None and function.is_nvidia) or drivers & {"nvidia", "nouveau"}:
        return "GPU"
    if function is not None and function.class_code in RDMA_CLASSES:
        return "network card"
    if "vfio-pci" in drivers or function is None:
        return "device"
    return None


def _fault_verdict(snapshot: Snapshot, bdf: str, faults: Sequence[IommuFault], device: str, suppressed: int) -> Verdict:
    # Which device the suppressed messages were about is not told: the count is a lower bound.
    count = f"at least {len(faults)}" if suppressed else f"{len(faults)}"
    kinds = list(dict.fromkeys(one.kind for one in faults))
    lines = [one for one in snapshot.kernel.log.value.lines if bdf[5:] in one.text] if snapshot.kernel.log.value else []
    bare = Fix(
        "Bare metal: iommu=pt, or the IOMMU off where no VM needs a device",
        set_kernel_parameters(snapshot, "add iommu=pt"),
    )
    host = Fix(
        "Hypervisor: leave the IOMMU and ACS on; see rules C13 and C21, and take the clique out of the VM's args",
        ("dmesg | grep -E 'IO_PAGE_FAULT|DMAR'", "lspci -vvv | grep -E '^[0-9a-f]|ACSCtl'"),
    )
    neutral = Fix(
        "First tell which machine this is: on bare metal iommu=pt cures it; on a hypervisor the IOMMU must stay on",
        ("systemd-detect-virt; ls /etc/pve/qemu-server", *bare.steps),
    )
    fix = {"bare_metal": bare, "hypervisor": host}.get(snapshot.role.value or "", neutral)
    text = f"The IOMMU refused {count} accesses of {device} {bdf} ({', '.join(kinds)})"
    shown = log_excerpt(snapshot, lines)
    if device == "device":
        return verdict(
            "warn", f"{text}; whether it is a GPU is not known", shown, subject=bdf, severity="high", fix=fix
        )
    return verdict("fail", text, shown, subject=bdf, fix=fix, explains=("D7", "F15"))
