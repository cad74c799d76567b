"""Facts of the virtual machines of a hypervisor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..core.evidence import Evidence
from ..core.snapshot import Fact, MappingClaim, Vm, VmConfig, unknown
from ..core.values import changed
from . import kernel, libvirt, platform, proxmox
from .facts import Reading, Sources, said
from .text import RefusedError, files, shorten, whole_number

T = TypeVar("T")
_ONE_A_LINE = re.compile(r"^[ \t]*(?:-(?:id|name|device)|# ==> vm [^\n]*)[ \t\r]*$", re.MULTILINE)


def vm(sources: Sources) -> Vm:
    """Read the configurations of all VMs, what is pending and running, and what their settings refer to."""
    claims = _mapping_claims(sources)
    return Vm(
        configs=_configs(sources),
        mappings=_mappings(claims),
        mapping_claims=claims,
        reservations=_reservations(sources),
        rom_files=sources.fact(_rom_files, "pve.rom_files"),
        vhost_max_mem_regions=sources.fact(_regions, "vhost.max_mem_regions"),
        start_logs=sources.fact(_start_logs, "pve.start_log"),
        qemu_replaced=sources.fact(_replaced, "pve.qemu_binaries"),
        cpu_models=sources.fact(_cpu_models, "pve.cpu_models"),
        qemu_version=sources.fact(_qemu_version, "kvm.version", "pve.version"),
        pve_version=sources.fact(_pve_version, "pve.version"),
    )


def _start_logs(text: str) -> Reading[Mapping[str, tuple[str, ...]]]:
    return platform.start_logs(text), ""


def _replaced(text: str) -> Reading[Mapping[str, bool]]:
    return platform.replaced_binaries(text), text.strip()


def _configs(sources: Sources) -> Fact[Mapping[str, VmConfig]]:
    configs, refusal = _proxmox_configs(sources)
    domains, refused = _libvirt_domains(sources)
    configs.update(domains)
    nowhere = sources.absent("pve.conf")
    if not configs and nowhere.startswith("no file matches"):
        return Fact({}, "pve.conf", nowhere)
    if not configs:
        return unknown(
            refusal or refused or nowhere or "no configuration of a virtual machine was collected", "pve.conf"
        )
    return Fact(configs, next(iter(configs.values())).source, shorten(_telling_lines(configs)))


def _proxmox_configs(sources: Sources) -> tuple[dict[str, VmConfig], str]:
    """Return the Proxmox VMs, and why a file was refused."""
    pending = {**_pending_by_name(sources), **_by_vm(sources.entries("pve.qm_pending"), proxmox.qm_pending)}
    planned = _by_vm(sources.entries("pve.showcmd"), proxmox.command_lines)
    running = _by_vm(sources.entries("pve.running"), proxmox.processes)
    configs: dict[str, VmConfig] = {}
    refusal = ""
    family = {name: entry for name, entry in sources.evidence.family("pve.conf").items() if entry.stdout.strip()}
    for vmid, entry in family.items():
        try:
            # The collector names the file on the node; what was pasted, or cut by the collector, may be part of it.
            whole = entry.path.startswith("/etc/pve/") and not entry.truncated
            configs[vmid] = proxmox.conf(vmid, entry.stdout, entry.source, whole)
        except RefusedError as error:
            refusal = refusal or f"{entry.source}: {error}"
    alone = len(family) == 1
    if not family:
        configs = {vmid: _current(vmid, told) for vmid, told in pending.items() if vmid and told.current}
    for vmid, config in configs.items():
        waiting = pending.get(vmid) or (pending.get("") if alone else None)
        if waiting:
            config = changed(
                config,
                pending={**(config.pending or {}), **waiting.new},
                pending_deletes=tuple(dict.fromkeys((*config.pending_deletes, *waiting.deletes))),
            )
        # A file that was pasted under another name belongs to the only command line that came with it.
        config = _with_process(config, _of_vm(running, vmid, alone), sources, "pve.running")
        words = _of_vm(planned, vmid, alone)
        if words:
            config = changed(config, planned_arguments=Fact(words, "pve.showcmd", shorten(_telling_words(words))))
        configs[vmid] = config
    return configs, refusal


def _of_vm(found: Mapping[str, T], vmid: str, alone: bool) -> T | None:
    return found.get(vmid) or (next(iter(found.values())) if alone and len(found) == 1 and not vmid.isdigit() else None)


def _current(vmid: str, told: proxmox.Pending) -> VmConfig:
    """Make a configuration of what ``qm pending`` calls current, where the file itself is not at hand."""
    printed = {key: f"cur {key}: {given}" for key, given in told.current.items()}
    return VmConfig(
        vmid=vmid,
        settings=told.current,
        lines=printed,
        hostpci=proxmox.hostpci(told.current, printed),
        source="pve.qm_pending",
    )


def _libvirt_domains(sources: Sources) -> tuple[dict[str, VmConfig], str]:
    """Return the libvirt domains, and why a file was refused."""
    running = _by_vm(sources.entries("libvirt.running"), proxmox.processes)
    configs: dict[str, VmConfig] = {}
    refusal = ""
    for entry in sources.entries("libvirt.domains"):
        for path, text in files(entry.stdout):
            try:
                config = libvirt.domain(text, entry.source)
            except RefusedError as error:
                refusal = refusal or f"{path or entry.source}: {error}"
                continue
            configs[config.vmid] = _with_process(config, running.get(config.vmid), sources, "libvirt.running")
    return configs, refusal


def _pending_by_name(sources: Sources) -> dict[str, proxmox.Pending]:
    """Read ``qm pending`` that was pasted with its command, which names the VM."""
    found = {}
    for vmid, entry in sources.evidence.family("pve.qm_pending").items():
        if vmid.isdigit():
            blocks = proxmox.qm_pending(entry.stdout)
            told = blocks.get(vmid) or blocks.get("")
            if told:
                found[vmid] = told
    return found


def _by_vm(entries: list[Evidence], read: Callable[[str], Mapping[str, T]]) -> dict[str, T]:
    return {vmid: told for entry in entries for vmid, told in read(entry.stdout).items()}


def _with_process(config: VmConfig, process: proxmox.Process | None, sources: Sources, source: str) -> VmConfig:
    pasted = any(entry.pasted for entry in sources.entries(source))
    if process is None and not pasted and any(_lists_all(entry.stdout) for entry in sources.entries(source)):
        stopped: Fact[bool] = Fact(False, source, "")
        return changed(config, running=stopped, running_arguments=unknown("the VM does not run", source))
    if process is None:
        reason = sources.missing(source)
        return changed(config, running=reason, running_arguments=reason)
    line = shorten(_telling_words(process.arguments))

    def told(value: T | None, words: str) -> Fact[T]:
        return unknown(f"{source} does not tell it", source) if value in (None, "") else Fact(value, source, words)

    return changed(
        config,
        running=Fact(True, source, line),
        running_arguments=unknown(f"{source} may be cut: the end of the arguments is not there", source)
        if any(entry.pasted and _ONE_A_LINE.search(entry.stdout) for entry in sources.entries(source))
        and not _is_whole(process.arguments, config)
        else Fact(process.arguments, source, line),
        running_cpus=told(process.cpus, f"Cpus_allowed_list: {process.cpus}"),
        started_at=told(process.started_at, f"started {process.started_at}"),
        changed_at=told(process.changed_at, f"changed {process.changed_at}"),
    )


def _is_whole(arguments: tuple[str, ...], config: VmConfig) -> bool:
    """Whether these are all arguments of a process: Proxmox gives ``-machine`` near the end, then the VM's ``args``."""
    own = config.settings.get("args", "").split()
    return "-machine" in arguments and (not own or own[-1] in arguments[-len(own) :])


def _lists_all(text: str) -> bool:
    """Whether these are all processes, as the collector lists them; a paste may be of one of them."""
    return not text.strip() or "# ==> vm " in text


def _telling_words(arguments: tuple[str, ...]) -> list[str]:
    return [
        word for word in arguments if any(one in word for one in ("hostpci", "hostdev", "kvm=", "clique", "vfio-pci"))
    ]


def _telling_lines(configs: Mapping[str, VmConfig]) -> list[str]:
    return [f"{vmid}: {one.line}" for vmid, config in configs.items() for one in config.hostpci]


def _mapping_claims(sources: Sources) -> Fact[tuple[MappingClaim, ...]]:
    names = [sources.evidence.host, sources.evidence.host.partition(".")[0]]
    names += [name for entry in sources.entries("uname") if (name := kernel.node_name(entry.stdout))]

    def read(text: str) -> Reading[tuple[MappingClaim, ...]]:
        return said(proxmox.mapping_claims(text, tuple(names)), text, r"^\s+map ")

    return sources.fact(read, "pve.mapping.pci")


def _mappings(claims: Fact[tuple[MappingClaim, ...]]) -> Fact[Mapping[str, tuple[str, ...]]]:
    if claims.value is None:
        return unknown(claims.reason, claims.source)
    return Fact(proxmox.mappings(claims.value), claims.source, claims.excerpt)


def _reservations(sources: Sources) -> Fact[Mapping[str, str]]:
    nowhere = sources.absent("pve.reservations")
    if nowhere:
        return Fact({}, "pve.reservations", nowhere)
    return sources.fact(lambda text: (proxmox.reservations(text), text.strip()), "pve.reservations")


def _rom_files(text: str) -> Reading[tuple[str, ...]]:
    return tuple(text.split()), f"{len(text.split())} files in /usr/share/kvm"


def _regions(text: str) -> Reading[int]:
    return said(whole_number(text), text, r"\d+")


def _cpu_models(text: str) -> Reading[Mapping[str, Mapping[str, str]]]:
    return said(proxmox.cpu_models(text) or None, text, r"^cpu-model:")


def _qemu_version(text: str) -> Reading[str]:
    return said(proxmox.qemu_version(text), text, r"QEMU emulator version|pve-qemu-kvm")


def _pve_version(text: str) -> Reading[str]:
    return said(proxmox.pve_version(text), text, r"pve-manager")
