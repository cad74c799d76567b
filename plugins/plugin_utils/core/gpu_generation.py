"""Which kernel modules a GPU can run with, from its PCI device id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Modules = Literal["open", "either", "proprietary", "none"]


@dataclass(frozen=True)
class Generation:
    """One generation of NVIDIA GPUs.

    ``modules``: which flavour of the kernel modules drives it. ``lowest_branch`` and ``last_branch`` bound the driver
    branches that know it; None where there is no such bound.
    """

    name: str
    modules: Modules
    lowest_branch: int | None = None
    last_branch: int | None = None


# NVIDIA's driver installation guide, chapter "Kernel Modules": open only from Blackwell and Grace on, either for Turing
# to Hopper, proprietary only before Turing. Branch 580 is the last one for Maxwell, Pascal and Volta.
OLDER = Generation("older than Maxwell", "none")
MAXWELL = Generation("Maxwell", "proprietary", last_branch=580)
PASCAL = Generation("Pascal", "proprietary", last_branch=580)
VOLTA = Generation("Volta", "proprietary", last_branch=580)
TURING = Generation("Turing", "either")
AMPERE = Generation("Ampere", "either")
HOPPER = Generation("Hopper", "either", lowest_branch=525)
GRACE_HOPPER = Generation("Grace Hopper", "open", lowest_branch=535)
ADA = Generation("Ada", "either", lowest_branch=525)
BLACKWELL = Generation("Blackwell", "open", lowest_branch=570)
BLACKWELL_ULTRA = Generation("Blackwell Ultra", "open", lowest_branch=580)
NEWER = Generation("newer than this table", "open", lowest_branch=580)

# First and last PCI device id, from pci.ids of 2025-06-09. Ids are dealt out in blocks for each chip.
_BLOCKS: tuple[tuple[int, int, Generation], ...] = (
    (0x0000, 0x133F, OLDER),
    (0x1340, 0x15EF, MAXWELL),
    (0x15F0, 0x15FF, PASCAL),  # GP100
    (0x1600, 0x17FF, MAXWELL),  # mobile GM204, GM108, GM107, and GM200
    (0x1800, 0x1AFF, OLDER),
    (0x1B00, 0x1D7F, PASCAL),
    (0x1D80, 0x1DFF, VOLTA),
    (0x1E00, 0x1FFF, TURING),
    (0x2080, 0x20FF, AMPERE),  # GA100
    (0x2100, 0x21FF, TURING),  # TU116
    (0x2200, 0x22FF, AMPERE),
    (0x2340, 0x234F, GRACE_HOPPER),
    (0x2300, 0x23FF, HOPPER),
    (0x2400, 0x25FF, AMPERE),
    (0x2600, 0x28FF, ADA),
    (0x2900, 0x2FFF, BLACKWELL),
    (0x3180, 0x31FF, BLACKWELL_ULTRA),  # GB110
)


def generation(device_id: int) -> Generation:
    """Return the generation of a PCI device id (``0x2bb5``). An id above the table counts as ``NEWER``."""
    for first, last, known in _BLOCKS:
        if first <= device_id <= last:
            return known
    return NEWER


# Compute capability without its dot (120 is 12.0), from the chip that pci.ids names for each block of device ids and
# NVIDIA's list of CUDA GPUs. Within a generation only some chips differ: GA100, GB10 and the Maxwell ones.
_CAPABILITIES: tuple[tuple[int, int, int], ...] = (
    (0x1340, 0x13BF, 50),  # GM107, GM108
    (0x13C0, 0x15EF, 52),
    (0x15F0, 0x15FF, 60),  # GP100
    (0x1600, 0x173F, 52),
    (0x1740, 0x17BF, 50),  # GM108
    (0x17C0, 0x17FF, 52),
    (0x1B00, 0x1D7F, 61),
    (0x1D80, 0x1DFF, 70),
    (0x1E00, 0x1FFF, 75),
    (0x2080, 0x20FF, 80),  # GA100
    (0x2100, 0x21FF, 75),
    (0x2200, 0x22FF, 86),
    (0x2300, 0x23FF, 90),
    (0x2400, 0x25FF, 86),
    (0x2600, 0x28FF, 89),
    (0x2900, 0x29FF, 100),  # GB100
    (0x2B80, 0x2DFF, 120),
    (0x2E00, 0x2EFF, 121),  # GB10
    (0x2F00, 0x2FFF, 120),
    (0x3180, 0x31FF, 103),  # GB110
)


def compute_capability(device_id: int) -> int | None:
    """Return the compute capability of a PCI device id, without its dot, or None where it is not known."""
    return next((known for first, last, known in _CAPABILITIES if first <= device_id <= last), None)
