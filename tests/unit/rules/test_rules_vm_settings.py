"""Rules B9, B10, B14 to B16 and B22: firmware, mappings and device options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rule_builders as b
from rule_builders import MIB, TWO

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import MappingClaim, VmConfig

UNREAD = b.snapshot("hypervisor")
MAPPED = ("mapping=left,pcie=1", "mapping=right,pcie=1")
UUID = "aaaaaaaa-0000-0000-0000-000000000001"


def claim(mapping: str, *bdfs: str, ids: str = "10de:2bb5", group: int | None = None) -> MappingClaim:
    return MappingClaim(mapping, bdfs, ids, group, f"map id={ids},path={';'.join(bdfs)}")


def mapped(*claims: MappingClaim, **parts: object) -> object:
    """A hypervisor whose VM 101 has two mapped devices."""
    known = {one.mapping: one.bdfs for one in claims}
    vm = b.Vm(
        configs=b.fact({"101": b.vm_config(*MAPPED)}, "conf", "pve.conf"),
        mappings=b.fact(known),
        mapping_claims=b.fact(claims, "map", "pve.mapping.pci") if claims else b.unknown("pci.cfg was not read"),
        cpu_models=b.fact({}),
        **{key: parts.pop(key) for key in ("reservations",) if key in parts},
    )
    return b.hypervisor(vm=vm, **parts)


def with_vm(config: VmConfig, **more: object) -> object:
    vm = b.Vm(
        configs=b.fact({config.vmid: config}, "conf", "pve.conf"), mappings=b.fact({}), cpu_models=b.fact({}), **more
    )
    return b.hypervisor(vm=vm)


def guest_in_vm(**parts: object) -> object:
    """The guest of the VM that ``rule_builders.WHOLE`` describes."""
    return b.guest(machine=replace(b.guest().machine, smbios_uuid=b.fact(UUID)), **parts)


LEFT, RIGHT = claim("left", "0000:01:00.0", group=14), claim("right", "0000:02:00.0")
GROUPED = [b.gpu_function(iommu_group=15), b.gpu_function("0000:02:00.0", iommu_group=16)]
KEYS = "pool:vm-disk-0,efitype=4m,pre-enrolled-keys=1,size=4M"
SMALL = b.gpus_on_bus(2, regions=b.bars(256 * MIB, 32 * MIB))


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # B9
        ("B9", mapped(LEFT, RIGHT), "pass", "fit the devices"),
        ("B9", mapped(LEFT), "fail", "there is no mapping right"),
        ("B9", mapped(LEFT, claim("right")), "fail", "no device on this node"),
        ("B9", mapped(LEFT, claim("right", "0000:09:00.0")), "fail", "there is no device 0000:09:00.0"),
        ("B9", mapped(LEFT, claim("right", "0000:02:00.0", ids="10de:2204")), "fail", "is 10de:2bb5, not 10de:2204"),
        ("B9", mapped(LEFT, RIGHT, functions=GROUPED), "fail", "IOMMU group 15, not 14"),
        # One of two alternatives still fits: the VM gets that one.
        ("B9", mapped(LEFT, RIGHT, claim("right", "0000:09:00.0")), "pass", "fit the devices"),
        ("B9", mapped(LEFT, RIGHT, pci=b.Pci()), "unknown", "fit the hardware"),
        ("B9", mapped(), "unknown", "pci.cfg was not read"),
        ("B9", b.hypervisor(b.vm_config(*TWO)), "not_applicable", "no mapping"),
        (
            "B9",
            with_vm(b.vm_config(*TWO), reservations=b.fact({"0000:02:00.0": "202"}, "02:00.0 202", "pve.reservations")),
            "info",
            "VM 202 holds the device of hostpci1",
        ),
        (
            "B9",
            with_vm(b.vm_config(*TWO), reservations=b.fact({"0000:02:00.0": "101"}, "02:00.0 101", "pve.reservations")),
            "not_applicable",
            "no mapping",
        ),
        ("B9", UNREAD, "unknown", "not collected"),
        # B10
        ("B10", b.hypervisor(b.vm_config(*TWO, efidisk0="pool:disk")), "pass", "OVMF"),
        ("B10", b.hypervisor(b.vm_config(*TWO)), "warn", "without an EFI disk"),
        ("B10", b.hypervisor(b.vm_config(*TWO, bios="seabios")), "fail", "128 GiB"),
        ("B10", b.hypervisor(b.vm_config(*TWO, drop=["bios"])), "fail", "SeaBIOS"),
        ("B10", b.hypervisor(b.vm_config(*TWO, bios="seabios"), functions=SMALL), "pass", "no GPU has a BAR"),
        ("B10", b.hypervisor(b.vm_config(*TWO, bios="seabios"), functions=b.gpus_on_bus(2)), "unknown", "BAR sizes"),
        ("B10", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
        # B14
        ("B14", b.hypervisor(b.vm_config(*TWO)), "pass", "No GPU"),
        ("B14", b.hypervisor(b.vm_config(f"{TWO[0]},rombar=0", TWO[1])), "info", "fine for compute"),
        (
            "B14",
            with_vm(b.vm_config(f"{TWO[0]},romfile=gone.rom", TWO[1]), rom_files=b.fact(("other.rom",))),
            "fail",
            "gone.rom is not in /usr/share/kvm",
        ),
        (
            "B14",
            with_vm(b.vm_config(f"{TWO[0]},romfile=card.rom", TWO[1]), rom_files=b.fact(("card.rom",))),
            "pass",
            "No GPU",
        ),
        ("B14", b.hypervisor(b.vm_config(f"{TWO[0]},romfile=card.rom", TWO[1])), "unknown", "ROM file"),
        # B15
        ("B15", b.hypervisor(b.vm_config(f"{TWO[0]},driver=keep", TWO[1])), "warn", "whole GPU"),
        ("B15", b.hypervisor(b.vm_config(f"{TWO[0]},driver=vfio", TWO[1])), "pass", "itself"),
        (
            "B15",
            b.hypervisor(
                b.vm_config(f"{TWO[0]},driver=keep", TWO[1]),
                functions=[b.gpu_function(physfn=True), b.gpu_function("0000:02:00.0")],
            ),
            "pass",
            "itself",
        ),
        ("B15", b.hypervisor(b.vm_config(f"{TWO[0]},driver=keep", TWO[1]), pci=b.Pci()), "unknown", "not collected"),
        # B16
        ("B16", b.hypervisor(b.vm_config(*TWO, machine="q35,viommu=intel")), "fail", "emulated IOMMU (intel)"),
        ("B16", b.hypervisor(b.vm_config(TWO[0], machine="q35,viommu=virtio")), "warn", "emulated IOMMU (virtio)"),
        ("B16", b.hypervisor(b.vm_config(*TWO, args="-device intel-iommu,intremap=on")), "fail", "intel-iommu"),
        (
            "B16",
            b.hypervisor(b.vm_config(*TWO, running_arguments=b.fact(("-device", "virtio-iommu-pci")))),
            "fail",
            "still runs with",
        ),
        ("B16", b.hypervisor(b.vm_config(*TWO)), "pass", "no emulated IOMMU"),
        ("B16", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
        ("B16", b.guest(iommu=b.Iommu(units=b.fact(("dmar0",)))), "fail", "cannot be trusted"),
        ("B16", b.guest(1, iommu=b.Iommu(units=b.fact(("dmar0",)))), "warn", "dmar0"),
        ("B16", b.guest(iommu=b.Iommu(units=b.fact(()))), "pass", "no IOMMU"),
        ("B16", b.guest(), "unknown", "not collected"),
        ("B16", b.guest(0, iommu=b.Iommu(units=b.fact(("dmar0",)))), "not_applicable", "no NVIDIA GPU"),
        # B22
        ("B22", b.hypervisor(b.vm_config(*TWO, efidisk0=KEYS)), "warn", "need an enrolled key"),
        ("B22", b.hypervisor(b.vm_config(*TWO, efidisk0=KEYS.replace("=1", "=0"))), "pass", "no enrolled"),
        ("B22", b.hypervisor(b.vm_config(*TWO)), "pass", "no enrolled"),
        ("B22", b.hypervisor(b.vm_config(*TWO, bios="seabios")), "not_applicable", "no Secure Boot"),
        ("B22", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
    ],
)
def test_vm_settings(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert state in [one.state for one in found]
    assert any(words in f"{one.title} {one.reason}" for one in found if one.state == state)


@pytest.mark.parametrize(
    ("driver", "state", "words"),
    [
        (b.Driver(secure_boot=b.fact("disabled")), "pass", "Secure Boot off"),
        (b.Driver(secure_boot=b.fact("enabled"), smi=b.smi()), "info", "are accepted"),
        (b.Driver(secure_boot=b.fact("enabled"), smi=b.smi("no_driver")), "warn", "need an enrolled key"),
    ],
)
def test_the_guest_tells_whether_secure_boot_hurts(driver: object, state: str, words: str) -> None:
    (found,) = b.findings("B22", b.hypervisor(b.vm_config(*TWO, efidisk0=KEYS)), guest_in_vm(driver=driver))
    assert (found.state, words in found.title) == (state, True)


def test_a_whole_pool_of_mapped_cards_is_no_card_with_several_functions() -> None:
    pool = (claim("pool", "0000:01:00.0"), claim("pool", "0000:02:00.0"))
    config = b.vm_config("mapping=pool,pcie=1", args="-set device.hostpci0.x-nv-gpudirect-clique=0")
    vm = b.Vm(configs=b.fact({"101": config}), mappings=b.fact({"pool": ("0000:01:00.0", "0000:02:00.0")}))
    node = b.hypervisor(vm=replace(vm, mapping_claims=b.fact(pool)))
    assert b.verdicts("B8", node) == ["pass"]


def test_a_start_that_is_refused_is_worse_than_the_rule_itself() -> None:
    (found,) = b.findings("B9", mapped(LEFT))
    assert found.severity == "high"
