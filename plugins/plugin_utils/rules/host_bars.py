"""Rules C15 and C16: the large BAR of each GPU, and the address windows of the ports above."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Gpu, MemoryRange, PciFunction, Snapshot
from ..parse.kernel_log import UnassignedWindow, unassigned_windows
from ..parse.text import size_bytes
from .common import log_excerpt
from .knowledge import gpu_model, number
from .passthrough import (
    FIRMWARE_RISK,
    HOST_ROLES,
    bridges_above,
    excerpt_of,
    host_gpus,
    log_notes,
    no_gpu,
    resizable,
    size_text,
)
from .registry import Fleet, Verdict, rule, verdict

_MIB, _GIB = 1024**2, 1024**3

# --- C15: the size of the large BAR ---------------------------------------------------------------------------------


def _largest(function: PciFunction) -> int | None:
    """Return the size of the largest BAR that is or may be prefetchable, or None where none is known."""
    sizes = [one.size_bytes for one in function.regions.values() if one.size_bytes and one.prefetchable is not False]
    return max(sizes, default=None)


@rule(
    "C15",
    "host-bar1-rebar",
    title="Each GPU's large BAR covers its memory",
    roles=HOST_ROLES,
    severity="high",
    looks_at=("lspci.vvv", "sysfs.pci", "nvidia_smi.q", "kernel_log"),
    why=(
        "A guest gets the BAR as the host has it, and peers reach a GPU's memory only through it. A guest's own lspci "
        "shows no Resizable BAR, so this is judged on the host."
    ),
    restart="reboot",
    automation="never",
    risk=FIRMWARE_RISK,
    verify="lspci -vvv -d 10de: | grep -A5 'Physical Resizable BAR'",
    sources=("club-3090 #884", "NVIDIA open-gpu-kernel-modules nv-reg.h"),
    without_role=True,
)
def _host_bar(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = [one for one in host_gpus(snapshot) if not one.physfn]
    excerpts = snapshot.pci.unnamed
    for at, one in enumerate(excerpts.value or (), 1):
        rebar = resizable(one)
        if rebar and (size_bytes(rebar[2]) or 0) >= number("pci.large_bar_mib") * _MIB:
            subject = f"excerpt {at}"
            yield _judge_rebar(rebar, Excerpt(excerpts.source, _rebar_text(rebar)), subject, "an unnamed function")
    if not gpus:
        if not any(resizable(one) for one in excerpts.value or ()):
            yield no_gpu(snapshot)
        return
    smi = {gpu.bus_id: gpu for gpu in snapshot.gpus.value or ()}
    for gpu in gpus:
        yield _judge_bar(snapshot, gpu, smi.get(gpu.bdf))


def _rebar_text(rebar: tuple[int, str, str]) -> str:
    return f"BAR {rebar[0]}: current size: {rebar[1]}, largest supported: {rebar[2]}"


def _judge_rebar(rebar: tuple[int, str, str], shown: Excerpt, subject: str, name: str) -> Verdict:
    bar, current, largest = rebar
    if (size_bytes(current) or 0) >= (size_bytes(largest) or 0):
        return verdict("pass", f"BAR {bar} of {name} has its largest size, {current}", shown, subject=subject)
    return verdict(
        "fail",
        f"BAR {bar} of {name} has {current} of {largest}",
        shown,
        subject=subject,
        fix=_REBAR_FIX,
        explains=("F21", "B11", "D7", "D9"),
    )


_REBAR_FIX = Fix(
    "Switch Above 4G Decoding and Re-Size BAR Support on in the firmware setup: the first does not imply the second",
    (
        "# reboot into the firmware setup: systemctl reboot --firmware-setup",
        "# still small: the newest VBIOS; RTX PRO cards: display mode selector, mode compute",
        "# bare metal only: options nvidia NVreg_EnableResizableBar=1, where the bridge window has room (rule C16)",
    ),
)


def _judge_bar(snapshot: Snapshot, gpu: PciFunction, told: Gpu | None) -> Verdict:
    subject = gpu.bdf
    if gpu.off_bus:
        return verdict("not_applicable", f"{gpu.bdf} is off the bus", subject=subject, reason="rule C17 judges that")
    rebar, largest = resizable(gpu), _largest(gpu)
    if rebar and (size_bytes(rebar[2]) or 0) >= number("pci.large_bar_mib") * _MIB:
        return _judge_rebar(rebar, Excerpt(gpu.source, f"{gpu.bdf} {_rebar_text(rebar)}"), subject, gpu.bdf)
    memory = told.memory_total_mib if told else None
    if largest is None:
        denied = " (lspci was not run as root)" if gpu.access_denied else ""
        return verdict(
            "unknown",
            f"The size of the large BAR of {gpu.bdf} is not known",
            subject=subject,
            reason=f"neither its regions nor its Resizable BAR capability were read{denied}",
        )
    shown = excerpt_of(gpu, f"largest BAR: {size_text(largest)}")
    if memory is not None:
        if largest >= memory * _MIB:
            return verdict("pass", f"The large BAR of {gpu.bdf} covers its memory", shown, subject=subject)
        needs = f"{memory} MiB of memory"
    elif largest > number("pci.large_bar_mib") * _MIB:
        return verdict(
            "info",
            f"The large BAR of {gpu.bdf} has {size_text(largest)}, more than without Resizable BAR",
            shown,
            subject=subject,
            reason="whether a larger size is supported is not known: its Resizable BAR capability was not read",
        )
    else:
        model = gpu_model(gpu.device)
        if model is None or not model.name:
            return verdict(
                "unknown",
                f"Whether the BAR of {gpu.bdf} ({size_text(largest)}) could be larger is not known",
                shown,
                subject=subject,
                reason="its Resizable BAR capability was not read, and the model is not listed",
            )
        needs = f"its memory ({model.name})"
    return verdict(
        "fail",
        f"The large BAR of {gpu.bdf} has {size_text(largest)}, less than {needs}",
        shown,
        subject=subject,
        fix=_REBAR_FIX,
        explains=("F21", "B11", "D7", "D9"),
    )


# --- C16: windows of the ports above --------------------------------------------------------------------------------

_BUS = re.compile(r"PCI Bus ([0-9a-f]{4}):([0-9a-f]{2})$")


@dataclass(frozen=True)
class _BusWindow:
    """The prefetchable address window of a bus with a GPU, and the port that opens it (None: not known)."""

    bus: str
    size_bytes: int
    shown: Excerpt
    gpu: PciFunction | None
    port: PciFunction | None


@rule(
    "C16",
    "host-bridge-window",
    title="The ports above the GPUs have room for their large BARs",
    roles=HOST_ROLES,
    severity="medium",
    looks_at=("lspci.vvv", "sysfs.pci", "proc.iomem", "kernel_log"),
    why="A BAR cannot grow beyond the window of the port above it, and the kernel cannot move what the firmware fixed.",
    restart="reboot",
    automation="never",
    risk=f"{FIRMWARE_RISK} pci=realloc lets the kernel move windows; a device that does not expect it may fail.",
    verify="lspci -vvv | grep -E '^[0-9a-f]|Prefetchable memory'; dmesg | grep -E 'no space|failed to assign'",
    sources=("NVIDIA open-gpu-kernel-modules #510", "club-3090 #884"),
    without_role=True,
)
def _windows(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    failed = unassigned_windows(log_notes(snapshot, "window"))
    failed = tuple(one for one in failed if _matters(snapshot, one))
    for one in failed:
        yield _window_failed(snapshot, one)
    windows = _bus_windows(snapshot)
    bridges = [one.bdf for one in failed if one.is_bridge]
    uneven = list(_uneven(windows, bridges))
    yield from uneven
    said = {one.subject for one in uneven} | {one.bdf for one in failed}
    for window in windows:
        if window.gpu is not None and f"bus {window.bus}" not in said and window.gpu.bdf not in said:
            yield _judge_window(window)
    if not windows and not failed:
        if host_gpus(snapshot):
            reason = snapshot.pci.memory_map.reason or "neither the ports above the GPUs nor /proc/iomem were read"
            yield verdict("unknown", "The address windows above the GPUs are not known", reason=reason)
        else:
            yield no_gpu(snapshot)


def _matters(snapshot: Snapshot, one: UnassignedWindow) -> bool:
    """A port without a device often gets no window; what is large, or above a GPU, is a loss."""
    large = one.size_bytes is not None and one.size_bytes >= number("pci.large_bar_mib") * _MIB
    above = {bridge.bdf for gpu in host_gpus(snapshot) for bridge in bridges_above(snapshot, gpu.bdf) or ()}
    function = (snapshot.pci.functions.value or {}).get(one.bdf)
    return (large and one.prefetchable) or one.bdf in above or (function is not None and function.is_gpu)


def _window_failed(snapshot: Snapshot, one: UnassignedWindow) -> Verdict:
    size = size_text(one.size_bytes) if one.size_bytes else "a range"
    what = f"a window of {size} for the port {one.bdf}" if one.is_bridge else f"{one.resource} ({size}) of {one.bdf}"
    return verdict(
        "warn",
        f"The kernel found no place for {what}",
        log_excerpt(snapshot, [one.line]),
        subject=one.bdf,
        severity="medium",
        fix=_WINDOW_FIX,
        explains=("C15", "F21", "A5"),
    )


_WINDOW_FIX = Fix(
    "Give the bus more address space: Above 4G Decoding and the highest MMIO limit in the firmware setup, newest "
    "firmware; else move the card to a port with room",
    (
        "# reboot into the firmware setup: systemctl reboot --firmware-setup",
        "grep 'PCI Bus' /proc/iomem",
        "# as a trial, with console access: add pci=realloc to the kernel command line",
    ),
)


def _bus_windows(snapshot: Snapshot) -> list[_BusWindow]:
    functions = snapshot.pci.functions.value or {}
    gpus = {gpu.bdf.rpartition(":")[0]: gpu for gpu in host_gpus(snapshot)}
    found: dict[str, _BusWindow] = {}
    for bus, gpu in gpus.items():
        port = functions.get(gpu.parent or "")
        if port is not None and port.prefetchable_window is not None:
            window = port.prefetchable_window
            shown = excerpt_of(port, f"prefetchable memory behind bridge: {window.start:x}-{window.end:x}")
            found[bus] = _BusWindow(bus, window.size_bytes, shown, gpu, port)
    memory: dict[str, MemoryRange] = {}
    for one in snapshot.pci.memory_map.value or ():
        named = _BUS.match(one.name)
        # Only windows above 4 GiB hold large BARs; a bus has a small one below it too.
        if named and one.start >= 4 * _GIB:
            name = f"{named[1]}:{named[2]}"
            memory[name] = max(memory.get(name, one), one, key=lambda each: each.size_bytes)
    for name, one in memory.items():
        # Where not all functions are known, the other buses may hold GPUs too: they tell what is usual.
        if name not in found and (name in gpus or not snapshot.pci.complete):
            shown = Excerpt("proc.iomem", f"{one.start:x}-{one.end:x} : {one.name}")
            found[name] = _BusWindow(name, one.size_bytes, shown, gpus.get(name), None)
    return [found[name] for name in sorted(found)]


def _uneven(windows: Sequence[_BusWindow], bridges: Sequence[str]) -> Iterator[Verdict]:
    """Say which bus of several alike has a far smaller window: a full size GPU does not fit there."""
    sizes = sorted(one.size_bytes for one in windows)
    if len(sizes) < 3:
        return
    usual = sizes[len(sizes) // 2]
    small = [one for one in windows if one.size_bytes * 2 <= usual]
    # Where half of them differ, no size is the usual one.
    if len(small) * 2 >= len(windows):
        return
    if any(one.gpu is not None for one in windows):
        small = [one for one in small if one.gpu is not None]
    for one in small:
        port = one.port.bdf if one.port else bridges[0] if len(bridges) == len(small) == 1 else ""
        yield verdict(
            "warn",
            f"Bus {one.bus}{f' (port {port})' if port else ''} has a window of {size_text(one.size_bytes)}, the others "
            f"{size_text(usual)}: a BAR that fits there does not fit here",
            one.shown,
            *(other.shown for other in windows if other.size_bytes == usual and other is not one),
            subject=f"bus {one.bus}",
            severity="medium",
            fix=_WINDOW_FIX,
            explains=("C15", "F21"),
        )


def _judge_window(window: _BusWindow) -> Verdict:
    gpu = window.gpu
    subject = gpu.bdf if gpu else window.bus
    rebar = resizable(gpu) if gpu else None
    largest = rebar[2] if rebar else ""
    wanted = size_bytes(largest)
    if wanted is None or gpu is None:
        return verdict(
            "info",
            f"The window above {subject} has {size_text(window.size_bytes)}; what the card could use is not known",
            window.shown,
            subject=subject,
        )
    if window.size_bytes >= wanted:
        return verdict(
            "pass",
            f"The window above {subject} has room for {largest}",
            window.shown,
            subject=subject,
        )
    return verdict(
        "warn",
        f"The window above {subject} has {size_text(window.size_bytes)}: its BAR cannot grow to {largest}",
        window.shown,
        subject=subject,
        severity="medium",
        fix=_WINDOW_FIX,
        explains=("C15", "F21"),
    )
