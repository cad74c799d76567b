"""The door of this room: all evidence of one host in, one typed snapshot out."""

from __future__ import annotations

from ..core.evidence import EvidenceSet
from ..core.snapshot import Snapshot
from . import device_facts, driver_facts, host_facts, role, vm_facts
from .facts import Sources


def build(evidence: EvidenceSet) -> Snapshot:
    """Parse everything. What could not be read becomes a fact without a value and with the reason."""
    sources = Sources(evidence)
    kernel = host_facts.kernel(sources)
    machine = host_facts.machine(sources, kernel)
    cpu = host_facts.cpu(sources)
    pci = device_facts.pci(sources)
    smi = driver_facts.smi(sources)
    gpus = driver_facts.gpus(sources, smi)
    return Snapshot(
        host=evidence.host,
        role=role.decide(sources, machine, cpu, kernel, pci, gpus),
        collected_at=evidence.collected_at,
        privileged=evidence.privileged,
        machine=machine,
        cpu=cpu,
        kernel=kernel,
        pci=pci,
        iommu=device_facts.iommu(sources, pci, kernel.log),
        gpus=gpus,
        topology=device_facts.topology(sources),
        p2p=device_facts.p2p(sources),
        vm=vm_facts.vm(sources),
        driver=driver_facts.driver(sources, smi),
        nccl=driver_facts.nccl(sources),
        evidence_index={entry.source: "" if entry.usable else evidence.why_missing(entry.source) for entry in evidence},
        unrecognised=evidence.unrecognised,
    )
