"""Which guest runs in which VM of which hypervisor, and what that VM's settings do to it."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.finding import Excerpt, Finding, Fix
from ..core.snapshot import Snapshot, VmConfig
from ..core.values import changed
from .cards import Card, Models, VmCard, card
from .common import versions_differ
from .machines import CLIQUE, conf_line, config_is_whole, device_sets, gpu_lines, vm, vm_arguments
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


@dataclass(frozen=True)
class Place:
    """The VM of a guest by name: of it a ``Home`` is made when somebody asks."""

    host: str
    vmid: str
    how: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Return what names the VM within a fleet."""
        return (self.host, self.vmid)


class JoinedFleet(Mapping[str, Snapshot]):
    """A fleet that works out once which guest runs where. It needs no more than the cards of its hosts for that.

    The snapshots may come from anywhere: ``fleet`` is asked for those that a judge looks at.
    """

    def __init__(self, fleet: Fleet, cards: Iterable[Card] | None = None) -> None:
        self._fleet = fleet
        self._cards = tuple(map(card, fleet.values())) if cards is None else tuple(cards)

    def __getitem__(self, host: str) -> Snapshot:
        return self._fleet[host]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fleet)

    def __len__(self) -> int:
        return len(self._fleet)

    def __contains__(self, host: object) -> bool:
        return host in self._fleet

    @functools.cached_property
    def homes(self) -> Mapping[str, Place | str]:
        """Return for each guest its place, or why it is not known."""
        return _join(self._cards)

    @functools.cached_property
    def guests(self) -> Mapping[tuple[str, str], str]:
        """Return for each VM (hypervisor, VM id) the host name of the guest in it."""
        return {place.key: guest for guest, place in self.homes.items() if isinstance(place, Place)}

    def groups(self) -> list[tuple[str, ...]]:
        """Return the hosts, those together that are guests of one hypervisor, and it: judges look no further."""
        found: dict[str, list[str]] = {}
        for host in self._fleet:
            found.setdefault(self._top(host), []).append(host)
        return [tuple(hosts) for hosts in found.values()]

    def _top(self, host: str) -> str:
        way = [host]
        while isinstance(place := self.homes.get(way[-1]), Place):
            if place.host in way:  # guests in a circle: no evidence says so, but nobody may wait for ever
                return min(way[way.index(place.host) :])
            way.append(place.host)
        return way[-1]

    def other_drivers(self, own: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the hosts with another driver version than this, and their versions, both sorted."""
        if own not in self._others:
            versions = [version for version in self._drivers if versions_differ(version, own)]
            hosts = sorted(host for version in versions for host in self._drivers[version])
            self._others[own] = (tuple(hosts), tuple(sorted(versions)))
        return self._others[own]

    @functools.cached_property
    def _others(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        return {}

    @functools.cached_property
    def _drivers(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for one in self._cards:
            found[one.driver].append(one.host)
        return found


def joined(fleet: Fleet) -> JoinedFleet:
    """Return this fleet joined; one that is stays what it is."""
    return fleet if isinstance(fleet, JoinedFleet) else JoinedFleet(fleet)


def home_of(guest: Snapshot, fleet: Fleet) -> Home | str:
    """Return the hypervisor and VM of a guest, or why they are not known.

    In this order: what the inventory says (``peerlane_hypervisor``, ``peerlane_vmid``), the SMBIOS UUID, a network
    card's address, the models and number of the GPUs, and last the only VM with GPUs for the only guest.
    """
    place = joined(fleet).homes.get(guest.host, "it is not among the audited guests")
    if isinstance(place, str):
        return place
    return Home(place.host, (fleet[place.host].vm.configs.value or {})[place.vmid], place.how)


def guest_of(hypervisor: Snapshot, config: VmConfig, fleet: Fleet) -> Snapshot | None:
    """Return the audited guest that runs in this VM, where there is one."""
    name = joined(fleet).guests.get((hypervisor.host, config.vmid))
    return fleet.get(name) if name is not None else None


# --- finding a guest's home -----------------------------------------------------------------------------------------


def _join(cards: Sequence[Card]) -> dict[str, Place | str]:
    guests = [one for one in cards if one.guest]
    if not guests:
        return {}
    hosts = [one for one in cards if one.vms is not None]
    places = [one for host in hosts for one in host.vms or ()]
    by_id = _index(places, lambda one: (one.vmid,))
    by_uuid = _index(places, lambda one: (one.uuid,))
    by_mac = _index(places, lambda one: one.macs)
    hypervisors = {_short(one.host) for one in hosts}
    found: dict[str, Place | str] = {}
    for guest in guests:
        found[guest.host] = _told(guest, hypervisors, by_id, by_uuid, by_mac)
    _by_devices(guests, hosts, places, found)
    return found


def _index(places: Iterable[VmCard], keys: Callable[[VmCard], Iterable[str]]) -> dict[str, list[VmCard]]:
    found: dict[str, list[VmCard]] = defaultdict(list)
    for one in places:
        for key in keys(one):
            if key:
                found[key].append(one)
    return found


def _told(
    guest: Card,
    hypervisors: Collection[str],
    by_id: Mapping[str, list[VmCard]],
    by_uuid: Mapping[str, list[VmCard]],
    by_mac: Mapping[str, list[VmCard]],
) -> Place | str:
    """Return the home that the inventory, the UUID or a MAC address tells; "" where none of them says anything."""
    wanted, number = guest.inventory.get("hypervisor", ""), guest.inventory.get("vmid", "")
    if wanted and _short(wanted) not in hypervisors:
        return f"the inventory says that it runs on {wanted}, which is not among the audited hypervisors"

    def there(candidates: Sequence[VmCard]) -> list[VmCard]:
        others = [one for one in candidates if one.host != guest.host]
        return [one for one in others if _short(wanted) == _short(one.host)] if wanted else others

    if number:
        candidates = there(by_id.get(number, ()))
        where = f" on {wanted}" if wanted else ""
        return _only(candidates, "the inventory", f"the inventory says VM {number}{where}, which no audited host has")
    if by_uuid.get(guest.uuid):
        return _only(
            there(by_uuid[guest.uuid]), "the SMBIOS UUID", "the VM with its SMBIOS UUID is on another hypervisor"
        )
    for address in guest.macs:
        # A VM that has another UUID is another machine, whatever address its card has.
        candidates = [one for one in there(by_mac.get(address, ())) if not (guest.uuid and one.uuid)]
        if candidates:
            return _only(candidates, f"the network card {address}", "")
    return ""


def _short(host: str) -> str:
    """Return a host name without its domain: people mix both."""
    return host.partition(".")[0].lower()


def _only(candidates: Sequence[VmCard], how: str, otherwise: str) -> Place | str:
    running = [one for one in candidates if one.running is not False]
    chosen = running if len(running) == 1 else candidates
    if len(chosen) == 1:
        return Place(chosen[0].host, chosen[0].vmid, how)
    if not chosen:
        return otherwise
    shown = ", ".join(f"VM {one.vmid} of {one.host}" for one in chosen[:3])
    return f"{how} fits {len(chosen)} VMs ({shown})"


def _by_devices(
    guests: Sequence[Card], hosts: Sequence[Card], places: Sequence[VmCard], found: dict[str, Place | str]
) -> None:
    """Find homes for the guests that nothing told: by their GPUs, where exactly one guest fits exactly one VM."""
    left = [guest for guest in guests if found[guest.host] == ""]
    if not left:
        return
    taken = {home.key for home in found.values() if isinstance(home, Place)}
    free = [one for one in places if one.gpus is not None and one.key not in taken and one.running is not False]
    rivals = Counter(guest.gpus for guest in left if guest.gpus)
    # A VM with a UUID of its own is surely not that of a guest with another one, and the same goes for addresses.
    candidates = {
        (uuid, macs): [one for one in free if not (uuid and one.uuid) and not (macs and one.macs)]
        for uuid in (False, True)
        for macs in (False, True)
    }
    fitting: dict[tuple[bool, bool, Models], list[VmCard]] = defaultdict(list)
    for (uuid, macs), ones in candidates.items():
        for one in ones:
            fitting[uuid, macs, one.gpus or ()].append(one)
    for guest in left:
        if not hosts or all(host.host == guest.host for host in hosts[:2]):
            found[guest.host] = "its hypervisor is not among the audited hosts"
            continue
        kind = (bool(guest.uuid), bool(guest.macs))
        mine = [one for one in candidates[kind][:3] if one.host != guest.host]
        same = [one for one in fitting.get((*kind, guest.gpus), [])[:3] if one.host != guest.host] if guest.gpus else []
        if not mine:
            found[guest.host] = _why_not(guest, hosts)
        elif len(same) == 1 and rivals[guest.gpus] == 1:
            found[guest.host] = Place(*same[0].key, f"its {_words(guest.gpus)}, which only this VM has")
        elif len(mine) == 1 and len(left) == 1:
            found[guest.host] = Place(*mine[0].key, "being the only guest, and this the only VM with GPUs")
        else:
            found[guest.host] = _ambiguous(guest, candidates[kind], len(left))


def _why_not(guest: Card, hosts: Sequence[Card]) -> str:
    if not any(host.vms and host.host != guest.host for host in hosts):
        return "no audited hypervisor has a VM with GPUs"
    if not guest.no_uuid:
        return "no audited hypervisor has a VM with this guest's SMBIOS UUID"
    return "no VM with GPUs of an audited hypervisor is left for it"


def _ambiguous(guest: Card, places: Sequence[VmCard], waiting: int) -> str:
    missing = guest.no_uuid or "it is in no VM's smbios1 line"
    fits = f"{len(places)} VMs with GPUs" if len(places) > 1 else f"VM {places[0].vmid}"
    others = f" and {waiting} guests" if waiting > 1 else ""
    devices = f"; its {_words(guest.gpus)} fit several or none" if guest.gpus else ""
    return (
        f"{fits}{others} are left and nothing tells which belong together (SMBIOS UUID: {missing}){devices}: set "
        "peerlane_hypervisor and peerlane_vmid in the inventory"
    )


def _words(models: Models) -> str:
    return " and ".join(f"{count} GPU(s) 10de:{device}" for device, count in models)


# --- what the VM's settings cause -----------------------------------------------------------------------------------


def tie(fleet: Fleet, found: dict[str, list[Finding]]) -> None:
    """Tie a guest's bad findings to those of its VM: the VM's explain, the guest's name the line behind them."""
    for guest in found:
        if fleet[guest].role.value != "guest":
            continue
        home = home_of(fleet[guest], fleet)
        if isinstance(home, str):
            found[guest] = _without_home(found[guest], home)
        elif home.host in found:
            _tie_one(guest, home, fleet, found)


def _tie_one(guest: str, home: Home, fleet: Fleet, found: dict[str, list[Finding]]) -> None:
    subjects = _subjects(fleet[home.host], home.config)
    bad = {one.rule for one in found[guest]}
    causes: dict[str, list[Finding]] = defaultdict(list)
    above = []
    for one in found[home.host]:
        caused = [rule for rule in CAUSES_IN_GUEST.get(one.rule, ()) if rule in bad]
        if caused and one.subject in subjects:
            for rule in caused:
                causes[rule].append(one)
            one = changed(one, explains=(*one.explains, *(f"{guest}/{rule}" for rule in caused)))
        above.append(one)
    found[home.host] = above
    found[guest] = [_with_causes(one, causes.get(one.rule, ()), home) for one in found[guest]]


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
    finding = changed(finding, fix=_for_this_vm(finding.fix, home))
    if not said:
        return finding
    shown = [Excerpt(f"{home.host}: {one.source}", one.excerpt) for one in excerpts if one.excerpt]
    fresh = [one for one in dict.fromkeys(shown) if one not in finding.evidence]
    why = f"{finding.why} Behind it (known by {home.how}): {'; '.join(said)}.".strip()
    return changed(finding, evidence=(*finding.evidence, *fresh), why=why)


def _for_this_vm(fix: Fix | None, home: Home) -> Fix | None:
    """Put the VM's id and its hypervisor's name into steps that were written without knowing them."""
    if fix is None or not home.config.vmid.isdigit():
        return fix
    steps = [
        f"# on {home.host}" if step.startswith(UNKNOWN_HOME) else step.replace("VMID", home.config.vmid)
        for step in fix.steps
    ]
    return changed(fix, steps=tuple(steps))


def _sets_clique(config: VmConfig) -> bool:
    words = vm_arguments(config)
    return any(one.name == CLIQUE for one in device_sets(words)) or any(CLIQUE in word for word in words)


def _without_home(findings: list[Finding], reason: str) -> list[Finding]:
    bad = {one.rule for one in findings}
    if "D1" in bad or bad.isdisjoint(_NEEDS_HOME):
        return findings
    more = f"The VM settings behind it are not known: {reason}."
    return [changed(one, why=f"{one.why} {more}".strip()) if one.rule in _NEEDS_HOME else one for one in findings]
