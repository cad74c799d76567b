"""What the other hosts of a fleet have to know of a host: small enough to keep for ten thousand of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.snapshot import Snapshot, VmConfig
from .common import driver_version
from .machines import Passed, gpu_vms

# GPU device ids with their number: (("2bb5", 8),).
Models = tuple[tuple[str, int], ...]
_NO_UUIDS = ("", "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff")


@dataclass(frozen=True, eq=False, slots=True)
class VmCard:
    """One VM of a hypervisor, with what it can be told by. ``gpus`` is None where no GPU is passed to it."""

    host: str
    vmid: str
    uuid: str
    macs: frozenset[str]
    running: bool | None
    gpus: Models | None

    @property
    def key(self) -> tuple[str, str]:
        """Return what names the VM within a fleet."""
        return (self.host, self.vmid)


@dataclass(frozen=True, eq=False, slots=True)
class Card:
    """One host. ``vms`` is None where its VM configurations are not known.

    ``uuid``, ``macs`` and ``gpus`` are those of a guest. ``no_uuid``: why its UUID was not read, or "".
    """

    host: str
    guest: bool
    inventory: Mapping[str, str]
    uuid: str
    no_uuid: str
    macs: tuple[str, ...]
    gpus: Models
    vms: tuple[VmCard, ...] | None
    driver: str


def card(snapshot: Snapshot) -> Card:
    """Return the card of a host."""
    guest = snapshot.role.value == "guest"
    uuid = snapshot.machine.smbios_uuid
    configs = snapshot.vm.configs.value
    with_gpus = {config.vmid: lines for config, lines in gpu_vms(snapshot)} if configs else {}
    return Card(
        host=snapshot.host,
        guest=guest,
        inventory=snapshot.inventory,
        uuid=_meaningful(uuid.value) if guest else "",
        no_uuid="" if uuid.known else uuid.reason,
        macs=snapshot.machine.macs.value or () if guest else (),
        gpus=_models_of_guest(snapshot) if guest else (),
        vms=None if configs is None else tuple(_vm(snapshot.host, one, with_gpus) for one in configs.values()),
        driver=driver_version(snapshot),
    )


def _vm(host: str, config: VmConfig, with_gpus: Mapping[str, Sequence[Passed]]) -> VmCard:
    lines = with_gpus.get(config.vmid)
    gpus = None if lines is None else _models_of_vm(lines)
    return VmCard(host, config.vmid, vm_uuid(config), vm_macs(config), config.running.value, gpus)


def vm_uuid(config: VmConfig) -> str:
    """Return the SMBIOS UUID that a VM shows its guest, in lower case, or "" where its file does not tell."""
    return _meaningful(config.option("smbios1", "uuid"))


def _meaningful(uuid: str | None) -> str:
    plain = (uuid or "").strip().lower()
    return "" if plain in _NO_UUIDS else plain


def vm_macs(config: VmConfig) -> frozenset[str]:
    """Return the addresses of a VM's network cards, in lower case: of ``net0: virtio=02:00:...,bridge=vmbr0``."""
    found = set()
    for key, given in config.settings.items():
        if key.startswith("net") and key[3:].isdigit():
            for part in given.split(","):
                name, _, value = part.partition("=")
                address = value if name in ("macaddr", "virtio", "e1000", "e1000e", "vmxnet3", "rtl8139") else ""
                if address.count(":") == 5:
                    found.add(address.strip().lower())
    return frozenset(found)


def _models_of_guest(guest: Snapshot) -> Models:
    if not guest.pci.complete:
        return ()
    return _counted([one.device for one in guest.pci.gpus()])


def _models_of_vm(lines: Sequence[Passed]) -> Models:
    if any(one.display is None for one in lines):
        return ()
    return _counted([one.display.device for one in lines if one.display])


def _counted(devices: Sequence[str | None]) -> Models:
    known = [one for one in devices if one]
    return tuple(sorted(Counter(known).items())) if len(known) == len(devices) else ()
