"""All that is known of the PCI functions of a host: sysfs and lspci joined."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ..core.snapshot import Approval, PciFunction
from ..core.values import by_identity, changed
from . import pci_config


def merge(first: Mapping[str, PciFunction], *others: Mapping[str, PciFunction]) -> dict[str, PciFunction]:
    """Join readings of the same machine. A value of an earlier reading stands; a later one fills what it lacks."""
    merged = dict(first)
    for other in others:
        for bdf, function in other.items():
            merged[bdf] = _join(merged[bdf], function) if bdf in merged else function
    return dict(sorted(merged.items()))


@by_identity(4096)
def _join(first: PciFunction, second: PciFunction) -> PciFunction:
    known = vars(first)
    # An absent value is None, "", (), False or {}; but a mapping that the other source read is a reading, also {}.
    filled = {name: value for name, value in vars(second).items() if not known[name] and (value or value == {})}
    if first.driver is not None:
        filled.pop("driver", None)  # "" as a driver is a reading (none bound); for every other text it means: not told
    return changed(first, **filled) if filled else first


@functools.lru_cache(maxsize=1024)
def _approval(config_hex: str) -> Approval:
    return pci_config.approval(pci_config.read_hex(config_hex))


def approvals(functions: Mapping[str, PciFunction]) -> dict[str, Approval]:
    """Decode the P2P approval capability of each NVIDIA display function whose configuration space was read.

    What a function reads while it sleeps without power (D3cold) says nothing.
    """
    found = {}
    for bdf, function in functions.items():
        if not (function.is_gpu and function.config_hex):
            continue
        approval = _approval(function.config_hex)
        if not (approval.state == "device_gone" and function.power_state == "D3cold"):
            found[bdf] = approval
    return found
