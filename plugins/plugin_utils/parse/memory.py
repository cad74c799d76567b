"""The machine's memory, its NUMA nodes and its CPU time, from Peerlane's collector and from what people paste."""

from __future__ import annotations

import re

from ..core.snapshot import HugePages
from .text import lines, whole_number

_AMOUNT = re.compile(r"(\w+(?:\([\w]+\))?):\s+(\d+)(?: kB)?$")
_POOL = re.compile(r"hugepages (\d+) total=(\d+) free=(\d+)$")
_NODE = re.compile(r"node (\d+) cpus=([\d,-]*) mem_kib=(\d*)$")
_NODE_OF_LSCPU = re.compile(r"NUMA node(\d+) CPU\(s\):\s+([\d,-]+)$")
_NODE_OF_NUMACTL = re.compile(r"node (\d+) cpus:((?: \d+)*)$")
_CHOSEN = re.compile(r"transparent_hugepage: .*\[(\w+)\]")


def amounts(text: str) -> dict[str, int]:
    """Read ``/proc/meminfo``: KiB, or a count for ``HugePages_*``."""
    return {hit[1]: int(hit[2]) for row in lines(text) if (hit := _AMOUNT.match(row.strip()))}


def huge_pages(text: str) -> dict[int, HugePages] | None:
    """Return the pools by page size in KiB: of the collector's ``memory``, or the default one of ``/proc/meminfo``."""
    found = {
        int(hit[1]): HugePages(int(hit[2]), int(hit[3])) for row in lines(text) if (hit := _POOL.match(row.strip()))
    }
    if found:
        return found
    told = amounts(text)
    if {"Hugepagesize", "HugePages_Total", "HugePages_Free"} <= told.keys():
        return {told["Hugepagesize"]: HugePages(told["HugePages_Total"], told["HugePages_Free"])}
    return None


def node_cpus(text: str) -> dict[int, str] | None:
    """Return the CPUs of each NUMA node as the kernel lists them, from the collector, ``lscpu`` or ``numactl -H``."""
    found: dict[int, str] = {}
    for row in lines(text):
        bare = row.strip()
        hit = _NODE.match(bare) or _NODE_OF_LSCPU.match(bare)
        if hit:
            found[int(hit[1])] = hit[2]
        elif hit := _NODE_OF_NUMACTL.match(bare):
            found[int(hit[1])] = ranges([int(one) for one in hit[2].split()])
    return found or None


def ranges(numbers: list[int]) -> str:
    """Return numbers as the kernel lists CPUs: ``0-3,8``."""
    parts: list[list[int]] = []
    for one in sorted(set(numbers)):
        if parts and one == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], one]
        else:
            parts.append([one])
    return ",".join("-".join(map(str, part)) for part in parts)


def setting(text: str, name: str) -> int | None:
    """Return a number of the collector's ``memory``: ``ksm_run``, ``ksm_pages_sharing``, ``zfs_arc_max``."""
    found = re.search(rf"^\s*{name}: (\d+)\s*$", text, re.MULTILINE)
    return int(found[1]) if found else None


def transparent(text: str) -> str | None:
    """Return which mode of transparent huge pages is chosen: always, madvise or never."""
    found = _CHOSEN.search(text)
    return found[1] if found else None


def booted_at(text: str) -> int | None:
    """Return when the machine was booted, in seconds since 1970, from ``/proc/stat``."""
    found = re.search(r"^\s*btime (\d+)\s*$", text, re.MULTILINE)
    return whole_number(found[1]) if found else None


def steal_percent(text: str) -> float | None:
    """Return the share of CPU time since boot that the hypervisor gave to others, from ``/proc/stat``.

    The columns are user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5)); guest time is in user.
    """
    found = re.search(r"^\s*cpu +((?:\d+ ?){8,10})\s*$", text, re.MULTILINE)
    if not found:
        return None
    ticks = [int(one) for one in found[1].split()][:8]
    return round(100 * ticks[7] / sum(ticks), 3) if sum(ticks) else None


def cards(text: str) -> tuple[str, ...] | None:
    """Return the hardware addresses of the collector's ``net.cards``, or of ``ip link``, in lower case."""
    found = []
    for row in lines(text):
        hit = re.match(
            r"\S+ ((?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2})$|\s*link/ether ((?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2})\b", row
        )
        if hit:
            found.append((hit[1] or hit[2]).lower())
    return tuple(dict.fromkeys(found)) or None
