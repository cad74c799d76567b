"""Loose outputs of two machines in one place: a guest's driver beside the hypervisor's configuration of its VM.

People paste both into one report. Judged as one machine, the guest's GPUs would be the hypervisor's, and half of the
rules would not apply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ..core.evidence import Evidence, EvidenceSet

# What only a driver that holds the GPUs prints: a hypervisor that passes them has none.
_DRIVER = re.compile(
    r"nvidia_smi\.(?:topo_\w+|q|qx|query_gpu|nvlink_s|compute_apps)|proc\.driver\.nvidia\.(?:gpus|params)"
    r"|p2p_bandwidth_latency|simple_p2p|nvbandwidth|nccl_tests|nccl\.log"
)
_TABLE = re.compile(r"^\| NVIDIA-SMI \d|^\|\s+\d+\s+NVIDIA ", re.MULTILINE)
_PASSES = re.compile(r"^hostpci\d+:", re.MULTILINE)
_DOMAIN = re.compile(r"<hostdev\b[^>]*type=['\"]pci['\"]")
# What a text about any machine says in a guest only.
_IN_GUEST = re.compile(
    r"\bNVRM: |Hypervisor detected: KVM|\bDMI: QEMU|Red Hat, Inc\. Virtio|82G33|^flags\s.*\bhypervisor\b|^(?:kvm|qemu)$"
    r"|^sys_vendor: QEMU|Model name:\s+QEMU",
    re.MULTILINE,
)
_ON_HYPERVISOR = re.compile(r"vfio[-_]pci|\bvfio_bar|-pve\b")
# What stands for the machine in a file's name: guest-dmesg.txt, lspci.pve.txt.
_GUEST_NAME = re.compile(r"(?:^|[-_. /])(?:guest|vm)(?:[-_. /]|$)", re.IGNORECASE)
_HOST_NAME = re.compile(r"(?:^|[-_. /])(?:host|hypervisor|pve|proxmox|node)(?:[-_. /]|$)", re.IGNORECASE)


def apart(evidence: EvidenceSet, names: Mapping[str, str], prompts: Mapping[str, str]) -> list[EvidenceSet]:
    """Return the hypervisor and its guest where loose outputs tell both, else the evidence as it is.

    ``names`` holds the file's name and ``prompts`` the host of the shell prompt of each entry, where there is one. What
    tells no machine stays with the hypervisor. One host name in front of both kinds of outputs means one machine.
    """
    guest = {one for one in evidence.entries if _GUEST_NAME.search(names.get(one, ""))}
    host = {one for one in evidence.entries if _HOST_NAME.search(names.get(one, ""))} - guest
    if not (guest and host):
        guest = {entry.source for entry in evidence if _shows_driver(entry)} - host
        host |= {entry.source for entry in evidence if _shows_hypervisor(entry)} - guest
    if not guest or not host:
        return [evidence]
    inside = {prompts[one] for one in guest if one in prompts}
    outside = {prompts[one] for one in host if one in prompts}
    if inside & outside:
        return [evidence]
    for entry in evidence:
        if entry.source not in guest | host and _belongs_inside(entry, prompts.get(entry.source, ""), inside, outside):
            guest.add(entry.source)
    name = inside.pop() if len(inside) == 1 else f"{evidence.host}-guest"
    kept = {one: entry for one, entry in evidence.entries.items() if one not in guest}
    moved = {one: entry for one, entry in evidence.entries.items() if one in guest}
    return [
        replace(evidence, entries=kept),
        EvidenceSet(host=name, entries=moved, inventory={"hypervisor": evidence.host}),
    ]


def _shows_driver(entry: Evidence) -> bool:
    base = entry.source.partition("@")[0]
    return bool(_DRIVER.fullmatch(base) or (base == "nvidia_smi" and _TABLE.search(entry.stdout)))


def _shows_hypervisor(entry: Evidence) -> bool:
    if entry.source.startswith("pve.conf."):
        return bool(_PASSES.search(entry.stdout))
    return entry.source.partition("@")[0] == "libvirt.domains" and bool(_DOMAIN.search(entry.stdout))


def _belongs_inside(entry: Evidence, prompt: str, inside: set[str], outside: set[str]) -> bool:
    if entry.source.startswith(("pve.", "libvirt.")):
        return False
    if prompt and (prompt in inside or prompt in outside):
        return prompt in inside
    return bool(_IN_GUEST.search(entry.stdout)) and not _ON_HYPERVISOR.search(entry.stdout)
