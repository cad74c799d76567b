"""What a lab host of kind `vm` is made of: its GPUs, where they sit, IOMMU, ACS, drivers. GPUs are simulated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SERVER_EDITION = "2bb5"  # RTX PRO 6000 Blackwell Server Edition, as pci.ids has it
APPROVED = 0  # the clique that all GPUs of a guest with the approval capability are in


@dataclass(frozen=True)
class Gpu:
    """One simulated GPU: under a root port of its own, or below the switch; `clique` None: no approval capability."""

    place: Literal["root", "switch"] = "root"
    clique: int | None = None
    device: str = SERVER_EDITION


@dataclass(frozen=True)
class Scenario:
    """One machine. `acs` None: the kernel decides (on with the IOMMU); False: switched off at every boot by a unit.

    `vfio`: the GPUs are bound to vfio-pci at boot. `proxmox`: with the simulated Proxmox files and tools.
    """

    text: str
    gpus: tuple[Gpu, ...]
    iommu: bool = False
    acs: bool | None = None
    vfio: bool = False
    proxmox: bool = False

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that change with everything that makes the machine; the text does not count."""
        return hashlib.sha256(repr((self.gpus, self.iommu, self.acs, self.vfio, self.proxmox)).encode()).hexdigest()[:8]

    @property
    def kernel_words(self) -> str:
        """What the kernel command line has beyond what each lab host has."""
        return "intel_iommu=on iommu=pt" if self.iommu else ""


_EIGHT = (Gpu(),) * 8
_TWO_BELOW_A_SWITCH = (Gpu("switch"), Gpu("switch"), Gpu(), Gpu())

DEFAULT = "guest"
SCENARIOS: Mapping[str, Scenario] = {
    "guest": Scenario("8 GPUs, without the P2P approval capability", _EIGHT),
    "guest-approved": Scenario("8 GPUs, each with the P2P approval capability", (Gpu(clique=APPROVED),) * 8),
    "switch": Scenario(
        "4 GPUs, 2 of them below a PCIe switch; IOMMU; ACS on in the root ports", _TWO_BELOW_A_SWITCH, iommu=True
    ),
    "switch-acs-off": Scenario(
        "the same with ACS off, by a unit at each boot", _TWO_BELOW_A_SWITCH, iommu=True, acs=False
    ),
    "hypervisor": Scenario(
        "4 GPUs, 2 of them below a PCIe switch, bound to vfio-pci; IOMMU; ACS on; simulated Proxmox VE files",
        _TWO_BELOW_A_SWITCH,
        iommu=True,
        vfio=True,
        proxmox=True,
    ),
    "hypervisor-acs-off": Scenario(
        "the same with ACS off, by a unit at each boot",
        _TWO_BELOW_A_SWITCH,
        iommu=True,
        acs=False,
        vfio=True,
        proxmox=True,
    ),
}


def gpu_addresses(scenario: Scenario) -> list[str]:
    """Return the PCI address that the firmware gives each GPU: it numbers the buses in the order of the ports."""
    below = sum(gpu.place == "switch" for gpu in scenario.gpus)
    # Below the switch: bus 1 is above it, bus 2 within it, then one for each of its ports.
    switch_bus, root_bus = 3, 1 if below == 0 else 3 + below
    found = []
    for gpu in scenario.gpus:
        bus = switch_bus if gpu.place == "switch" else root_bus
        found.append(f"0000:{bus:02x}:00.0")
        switch_bus, root_bus = switch_bus + (gpu.place == "switch"), root_bus + (gpu.place == "root")
    return found
