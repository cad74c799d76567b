"""Facts of the machine, its processor and its kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..core.snapshot import BootTool, CommandLine, Cpu, Fact, Initramfs, Kernel, KernelLog, Machine, Memory
from . import kernel as kernel_text
from . import kernel_log, proxmox
from . import machine as machine_text
from . import memory as memory_text
from . import platform as platform_text
from .facts import Reading, Sources, said
from .text import RefusedError, files, first_line, shorten

T = TypeVar("T")


def machine(sources: Sources, kernel: Kernel) -> Machine:
    """Read what the machine says it is."""
    return Machine(
        virt=sources.fact(partial(_virtualisation, machine_text.VIRTUAL_MACHINES), "detect_virt.vm"),
        container=sources.fact(partial(_virtualisation, machine_text.CONTAINERS), "detect_virt.container"),
        product_name=sources.fact(partial(_key, "product_name"), "dmi"),
        sys_vendor=sources.fact(partial(_key, "sys_vendor"), "dmi"),
        board_name=sources.fact(partial(_key, "board_name"), "dmi"),
        bios_version=sources.fact(partial(_key, "bios_version"), "dmi"),
        smbios_uuid=sources.fact(_smbios_uuid, "dmi"),
        os_id=sources.fact(_os_id, "os_release", "hostnamectl"),
        os_version=sources.fact(_os_version, "os_release"),
        is_proxmox=_is_proxmox(sources, kernel),
        systemd=sources.fact(_systemd, "systemctl.version", "hostnamectl"),
        macs=sources.fact(lambda text: said(memory_text.cards(text), text, r"\S"), "net.cards"),
        booted_at=sources.fact(lambda text: said(memory_text.booted_at(text), text, r"^\s*btime "), "proc.stat"),
        steal_percent=sources.fact(lambda text: said(memory_text.steal_percent(text), text, r"^\s*cpu "), "proc.stat"),
    )


def memory(sources: Sources) -> Memory:
    """Read the machine's memory, and what shares or reserves it."""

    def amount(name: str) -> Fact[int]:
        return sources.fact(partial(_amount, name), "proc.meminfo")

    def setting(name: str) -> Fact[int]:
        return sources.fact(partial(_setting, name), "memory")

    return Memory(
        total_kib=amount("MemTotal"),
        available_kib=amount("MemAvailable"),
        huge_pages=sources.fact(
            lambda text: said(memory_text.huge_pages(text), text, r"^\s*(?:hugepages|HugePages_Total)"),
            "memory",
            "proc.meminfo",
        ),
        ksm_run=setting("ksm_run"),
        ksm_pages_sharing=setting("ksm_pages_sharing"),
        transparent=sources.fact(
            lambda text: said(memory_text.transparent(text), text, "transparent_hugepage"), "memory"
        ),
        node_cpus=sources.fact(_node_cpus, "memory", "numactl", "proc.cpuinfo"),
        zfs_arc_max_bytes=setting("zfs_arc_max"),
    )


def _amount(name: str, text: str) -> Reading[int]:
    return said(memory_text.amounts(text).get(name), text, rf"^\s*{name}:")


def _setting(name: str, text: str) -> Reading[int]:
    return said(memory_text.setting(text, name), text, rf"^\s*{name}:")


def _node_cpus(text: str) -> Reading[Mapping[int, str]]:
    found = memory_text.node_cpus(text)
    rows = [row.strip() for row in text.split("\n") if re.match(r"\s*(?:node \d+ cpus|NUMA node\d)", row)]
    return (found, shorten(rows)) if found else None


def _virtualisation(words: frozenset[str], text: str) -> Reading[str]:
    return said(machine_text.virtualisation(text, words), text, r"\S")


def _key(name: str, text: str) -> Reading[str]:
    return said(machine_text.keys(text).get(name) or None, text, rf"^\s*{name}:")


def _smbios_uuid(text: str) -> Reading[str]:
    found = _key("product_uuid", text)
    return (found[0].lower(), found[1]) if found else None


def _os_id(text: str) -> Reading[str]:
    found = machine_text.os_release(text).get("ID")
    if found:
        return said(found, text, r"^\s*ID=")
    named = machine_text.keys(text).get("Operating System", "").split()
    return said(named[0].lower() if named else None, text, r"Operating System:")


def _os_version(text: str) -> Reading[str]:
    return said(machine_text.os_release(text).get("VERSION_ID"), text, r"^\s*VERSION_ID=")


def _systemd(text: str) -> Reading[str]:
    found = re.search(r"^\s*systemd (\d{1,4})\b.*$", text, re.MULTILINE)
    return (found[1], found[0].strip()) if found else None


def _clocksource(text: str) -> Reading[str]:
    words = _clocksources(text, "current")
    return (words[0], f"current_clocksource: {words[0]}") if words else None


def _available_clocksources(text: str) -> Reading[tuple[str, ...]]:
    words = _clocksources(text, "available")
    return (words, f"available_clocksource: {' '.join(words)}") if words else None


def _clocksources(text: str, which: str) -> tuple[str, ...]:
    return next((tuple(part.split()) for path, part in files(text) if path.endswith(f"{which}_clocksource")), ())


def _is_proxmox(sources: Sources, kernel: Kernel) -> Fact[bool]:
    for entry in sources.evidence:
        if entry.source.startswith("pve.") and entry.stdout.strip():
            return Fact(True, entry.source, first_line(entry.stdout, r"\S"))
    if (kernel.release.value or "").endswith("-pve"):
        return Fact(True, kernel.release.source, kernel.release.excerpt)
    if sources.absent("pve.version"):
        return Fact(False, "pve.version", sources.absent("pve.version"))
    for entry in sources.entries("dpkg"):
        line = first_line(entry.stdout, r"^.{2,4}\s+(?:pve-manager|proxmox-ve)\s")
        return Fact(bool(line), entry.source, line)
    return sources.missing("pve.version")


def cpu(sources: Sources) -> Cpu:
    """Read the first processor."""

    def of(name: str, pattern: str) -> Fact[Any]:
        return sources.fact(partial(_of_processor, name, pattern), "proc.cpuinfo")

    return Cpu(
        vendor=of("vendor", r"^\s*vendor.id"),
        model_name=of("model_name", r"^\s*model name"),
        flags=of("flags", r"^\s*flags"),
        physical_bits=of("physical_bits", r"address sizes"),
        virtual_bits=of("virtual_bits", r"address sizes"),
        threads=of("threads", r"^\s*(?:processors|CPU\(s\))\s*:"),
    )


def _of_processor(name: str, pattern: str, text: str) -> Reading[Any]:
    return said(getattr(machine_text.processor(text), name), text, pattern)


def kernel(sources: Sources) -> Kernel:
    """Read the running kernel, how it is configured and what it said."""
    log = _log(sources)
    running = sources.fact(_command_line, "proc.cmdline")
    if not running.known:
        running = _command_line_of_log(log) or running
    lockdown = sources.fact(_lockdown, "lockdown")
    return Kernel(
        release=_release(sources, running),
        command_line=running,
        boot_loader=_boot_loader(sources, running),
        grub_default=sources.fact(_grub_default, "etc.default.grub"),
        grub_settings=sources.fact(_grub_settings, "etc.default.grub"),
        etc_kernel_cmdline=sources.fact(_etc_cmdline, "etc.kernel.cmdline"),
        log=log,
        modules=sources.fact(_modules, "proc.modules"),
        modprobe=_modprobe(sources),
        installed=sources.fact(partial(_kernels, ("modules", "image")), "kernels"),
        headers=sources.fact(partial(_kernels, ("headers",)), "kernels"),
        lockdown=lockdown if lockdown.known else _lockdown_of_log(log) or lockdown,
        modules_load=sources.fact(_modules_load, "modules_load.d"),
        parameters=sources.fact(_parameters, "module_parameters"),
        initramfs=sources.fact(_initramfs, "initramfs"),
        boot_tool=sources.fact(_boot_tool, "proxmox_boot_tool.status"),
        interrupt_chips=sources.fact(_interrupt_chips, "proc.interrupts"),
        clocksource=sources.fact(_clocksource, "clocksource"),
        clocksources=sources.fact(_available_clocksources, "clocksource"),
    )


def _log(sources: Sources) -> Fact[KernelLog]:
    """Join all kernel logs. QEMU's complaints stand behind them: they are about the same devices."""
    joined, used, refusal = KernelLog(), [], ""
    for entry in sources.entries("kernel_log", "qemu.log"):
        try:
            read = kernel_log.parse(entry.text)
            if entry.pasted or entry.truncated:
                # Its end or its middle may be missing, whatever it starts with.
                read = replace(read, from_boot=False)
            joined = kernel_log.join(joined, read)
        except RefusedError as error:
            refusal = refusal or f"{entry.source}: {error}"
            continue
        used.append(entry.source)
    if not joined.lines:
        return sources.missing("kernel_log", refusal=refusal)
    xids = [line.text for line in joined.lines if "NVRM: Xid" in line.text]
    return Fact(joined, used[0] if len(used) == 1 else "kernel_log", shorten(xids or [joined.lines[0].text]))


def _command_line(text: str) -> Reading[CommandLine]:
    return kernel_text.command_line(text), " ".join(text.split())


def _command_line_of_log(log: Fact[KernelLog]) -> Fact[CommandLine] | None:
    for line in log.value.lines if log.value else ():
        head, _, told = line.text.partition("ommand line: ")
        if told.strip() and head in ("C", "Kernel c"):
            return Fact(kernel_text.command_line(told), log.source, line.text)
    return None


def _release(sources: Sources, running: Fact[CommandLine]) -> Fact[str]:
    fact = sources.fact(_release_in_words, "uname", "proc.version", "kernels", "hostnamectl", "pve.version")
    if not fact.known and running.value:
        named = kernel_text.release_of_image(running.value)
        if named:
            return Fact(named, running.source, running.excerpt)
    return fact


def _release_in_words(text: str) -> Reading[str]:
    booted = next((one.release for one in kernel_text.installed_kernels(text) if one.marks.get("running")), None)
    found = kernel_text.release(text) or booted or proxmox.running_kernel(text)
    return said(found, text, "Linux|running")


def _boot_loader(sources: Sources, running: Fact[CommandLine]) -> Fact[str]:
    boot = "".join(entry.stdout for entry in sources.entries("boot"))
    status = "".join(entry.stdout for entry in sources.entries("proxmox_boot_tool.status"))
    found = kernel_text.boot_loader(running.value, boot, status)
    if found is None:
        refusal = "nothing in boot, proxmox_boot_tool.status or proc.cmdline tells the boot loader"
        return sources.missing("boot", refusal=refusal)
    name, words = found
    source = "boot" if words in boot else "proxmox_boot_tool.status" if words in status else running.source
    return Fact(name, source, words)


def _grub_default(text: str) -> Reading[CommandLine]:
    grub = kernel_text.grub(text)
    return None if grub.kernel is None else (grub.kernel, grub.excerpt)


def _grub_settings(text: str) -> Reading[Mapping[str, str]]:
    grub = kernel_text.grub(text)
    return dict(grub.settings), grub.excerpt or first_line(text, r"^\s*(?:export\s+)?GRUB_")


def _etc_cmdline(text: str) -> Reading[CommandLine]:
    return kernel_text.etc_cmdline(text), text.strip()


def _modules(text: str) -> Reading[Mapping[str, int]]:
    return said(kernel_text.loaded_modules(text) or None, text, r"^nvidia|^nouveau|^nova|^vfio|^\w+ +\d")


def _modprobe(sources: Sources) -> Fact[tuple[str, ...]]:
    entries = sources.entries("modprobe.d")
    if not entries and sources.absent("modprobe.d"):
        return Fact((), "modprobe.d", sources.absent("modprobe.d"))
    if not entries:
        return sources.missing("modprobe.d")
    rows = tuple(row for entry in entries for row in kernel_text.modprobe_lines(entry.stdout))
    telling = [row for row in rows if any(word in row for word in ("nvidia", "nouveau", "nova", "vfio"))]
    return Fact(rows, entries[0].source, shorten(telling))


def _modules_load(text: str) -> Reading[tuple[str, ...]]:
    names = tuple(name for _, part in files(text) for name in platform_text.modules_load(part))
    return tuple(dict.fromkeys(names)), shorten(list(dict.fromkeys(names)))


def _parameters(text: str) -> Reading[Mapping[str, str]]:
    return platform_text.parameters(text), text.strip()


def _initramfs(text: str) -> Reading[Initramfs]:
    found = platform_text.initramfs(text)
    return found, shorten([row.strip() for row in text.split("\n") if row.strip()])


def _boot_tool(text: str) -> Reading[BootTool]:
    return platform_text.boot_tool(text), text.strip()


def _interrupt_chips(text: str) -> Reading[Mapping[str, int]]:
    return said(platform_text.interrupt_chips(text) or None, text, r"^(?:IR-)?PCI-MSI|IO-APIC")


def _kernels(marks: tuple[str, ...], text: str) -> Reading[tuple[str, ...]]:
    kernels = kernel_text.installed_kernels(text)
    found = tuple(one.release for one in kernels if any(one.marks.get(mark) for mark in marks))
    return (found, text.strip()) if kernels else None


def _lockdown(text: str) -> Reading[str]:
    return said(kernel_text.lockdown(text), text, r"\[")


def _lockdown_of_log(log: Fact[KernelLog]) -> Fact[str] | None:
    """Distributions lock down to ``integrity`` where the firmware's Secure Boot is the cause."""
    words = "Kernel is locked down from EFI Secure Boot"
    told = log.value.matching(words, words.lower()) if log.value else ()
    return Fact("integrity", log.source, told[0].text) if told else None
