"""Kernel messages in every style of time stamp, and the events among them that rules judge.

One pass over the text; a line is looked at closely only where it holds one of a few words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.snapshot import AerEvent, IommuFault, KernelLog, LogLine, Xid
from .text import RefusedError, address, lines

# `<4>`, and `kern  :warn  :` of `dmesg -x`.
_PRIORITY = re.compile(r"(?:<\d{1,3}>)?(?:(?:kern|user|daemon|syslog)\s*:\w+\s*:\s)?")
# `2026-02-01T12:00:00+0100` (with a comma and microseconds: dmesg's own ISO) or `Feb  1 12:00:00`, host, program.
_JOURNAL = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
    r"|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d (?:\d{4} )?\d\d:\d\d:\d\d(?:\.\d{1,9})?)\s"
    r"(?:[^\s:]+ ([\w./@-]+)(?:\[\d+\])?:\s)?"
)
# `[   12.345678]`, `[Fri Aug 30 11:43:09 2024]`, and the thread that some kernels add: `[ T123]`.
_BRACKET = re.compile(
    r"\[\s*(\d{1,9}\.\d{1,9}|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}"
    r"|\d{4}-\d\d-\d\dT[\d:.,+-]{8,24})\]\s?"
    r"(?:\[\s*[TC]\d+\]\s)?"
)
_XID = re.compile(r"NVRM:\s+Xid\s+\((?:PCI:)?([0-9A-Fa-f:.]{4,20})\):\s*(\d{1,4})\b,?\s*(.*)")
_PID = re.compile(r"pid='?(\d{1,10}|<unknown>)'?,?\s*")
_NAME = re.compile(r"name='?([^,']*)'?(?:,\s*|$)")
_SUPPRESSED = re.compile(r"(\d{1,9}) callbacks suppressed")
_REFUSED = re.compile(r"^dmesg: .*(?:not permitted|Permission denied).*$", re.MULTILINE)

# drivers/pci/pcie/aer.c: what a port announces, then the error of the function, its ids, and one line for each bit.
_ANNOUNCED = re.compile(
    r"(\S+ )?([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): AER: (?:Multiple )?"
    r"(Correct(?:ed|able)|Uncorrect(?:ed|able) \((?:Non-)?Fatal\)) error(?: message)? received"
)
_BUS_ERROR = re.compile(
    r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): (?:AER: )?PCIe Bus Error: severity=([A-Za-z() -]+),"
    r"(?: type=([A-Za-z ]+),)?(?:.*\((\w+) ID\))?"
)
_ERROR_IDS = re.compile(
    r"([0-9a-f:]{10,14}\.[0-7]): (?:AER: )?\s+device \[([0-9a-f]{4}:[0-9a-f]{4})\] error status/mask="
)
_ERROR_BIT = re.compile(r"([0-9a-f:]{10,14}\.[0-7]): (?:AER: )?\s+\[\s?\d{1,2}\] (\w+)")
# Firmware that handles errors itself tells them as `{1}[Hardware Error]:` blocks (drivers/firmware/efi/cper.c).
_HARDWARE = re.compile(r"(?:\{\d+\})?\[Hardware Error\]:\s*(event severity|section_type|device_id): (.+)")
_HARDWARE_SEVERITY = {"corrected": "correctable", "recoverable": "nonfatal", "fatal": "fatal", "info": "correctable"}

_AMD_FAULT = re.compile(
    r"(?:([\w-]+) ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): )?AMD-Vi: Event logged \[([A-Z_]{4,40}) (.*)"
)
_INTEL_FAULT = re.compile(
    r"DMAR: ?\[((?:DMA (?:Read|Write)|INTR-REMAP)[^\]]*)\] Request device \[([0-9a-f:.]{7,16})\]"
    r"(?:.*?fault addr (\S+))?"
    r"(?:.*\[fault reason [^\]]*\] ?(.*))?"
)
_FIELD = re.compile(r"(device|domain|address|flags|pasid)=(\S+?)(?=[\s\]]|$)")

# Words that make a line telling, with the kind under which it is kept (``KernelLog.notes``).
NOTES: tuple[tuple[str, str], ...] = (
    ("Interrupt remapping enabled", "remapping_on"),
    ("Enabled IRQ remapping in", "remapping_on"),
    ("irq-injection attacks", "remapping_off"),
    ("IRQ remapping doesn't support X2APIC mode", "remapping_off"),
    ("No interrupt remapping support", "remapping_off"),
    ("Default domain type", "default_domain"),
    ("DMAR: IOMMU enabled", "iommu"),
    ("AMD-Vi: ", "iommu"),
    ("ACS overrides enabled", "acs_override"),
    ("can't reserve [mem", "bar_reserved"),
    ("is not viable", "not_viable"),
    ("giving up", "reset_failed"),
    ("timed out waiting for pending transaction", "reset_slow"),
    ("retraining failed", "retraining"),
    ("Link Active not set in", "retraining"),
    ("PCI peer-to-peer transactions on BARs", "p2p_map"),
    ("dma_map(", "p2p_map"),
    ("IOMMU_IOAS_MAP failed", "p2p_map"),
    ("NVIDIA GPUDirect Clique ID", "clique"),
    ("to assign", "window"),
    (" no space", "window"),
    (": assigned", "window"),
    ("vfio_virqfd", "virqfd"),
    ("NVRM: ", "nvrm"),
)
# One of them stands in every line that ``_read_event`` understands.
_EVENT_WORDS = (
    "Xid",
    "AER: ",
    "PCIe Bus Error",
    "] error status/mask=",
    ":    [",
    "Event logged [",
    "] Request device [",
    "[Hardware Error]",
    "suppressed",
)
# The first line of a boot, and what comes after all of the kernel's own setup of devices.
_FIRST_LINE = "Linux version "
_SETUP_DONE = ("Run /init as init process", "Freeing unused kernel")

_MONTH_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, 1)}
_CTIME = re.compile(
    r"(?:[A-Z][a-z]{2} )?([A-Z][a-z]{2}) ([ \d]\d) (?:(\d{4}) )?(\d\d:\d\d:\d\d)(?:\.\d+)?(?: (\d{4}))?"
)
_ISO = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


@dataclass
class _Reading:
    """What one pass has found so far. ``announced`` waits for the error that belongs to it."""

    xids: list[Xid] = field(default_factory=list)
    aer: list[AerEvent] = field(default_factory=list)
    faults: list[IommuFault] = field(default_factory=list)
    notes: dict[str, list[LogLine]] = field(default_factory=dict)
    suppressed: int = 0
    announced: AerEvent | None = None
    hardware: dict[str, str] = field(default_factory=dict)
    setup_done: bool = False


def parse(text: str) -> KernelLog:
    """Read a kernel log. Lines that nothing understands are kept too: rules look for their own texts."""
    found = tuple(_split(row) for row in lines(text) if row.strip())
    denied = _REFUSED.search(text) if len(found) <= 1 else None
    if denied:
        raise RefusedError(denied[0].strip())
    whole = "\n".join([line.text for line in found])
    reading = _Reading()
    # Of some forty words a log holds a few; each line is searched for those alone.
    events = any(word in whole for word in _EVENT_WORDS)
    notes = tuple((word, kind) for word, kind in NOTES if word in whole)
    for line in found:
        if not (events and _read_event(reading, line)):
            _note(reading, line, notes)
    if reading.announced:
        reading.aer.append(reading.announced)
    return KernelLog(
        lines=found,
        xids=tuple(reading.xids),
        aer=tuple(reading.aer),
        faults=tuple(reading.faults),
        notes={kind: tuple(rows) for kind, rows in reading.notes.items()},
        formats=formats(found),
        from_boot=bool(found) and found[0].text.startswith(_FIRST_LINE) and reading.setup_done,
        suppressed=reading.suppressed,
    )


def join(first: KernelLog, second: KernelLog) -> KernelLog:
    """Put two logs of one machine behind each other."""
    return KernelLog(
        lines=first.lines + second.lines,
        xids=first.xids + second.xids,
        aer=first.aer + second.aer,
        faults=first.faults + second.faults,
        notes={
            kind: first.notes.get(kind, ()) + second.notes.get(kind, ())
            for kind in dict.fromkeys([*first.notes, *second.notes])
        },
        formats=tuple(dict.fromkeys(first.formats + second.formats)),
        from_boot=first.from_boot or second.from_boot,
        suppressed=first.suppressed + second.suppressed,
    )


def _read_event(reading: _Reading, line: LogLine) -> bool:
    """Read an event, if the line tells one. Return whether that is all that the line tells."""
    text = line.text
    if "Xid" in text and (xid := _xid(line)):
        reading.xids.append(xid)
        return True
    if "AER: " in text or "PCIe Bus Error" in text or "] error status/mask=" in text or ":    [" in text:
        _read_aer(reading, line)
    if "Event logged [" in text or "] Request device [" in text:
        fault = _fault(line)
        if fault:
            reading.faults.append(fault)
        return True
    if "[Hardware Error]" in text:
        _read_hardware(reading, line)
    if "suppressed" in text and (hit := _SUPPRESSED.search(text)):
        reading.suppressed += int(hit[1])
    return False


def _note(reading: _Reading, line: LogLine, notes: Iterable[tuple[str, str]]) -> None:
    text = line.text
    for word, kind in notes:
        if word in text:
            reading.notes.setdefault(kind, []).append(line)
            break
    if not reading.setup_done and text.startswith(_SETUP_DONE):
        reading.setup_done = True


def _split(row: str) -> LogLine:
    stamp, program, uptime = "", "", ""
    start = None if row.startswith("[") else _PRIORITY.match(row)
    rest = row[start.end() :] if start else row
    journal = None if rest.startswith("[") else _JOURNAL.match(rest)
    if journal:
        stamp, program = journal[1], journal[2] or ""
        rest = rest[journal.end() :]
    bracket = _BRACKET.match(rest)
    if bracket:
        inside = bracket[1]
        stamp = stamp or inside
        uptime = inside if inside[0].isdigit() and "T" not in inside else ""
        rest = rest[bracket.end() :]
    if program and program != "kernel":
        rest = f"{program}: {rest}"
    return LogLine(stamp, rest.strip(), uptime)


# --- time -----------------------------------------------------------------------------------------------------------


def formats(found: Sequence[LogLine]) -> tuple[str, ...]:
    """Return the styles of the stamps at the head of a log: monotonic, ctime, iso, syslog (no year), none."""
    return tuple(dict.fromkeys(_format(line.stamp) for line in found[:20]))


def _format(stamp: str) -> str:
    if not stamp:
        return "none"
    if _ISO.match(stamp):
        return "iso"
    if stamp[0].isdigit():
        return "monotonic"
    return "ctime" if iso_time(stamp) else "syslog"


def iso_time(stamp: str) -> str:
    """Return a stamp as ``2024-08-30T11:43:09``, in the zone that it was printed in; "" where it names no year."""
    iso = _ISO.match(stamp)
    if iso:
        return iso[1]
    found = _CTIME.fullmatch(stamp.strip())
    year = found and (found[3] or found[5])
    if not found or not year or found[1] not in _MONTHS:
        return ""
    return f"{year}-{_MONTHS[found[1]]:02d}-{int(found[2]):02d}T{found[4]}"


# --- NVIDIA's events ------------------------------------------------------------------------------------------------


def _xid(line: LogLine) -> Xid | None:
    found = _XID.search(line.text)
    if not found:
        return None
    pci, code, detail = found.groups()
    pid, name = _PID.match(detail), None
    if pid:
        detail = detail[pid.end() :]
        name = _NAME.match(detail)
        detail = detail[name.end() :] if name else detail
    process = name[1].strip() if name else ""
    return Xid(
        pci=address(pci) or pci.lower(),
        code=int(code),
        detail=detail.strip(),
        stamp=line.stamp,
        pid=int(pid[1]) if pid and pid[1].isdigit() else None,
        process="" if process.startswith("<unknown") else process,
        time=iso_time(line.stamp),
    )


# --- PCIe errors ----------------------------------------------------------------------------------------------------


def _severity(words: str) -> str:
    words = words.lower()
    if "non-fatal" in words:
        return "nonfatal"
    if words.startswith("uncorrect"):
        return "fatal"
    return "correctable"


def _stamp(line: LogLine) -> str:
    """Return the finer stamp of a line: an AER storm fits into one second of a wall clock."""
    return line.uptime or line.stamp


def _read_aer(reading: _Reading, line: LogLine) -> None:
    error = _BUS_ERROR.search(line.text)
    if error:
        reading.announced = None
        bdf, severity, layer, agent = error.groups()
        reading.aer.append(
            AerEvent(bdf, _severity(severity), (layer or "").strip(), agent or "", stamp=_stamp(line), complete=False)
        )
        return
    told = _ANNOUNCED.match(line.text)
    if told:
        if reading.announced:
            reading.aer.append(reading.announced)
        reading.announced = AerEvent(told[2], _severity(told[3]), stamp=_stamp(line), complete=False)
        return
    last = reading.aer[-1] if reading.aer else None
    for pattern in (_ERROR_IDS, _ERROR_BIT) if last else ():
        part = pattern.search(line.text)
        if part and last and part[1] == last.bdf:
            if pattern is _ERROR_IDS:
                reading.aer[-1] = replace(last, device_id=part[2])
            else:
                reading.aer[-1] = replace(last, bits=(*last.bits, part[2]), complete=True)
            return


def _read_hardware(reading: _Reading, line: LogLine) -> None:
    found = _HARDWARE.match(line.text)
    if not found:
        return
    key, given = found[1], found[2].strip()
    if key == "event severity":
        reading.hardware = {"severity": _HARDWARE_SEVERITY.get(given.lower(), "")}
    elif key == "section_type":
        reading.hardware["section"] = given
    elif reading.hardware.get("severity") and "PCIe" in reading.hardware.get("section", "") and (bdf := address(given)):
        reading.aer.append(AerEvent(bdf, reading.hardware["severity"], stamp=_stamp(line)))


# --- IOMMU faults ---------------------------------------------------------------------------------------------------


def _fault(line: LogLine) -> IommuFault | None:
    amd = _AMD_FAULT.search(line.text)
    if amd:
        driver, bdf, kind, rest = amd.groups()
        told = dict(_FIELD.findall(rest))
        return IommuFault(
            bdf=bdf or address(told.get("device", "")) or "",
            kind=kind,
            driver=driver or "",
            address=told.get("address", ""),
            domain=told.get("domain", ""),
            flags=told.get("flags", ""),
            stamp=_stamp(line),
        )
    intel = _INTEL_FAULT.search(line.text)
    if not intel:
        return None
    return IommuFault(
        bdf=address(intel[2]) or "",
        kind=intel[1],
        address=intel[3] or "",
        reason=(intel[4] or "").strip(),
        stamp=_stamp(line),
    )


# --- memory that VFIO could not have --------------------------------------------------------------------------------

_REFUSED_BAR = re.compile(
    r"vfio-pci ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): BAR (\d)(?: \[mem [^\]]*\])?: can't reserve"
    r"(?: \[mem (0x[0-9a-f]+)-(0x[0-9a-f]+)[ \]])?"
)


@dataclass(frozen=True)
class RefusedBar:
    """A BAR that VFIO could not reserve, because something on the host holds it. ``end`` is inclusive."""

    bdf: str
    bar: int
    start: int | None
    end: int | None
    line: LogLine


def refused_bars(notes: Iterable[LogLine]) -> tuple[RefusedBar, ...]:
    """Return what VFIO could not reserve, one entry for each message."""
    hits = ((line, _REFUSED_BAR.search(line.text)) for line in notes)
    return tuple(
        RefusedBar(hit[1], int(hit[2]), int(hit[3], 16) if hit[3] else None, int(hit[4], 16) if hit[4] else None, line)
        for line, hit in hits
        if hit
    )


# --- windows of bridges ---------------------------------------------------------------------------------------------

_WINDOW = re.compile(
    r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): (BAR \d{1,2}|bridge window|VF BAR \d)"
    r"(?:: (no space for|failed to assign|assigned))? \[mem ([^\]]*)\]"
    r"(?:: (can't assign; no space|failed to assign|assigned))?"
)
_RANGE = re.compile(r"(?:size (0x[0-9a-f]+)|(0x[0-9a-f]+)-(0x[0-9a-f]+))(?=[ \]]|$)")


@dataclass(frozen=True)
class UnassignedWindow:
    """A resource for which the kernel found no place. ``resource``: bridge window, BAR 1 ..."""

    bdf: str
    resource: str
    size_bytes: int | None
    prefetchable: bool
    line: LogLine

    @property
    def is_bridge(self) -> bool:
        """Whether it is the window of a bridge: the kernel numbers those from 13 (older) or names them."""
        return self.resource == "bridge window" or self.resource in ("BAR 13", "BAR 14", "BAR 15")


def unassigned_windows(notes: Iterable[LogLine]) -> tuple[UnassignedWindow, ...]:
    """Return the memory resources that were still without a place when the log ends: a later success counts."""
    open_: dict[tuple[str, str, bool], UnassignedWindow] = {}
    notes = tuple(notes)
    if not any("no space" in line.text or "failed to assign" in line.text for line in notes):
        return ()
    for line in notes:
        found = _WINDOW.search(line.text)
        if not found:
            continue
        bdf, resource, before, what, after = found.groups()
        prefetchable = "pref" in what
        key = (bdf, resource, prefetchable)
        if (before or after) == "assigned":
            open_.pop(key, None)
        elif before or after:
            span = _RANGE.search(f"{what}]")
            size = None
            if span:
                size = int(span[1], 16) if span[1] else int(span[3], 16) - int(span[2], 16) + 1
            open_[key] = UnassignedWindow(bdf, resource, size, prefetchable, line)
    return tuple(open_.values())


def remapping(notes: Mapping[str, Sequence[LogLine]]) -> tuple[bool, str] | None:
    """Return (whether interrupt remapping is on, the line that says so), or None where no line does."""
    for kind, on in (("remapping_on", True), ("remapping_off", False)):
        if notes.get(kind):
            return on, notes[kind][0].text
    return None


def technology(notes: Mapping[str, Sequence[LogLine]]) -> tuple[str, str] | None:
    """Return (AMD-Vi or DMAR, the line). AMD's driver says on Intel machines that it has nothing to do there."""
    for line in (*notes.get("iommu", ()), *notes.get("remapping_on", ())):
        if "DMAR: IOMMU enabled" in line.text:
            return "DMAR", line.text
        if "AMD-Vi: " in line.text and "not available on this system" not in line.text:
            return "AMD-Vi", line.text
    return None
