"""The door of this room: all evidence of one host in, one typed snapshot out."""

from __future__ import annotations

from ..core.evidence import EvidenceSet
from ..core.snapshot import Snapshot
from . import device_facts, driver_facts, host_facts, nvidia_facts, role, vm_facts
from .facts import Sources
from .runtime_facts import RuntimeFacts


def build(evidence: EvidenceSet) -> Snapshot:
    """Parse everything. What could not be read becomes a fact without a value and with the reason."""
    sources = Sources(evidence)
    kernel = host_facts.kernel(sources)
    machine = host_facts.machine(sources, kernel)
    cpu = host_facts.cpu(sources)
    pci = device_facts.pci(sources)
    smi = nvidia_facts.smi(sources)
    told = nvidia_facts.told(sources, smi)
    runtime = RuntimeFacts(sources)
    return Snapshot(
        host=evidence.host,
        role=role.decide(sources, machine, cpu, kernel, pci, told.gpus),
        collected_at=evidence.collected_at,
        privileged=evidence.privileged,
        machine=machine,
        cpu=cpu,
        memory=host_facts.memory(sources),
        kernel=kernel,
        pci=pci,
        iommu=device_facts.iommu(sources, pci, kernel.log),
        gpus=told.gpus,
        topology=device_facts.topology(sources),
        p2p=device_facts.p2p(sources),
        vm=vm_facts.vm(sources),
        driver=driver_facts.driver(sources, smi, told),
        nccl=runtime.nccl(),
        services=runtime.services(),
        limits=runtime.limits(),
        measurements=runtime.measurements(),
        evidence_index={entry.source: "" if entry.usable else evidence.why_missing(entry.source) for entry in evidence},
        inventory=evidence.inventory,
        unrecognised=evidence.unrecognised,
    )
