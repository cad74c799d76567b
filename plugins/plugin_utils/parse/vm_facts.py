"""Facts of the virtual machines of a hypervisor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from ..core.evidence import Evidence
from ..core.snapshot import Fact, Vm, VmConfig, unknown
from . import kernel, proxmox
from .facts import Reading, Sources, said
from .text import RefusedError, shorten

T = TypeVar("T")


def vm(sources: Sources) -> Vm:
    """Read the configurations of all VMs, what is pending and running, and the files that they refer to."""
    return Vm(
        configs=_configs(sources),
        mappings=_mappings(sources),
        cpu_models=sources.fact(_cpu_models, "pve.cpu_models"),
        qemu_version=sources.fact(_qemu_version, "kvm.version", "pve.version"),
        pve_version=sources.fact(_pve_version, "pve.version"),
    )


def _configs(sources: Sources) -> Fact[Mapping[str, VmConfig]]:
    pending = _by_vm(sources.entries("pve.qm_pending"), proxmox.qm_pending)
    running = _by_vm(sources.entries("pve.running"), proxmox.running)
    asked_running = bool(sources.entries("pve.running"))
    configs: dict[str, VmConfig] = {}
    refusal = ""
    family = {name: entry for name, entry in sources.evidence.family("pve.conf").items() if entry.stdout.strip()}
    for vmid, entry in family.items():
        try:
            # The collector names the file on the node; what was pasted may be part of it.
            config = proxmox.conf(vmid, entry.stdout, entry.source, whole=entry.path.startswith("/etc/pve/"))
        except RefusedError as error:
            refusal = refusal or f"{entry.source}: {error}"
            continue
        told = pending.get(vmid) or (pending.get("") if len(family) == 1 else None)
        if told:
            config = replace(config, pending={**(config.pending or {}), **told.new})
            config = replace(config, pending_deletes=tuple(dict.fromkeys((*config.pending_deletes, *told.deletes))))
        configs[vmid] = _with_process(config, running.get(vmid), asked_running, sources)
    nowhere = sources.absent("pve.conf")
    if not configs and nowhere.startswith("no file matches"):
        return Fact({}, "pve.conf", nowhere)
    if not configs:
        return unknown(refusal or nowhere or "no configuration of a Proxmox VM was collected", "pve.conf")
    return Fact(configs, next(iter(family.values())).source, shorten(_telling_lines(configs)))


def _by_vm(entries: list[Evidence], read: Callable[[str], Mapping[str, T]]) -> dict[str, T]:
    return {vmid: told for entry in entries for vmid, told in read(entry.stdout).items()}


def _with_process(config: VmConfig, arguments: tuple[str, ...] | None, asked: bool, sources: Sources) -> VmConfig:
    if arguments is not None:
        line = shorten([word for word in arguments if "hostpci" in word or "kvm=" in word or "clique" in word])
        is_running: Fact[bool] = Fact(True, "pve.running", line)
        return replace(config, running=is_running, running_arguments=Fact(arguments, "pve.running", line))
    if asked:
        stopped: Fact[bool] = Fact(False, "pve.running", "")
        return replace(config, running=stopped, running_arguments=unknown("the VM does not run", "pve.running"))
    reason = sources.missing("pve.running")
    return replace(config, running=reason, running_arguments=reason)


def _telling_lines(configs: Mapping[str, VmConfig]) -> list[str]:
    return [f"{vmid}: {one.line}" for vmid, config in configs.items() for one in config.hostpci]


def _mappings(sources: Sources) -> Fact[Mapping[str, tuple[str, ...]]]:
    names = [sources.evidence.host, sources.evidence.host.partition(".")[0]]
    names += [name for entry in sources.entries("uname") if (name := kernel.node_name(entry.stdout))]

    def read(text: str) -> Reading[Mapping[str, tuple[str, ...]]]:
        return said(proxmox.mappings(text, tuple(names)), text, r"^\s+map ")

    return sources.fact(read, "pve.mapping.pci")


def _cpu_models(text: str) -> Reading[Mapping[str, Mapping[str, str]]]:
    return said(proxmox.cpu_models(text) or None, text, r"^cpu-model:")


def _qemu_version(text: str) -> Reading[str]:
    return said(proxmox.qemu_version(text), text, r"QEMU emulator version|pve-qemu-kvm")


def _pve_version(text: str) -> Reading[str]:
    return said(proxmox.pve_version(text), text, r"pve-manager")
