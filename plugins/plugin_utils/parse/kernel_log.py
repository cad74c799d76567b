"""Kernel messages in every style of time stamp, and NVIDIA's Xid events among them."""

from __future__ import annotations

import re

from ..core.snapshot import KernelLog, LogLine, Xid
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


def parse(text: str) -> KernelLog:
    """Read a kernel log. Lines that nothing understands are kept too: rules look for their own texts."""
    found = tuple(_split(row) for row in lines(text) if row.strip())
    denied = _REFUSED.search(text) if len(found) <= 1 else None
    if denied:
        raise RefusedError(denied[0].strip())
    counts = (_SUPPRESSED.search(line.text) for line in found if "suppressed" in line.text)
    return KernelLog(
        lines=found,
        xids=tuple(xid for line in found if (xid := _xid(line))),
        suppressed=sum(int(hit[1]) for hit in counts if hit),
    )


def join(first: KernelLog, second: KernelLog) -> KernelLog:
    """Put two logs of one machine behind each other."""
    return KernelLog(first.lines + second.lines, first.xids + second.xids, first.suppressed + second.suppressed)


def _split(row: str) -> LogLine:
    rest, stamp, program = row, "", ""
    if not row.startswith("["):
        start = _PRIORITY.match(row)
        rest = row[start.end() :] if start else row
    journal = None if rest.startswith("[") else _JOURNAL.match(rest)
    if journal:
        stamp, program = journal[1], journal[2] or ""
        rest = rest[journal.end() :]
    bracket = _BRACKET.match(rest)
    if bracket:
        stamp = stamp or bracket[1]
        rest = rest[bracket.end() :]
    if program not in ("", "kernel"):
        rest = f"{program}: {rest}"
    return LogLine(stamp, rest.strip())


def _xid(line: LogLine) -> Xid | None:
    # Cheap test first: almost no line of a log is one.
    found = _XID.search(line.text) if "Xid" in line.text else None
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
    )
