"""The platform below the drivers: memory map, interrupts, module parameters, initial RAM disk, boot tool, VM starts."""

from __future__ import annotations

import re

from ..core.snapshot import BootTool, Initramfs, MemoryRange
from .text import RefusedError, lines, whole_number

_RANGE = re.compile(r"( *)([0-9a-f]{1,16})-([0-9a-f]{1,16}) : (.+)")
_PAIR = re.compile(r"(\S+) (\d{1,9})")
# A row of /proc/interrupts: counts of each CPU, then the chip, from newer kernels with its device.
_INTERRUPT = re.compile(r"\d+:(?:\s+\d+)+\s+([A-Z][\w-]*?)(?:-[0-9a-f]{4}:\S+)?\s.*")
# The collector's line, or one of `grep . /sys/module/vfio*/parameters/*`.
_PARAMETER = re.compile(r"([a-z][\w-]*\.\w+) (\S.*)|/sys/module/([\w-]+)/parameters/(\w+):(.+)")
_PARTITION = re.compile(r"(?:WARN: )?([0-9A-F]{4}-[0-9A-F]{4}|\S+) is configured with: (.*)")
_CONFIGURED = re.compile(r"(uefi|grub)(?: \(versions: ([^)]*)\))?")
_BOOTED = re.compile(r"System currently booted with (\S.*)")
_START = re.compile(r"# ==> vm (\S+) task (\d+) <==")
_BINARY = re.compile(r"vm (\S+) pid \d+ replaced=(yes|no)")
_LISTED_MODULE = re.compile(r"/((?:vfio|nouveau|nvidia|nova|snd[-_]hda|i2c[-_]nvidia|ucsi)[\w-]*)\.ko")


def memory_map(text: str) -> tuple[MemoryRange, ...]:
    """Read ``/proc/iomem``. Without root the kernel prints every address as zero: refused then."""
    found = []
    for row in lines(text):
        hit = _RANGE.fullmatch(row)
        if hit:
            found.append(MemoryRange(int(hit[2], 16), int(hit[3], 16), hit[4].strip(), len(hit[1]) // 2))
    if not found:
        raise RefusedError("has no line `START-END : NAME`")
    if all(one.end == 0 for one in found):
        raise RefusedError("was read without root: all its addresses are zero")
    return tuple(found)


def interrupt_chips(text: str) -> dict[str, int]:
    """Read ``IR-PCI-MSI 24`` lines, or ``/proc/interrupts`` itself: chip to the number of its lines."""
    found: dict[str, int] = {}
    for row in lines(text):
        pair = _PAIR.fullmatch(row.strip())
        raw = None if pair else _INTERRUPT.fullmatch(row.strip())
        if pair:
            found[pair[1]] = int(pair[2])
        elif raw:
            found[raw[1]] = found.get(raw[1], 0) + 1
    return found


def parameters(text: str) -> dict[str, str]:
    """Read ``vfio_pci.disable_idle_d3 N`` lines, or ``/sys/module/vfio_pci/parameters/disable_idle_d3:N``."""
    hits = [hit for row in lines(text) if (hit := _PARAMETER.fullmatch(row.strip()))]
    return {hit[1] or f"{hit[3]}.{hit[4]}": (hit[2] or hit[5]).strip() for hit in hits}


def modules_load(text: str) -> tuple[str, ...]:
    """Read ``/etc/modules`` and modules-load.d: one name a line, options behind it, ``#`` and ``;`` comments."""
    names = []
    for row in lines(text):
        bare = row.strip()
        if bare and not bare.startswith(("#", ";")):
            names.append(bare.split()[0])
    return tuple(dict.fromkeys(names))


def initramfs(text: str) -> Initramfs:
    """Read the collector's lines, or what ``lsinitramfs`` prints (then without times)."""
    image, config = "", ""
    modified: int | None = None
    config_modified: int | None = None
    listed = False
    names: list[str] = []
    for row in lines(text):
        words = row.split()
        if len(words) == 4 and words[2] == "modified":
            if words[0] == "image":
                image, modified = words[1], whole_number(words[3])
            elif words[0] == "config":
                config, config_modified = words[1], whole_number(words[3])
        elif words == ["listed", "yes"]:
            listed = True
        elif len(words) == 2 and words[0] == "module":
            names.append(words[1])
        elif hit := _LISTED_MODULE.search(row):
            names.append(hit[1])
    # A pasted listing may be what somebody's grep let through: what it lacks is not known to be missing.
    known = tuple(dict.fromkeys(name.replace("-", "_") for name in names)) if listed or names else None
    return Initramfs(image, modified, known, config, config_modified)


def boot_tool(text: str) -> BootTool:
    """Read ``proxmox-boot-tool status``: ``E5AD-1F20 is configured with: uefi (versions: 6.8.12-4-pve, ...)``."""
    booted, partitions = "", {}
    for row in lines(text):
        how, partition = _BOOTED.fullmatch(row.strip()), _PARTITION.fullmatch(row.strip())
        if how:
            booted = how[1].strip()
        elif partition:
            partitions[partition[1]] = {
                loader: tuple(name.strip() for name in versions.split(",") if name.strip())
                for loader, versions in _CONFIGURED.findall(partition[2])
            }
    if not booted and not partitions:
        raise RefusedError("names no EFI system partition")
    return BootTool(booted, partitions)


def start_logs(text: str) -> dict[str, tuple[str, ...]]:
    """Read the logs of VM starts: vmid to lines."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for row in lines(text):
        header = _START.fullmatch(row.strip())
        if header:
            current = found.setdefault(header[1], [])
        elif current is not None and row.strip():
            current.append(row.strip())
    return {vmid: tuple(rows) for vmid, rows in found.items()}


def replaced_binaries(text: str) -> dict[str, bool]:
    """Read ``vm 101 pid 4711 replaced=yes`` lines: vmid to whether QEMU's file changed since the start."""
    return {hit[1]: hit[2] == "yes" for row in lines(text) if (hit := _BINARY.fullmatch(row.strip()))}
