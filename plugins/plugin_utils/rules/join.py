"""Which guest runs in which VM of which hypervisor, and what that VM's settings do to it."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.finding import Excerpt, Finding, Fix
from ..core.snapshot import Snapshot, VmConfig
from .machines import CLIQUE, conf_line, config_is_whole, device_sets, gpu_lines, gpu_vms, vm, vm_arguments
from .passthrough import bridges_above
from .registry import Fleet

# What a finding about a VM on the hypervisor, or about a device or port of it, causes in the guest that runs in it.
CAUSES_IN_GUEST: Mapping[str, tuple[str, ...]] = {
    "B1": ("A2", "D1", "D4", "D5"),
    "B2": ("A2", "D1", "D4", "D5"),
    "B3": ("A2",),
    "B4": ("A5", "B11", "D5"),
    "B5": ("A5", "B11"),
    "B6": ("A6", "D5"),
    "B7": ("A6",),
    "B8": ("D1", "D5"),
    "B9": ("A5",),
    "B10": ("A5", "B11"),
    "B11": ("A5", "B11", "F1", "D5"),
    "B12": ("A2", "D1", "D2", "D4", "D5"),
    "B13": ("D1", "D5"),
    "B15": ("A5",),
    "B16": ("D5",),
    "B19": ("F23",),
    "B22": ("F1", "F6"),
    "B23": ("F22",),
    "C7": ("A5",),
    "C11": ("A5", "F1"),
    "C13": ("D7",),
    "C15": ("B11", "F21"),
    "C16": ("F21",),
    "C17": ("A5", "D8", "D9", "F1", "F15", "F16"),
    "C18": ("F15",),
    "C19": ("A5", "F1", "F15", "F16"),
    "C21": ("D7",),
    "C22": ("D7",),
    "C23": ("D1",),
    "D3": ("D1", "D2", "D5"),
    "H6": ("A5",),
}
# Findings of a guest that only its VM's settings can explain: without them, that must be said.
_NEEDS_HOME = ("D5",)
# How steps for a hypervisor begin that a guest's finding gives without knowing where it runs.
UNKNOWN_HOME = "# on the hypervisor; VMID is this guest's id there"
_NO_UUIDS = ("", "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff")


@dataclass(frozen=True)
class Home:
    """Where a guest runs: the host name of its hypervisor, its VM there, and what says so."""

    host: str
    config: VmConfig
    how: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Return what names the VM within a fleet."""
        return (self.host, self.config.vmid)


class JoinedFleet(dict[str, Snapshot]):
    """A fleet that works out once which guest runs where."""

    @functools.cached_property
    def homes(self) -> Mapping[str, Home | str]:
        """Return for each guest its home, or why it is not known."""
        return _join(self)

    @functools.cached_property
    def guests(self) -> Mapping[tuple[str, str], str]:
        """Return for each VM (hypervisor, VM id) the host name of the guest in it."""
        return {home.key: guest for guest, home in self.homes.items() if isinstance(home, Home)}


def home_of(guest: Snapshot, fleet: Fleet) -> Home | str:
    """Return the hypervisor and VM of a guest, or why they are not known.

    In this order: what the inventory says (``peerlane_hypervisor``, ``peerlane_vmid``), the SMBIOS UUID, a network
    card's address, the models and number of the GPUs, and last the only VM with GPUs for the only guest.
    """
    homes = fleet.homes if isinstance(fleet, JoinedFleet) else _join(fleet)
    return homes.get(guest.host, "it is not among the audited guests")


def guest_of(hypervisor: Snapshot, config: VmConfig, fleet: Fleet) -> Snapshot | None:
    """Return the audited guest that runs in this VM, where there is one."""
    joined = fleet if isinstance(fleet, JoinedFleet) else JoinedFleet(fleet)
    name = joined.guests.get((hypervisor.host, config.vmid))
    return joined.get(name) if name is not None else None


# --- finding a guest's home -----------------------------------------------------------------------------------------


# GPU device ids with their number: (("2bb5", 8),).
Models = tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class _Place:
    """One VM of the fleet, with what it can be told by."""

    home: Home
    uuid: str
    macs: frozenset[str]


def _join(fleet: Fleet) -> dict[str, Home | str]:
    guests = [one for one in fleet.values() if one.role.value == "guest"]
    if not guests:
        return {}
    places = [
        _Place(Home(host.host, config), vm_uuid(config), vm_macs(config))
        for host in fleet.values()
        if host.vm.configs.known
        for config in (host.vm.configs.value or {}).values()
    ]
    by_id = _index(places, lambda one: (one.home.config.vmid,))
    by_uuid = _index(places, lambda one: (one.uuid,))
    by_mac = _index(places, lambda one: one.macs)
    hypervisors = {_short(one.host) for one in fleet.values() if one.vm.configs.known}
    found: dict[str, Home | str] = {}
    for guest in guests:
        found[guest.host] = _told(guest, hypervisors, by_id, by_uuid, by_mac)
    _by_devices(guests, fleet, places, found)
    return found


def vm_uuid(config: VmConfig) -> str:
    """Return the SMBIOS UUID that a VM shows its guest, in lower case, or "" where its file does not tell."""
    return _meaningful(config.option("smbios1", "uuid"))


def _uuid_of(guest: Snapshot) -> str:
    return _meaningful(guest.machine.smbios_uuid.value)


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


def _index(places: Iterable[_Place], keys: Callable[[_Place], Iterable[str]]) -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = defaultdict(list)
    for one in places:
        for key in keys(one):
            if key:
                found[key].append(one)
    return found


def _told(
    guest: Snapshot,
    hypervisors: Collection[str],
    by_id: Mapping[str, list[_Place]],
    by_uuid: Mapping[str, list[_Place]],
    by_mac: Mapping[str, list[_Place]],
) -> Home | str:
    """Return the home that the inventory, the UUID or a MAC address tells; "" where none of them says anything."""
    wanted, number = guest.inventory.get("hypervisor", ""), guest.inventory.get("vmid", "")
    if wanted and _short(wanted) not in hypervisors:
        return f"the inventory says that it runs on {wanted}, which is not among the audited hypervisors"

    def there(candidates: Sequence[_Place]) -> list[_Place]:
        others = [one for one in candidates if one.home.host != guest.host]
        return [one for one in others if _short(wanted) == _short(one.home.host)] if wanted else others

    if number:
        candidates = there(by_id.get(number, ()))
        where = f" on {wanted}" if wanted else ""
        return _only(candidates, "the inventory", f"the inventory says VM {number}{where}, which no audited host has")
    uuid = _uuid_of(guest)
    if by_uuid.get(uuid):
        return _only(there(by_uuid[uuid]), "the SMBIOS UUID", "the VM with its SMBIOS UUID is on another hypervisor")
    for address in guest.machine.macs.value or ():
        # A VM that has another UUID is another machine, whatever address its card has.
        candidates = [one for one in there(by_mac.get(address, ())) if not (uuid and one.uuid)]
        if candidates:
            return _only(candidates, f"the network card {address}", "")
    return ""


def _short(host: str) -> str:
    """Return a host name without its domain: people mix both."""
    return host.partition(".")[0].lower()


def _only(candidates: Sequence[_Place], how: str, otherwise: str) -> Home | str:
    running = [one for one in candidates if one.home.config.running.value is not False]
    chosen = running if len(running) == 1 else candidates
    if len(chosen) == 1:
        return replace(chosen[0].home, how=how)
    if not chosen:
        return otherwise
    shown = ", ".join(f"VM {one.home.config.vmid} of {one.home.host}" for one in chosen[:3])
    return f"{how} fits {len(chosen)} VMs ({shown})"


def _by_devices(
    guests: Sequence[Snapshot], fleet: Fleet, places: Sequence[_Place], found: dict[str, Home | str]
) -> None:
    """Find homes for the guests that nothing told: by their GPUs, where exactly one guest fits exactly one VM."""
    left = [guest for guest in guests if found[guest.host] == ""]
    if not left:
        return
    hosts = [host for host in fleet.values() if host.vm.configs.known]
    taken = {home.key for home in found.values() if isinstance(home, Home)}
    with_gpus = {(host.host, config.vmid) for host in hosts for config, _ in gpu_vms(host)}
    free = [
        one
        for one in places
        if one.home.key in with_gpus and one.home.key not in taken and one.home.config.running.value is not False
    ]
    models_of = {one.home.key: _models_of_vm(fleet[one.home.host], one.home.config) for one in free}
    rivals = Counter(models for guest in left if (models := _models_of_guest(guest)))
    # A VM with a UUID of its own is surely not that of a guest with another one, and the same goes for addresses.
    candidates = {
        (uuid, macs): [one for one in free if not (uuid and one.uuid) and not (macs and one.macs)]
        for uuid in (False, True)
        for macs in (False, True)
    }
    fitting: dict[tuple[bool, bool, Models], list[_Place]] = defaultdict(list)
    for (uuid, macs), ones in candidates.items():
        for one in ones:
            fitting[uuid, macs, models_of[one.home.key]].append(one)
    for guest in left:
        if not hosts or all(host.host == guest.host for host in hosts[:2]):
            found[guest.host] = "its hypervisor is not among the audited hosts"
            continue
        kind = (bool(_uuid_of(guest)), bool(guest.machine.macs.value))
        models = _models_of_guest(guest)
        mine = [one for one in candidates[kind][:3] if one.home.host != guest.host]
        same = [one for one in fitting.get((*kind, models), [])[:3] if one.home.host != guest.host] if models else []
        if not mine:
            found[guest.host] = _why_not(guest, fleet)
        elif len(same) == 1 and rivals[models] == 1:
            found[guest.host] = replace(same[0].home, how=f"its {_words(models)}, which only this VM has")
        elif len(mine) == 1 and len(left) == 1:
            found[guest.host] = replace(mine[0].home, how="being the only guest, and this the only VM with GPUs")
        else:
            found[guest.host] = _ambiguous(guest, models, candidates[kind], len(left))


def _why_not(guest: Snapshot, fleet: Fleet) -> str:
    if not any(host.vm.configs.value and host.host != guest.host for host in fleet.values()):
        return "no audited hypervisor has a VM with GPUs"
    if guest.machine.smbios_uuid.known:
        return "no audited hypervisor has a VM with this guest's SMBIOS UUID"
    return "no VM with GPUs of an audited hypervisor is left for it"


def _ambiguous(guest: Snapshot, models: Models, places: Sequence[_Place], waiting: int) -> str:
    missing = guest.machine.smbios_uuid.reason or "it is in no VM's smbios1 line"
    fits = f"{len(places)} VMs with GPUs" if len(places) > 1 else f"VM {places[0].home.config.vmid}"
    others = f" and {waiting} guests" if waiting > 1 else ""
    devices = f"; its {_words(models)} fit several or none" if models else ""
    return (
        f"{fits}{others} are left and nothing tells which belong together (SMBIOS UUID: {missing}){devices}: set "
        "peerlane_hypervisor and peerlane_vmid in the inventory"
    )


def _words(models: Models) -> str:
    return " and ".join(f"{count} GPU(s) 10de:{device}" for device, count in models)


def _models_of_guest(guest: Snapshot) -> Models:
    if not guest.pci.complete:
        return ()
    return _counted([one.device for one in guest.pci.gpus()])


def _models_of_vm(host: Snapshot, config: VmConfig) -> Models:
    lines = gpu_lines(host, config)
    if any(one.display is None for one in lines):
        return ()
    return _counted([one.display.device for one in lines if one.display])


def _counted(devices: Sequence[str | None]) -> Models:
    known = [one for one in devices if one]
    return tuple(sorted(Counter(known).items())) if len(known) == len(devices) else ()


# --- what the VM's settings cause -----------------------------------------------------------------------------------


def tie(fleet: Fleet, found: dict[str, list[Finding]]) -> None:
    """Tie the findings of each guest to those of its VM: the VM's explain, the guest's name the line behind them."""
    for guest, snapshot in fleet.items():
        if snapshot.role.value != "guest":
            continue
        home = home_of(snapshot, fleet)
        if isinstance(home, Home) and home.host in found:
            _tie_one(guest, home, fleet, found)
        elif isinstance(home, str):
            found[guest] = [_without_home(one, home, found[guest]) for one in found[guest]]


def _tie_one(guest: str, home: Home, fleet: Fleet, found: dict[str, list[Finding]]) -> None:
    subjects = _subjects(fleet[home.host], home.config)
    bad = {one.rule for one in found[guest] if one.bad}
    causes: dict[str, list[Finding]] = defaultdict(list)
    above = []
    for one in found[home.host]:
        caused = [rule for rule in CAUSES_IN_GUEST.get(one.rule, ()) if rule in bad] if one.bad else []
        if caused and one.subject in subjects:
            for rule in caused:
                causes[rule].append(one)
            one = replace(one, explains=(*one.explains, *(f"{guest}/{rule}" for rule in caused)))
        above.append(one)
    found[home.host] = above
    found[guest] = [_with_causes(one, causes.get(one.rule, ()), home) if one.bad else one for one in found[guest]]


def _subjects(hypervisor: Snapshot, config: VmConfig) -> set[str]:
    """Return what a finding of the hypervisor names when it is about this VM: it, its devices, the ports above them."""
    functions = [one for line in gpu_lines(hypervisor, config) for one in line.functions]
    ports = [bridge.bdf for one in functions for bridge in bridges_above(hypervisor, one.bdf) or ()]
    buses = [f"bus {one.bdf.rpartition(':')[0]}" for one in functions]
    return {vm(config), *(one.bdf for one in functions), *ports, *buses}


def _with_causes(finding: Finding, causes: Sequence[Finding], home: Home) -> Finding:
    """Name the lines of the VM's configuration that stand behind a guest's finding."""
    excerpts = [excerpt for one in causes for excerpt in one.evidence[:2]]
    said = [f"{one.title} ({one.rule})" for one in causes]
    if finding.rule in ("D1", "D5") and config_is_whole(home.config, "args") and not _sets_clique(home.config):
        excerpts.append(conf_line(home.config, "args"))
        said.append(f"VM {home.config.vmid} on {home.host} sets no P2P clique")
    finding = replace(finding, fix=_for_this_vm(finding.fix, home))
    if not said:
        return finding
    shown = [Excerpt(f"{home.host}: {one.source}", one.excerpt) for one in excerpts if one.excerpt]
    fresh = [one for one in dict.fromkeys(shown) if one not in finding.evidence]
    why = f"{finding.why} Behind it (known by {home.how}): {'; '.join(said)}.".strip()
    return replace(finding, evidence=(*finding.evidence, *fresh), why=why)


def _for_this_vm(fix: Fix | None, home: Home) -> Fix | None:
    """Put the VM's id and its hypervisor's name into steps that were written without knowing them."""
    if fix is None or not home.config.vmid.isdigit():
        return fix
    steps = [
        f"# on {home.host}" if step.startswith(UNKNOWN_HOME) else step.replace("VMID", home.config.vmid)
        for step in fix.steps
    ]
    return replace(fix, steps=tuple(steps))


def _sets_clique(config: VmConfig) -> bool:
    words = vm_arguments(config)
    return any(one.name == CLIQUE for one in device_sets(words)) or any(CLIQUE in word for word in words)


def _without_home(finding: Finding, reason: str, findings: Sequence[Finding]) -> Finding:
    if not finding.bad or finding.rule not in _NEEDS_HOME or any(one.rule == "D1" and one.bad for one in findings):
        return finding
    return replace(finding, why=f"{finding.why} The VM settings behind it are not known: {reason}.".strip())
